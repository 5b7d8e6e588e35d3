"""Experiments from Python, as notebooks know it: by the root's path and the experiment's name."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pandas as pd

from rl_swarm import settings
from rl_swarm.errors import SwarmError
from rl_swarm.experiment import Experiment, create_experiment, open_experiment
from rl_swarm.experiment import list_experiments as _names
from rl_swarm.export import summary
from rl_swarm.monitor.status import cumulative_rewards, experiment_status, metric_rows
from rl_swarm.stores import open_store


def init_experiment(gdrive_path: str, experiment_name: str, **overrides: Any) -> dict[str, Any]:
    """Make an experiment; settings as keyword arguments in lower case. Raises if it exists."""
    loaded = settings.load(overrides | {"gdrive_path": str(gdrive_path), "experiment_name": experiment_name})
    store = open_store(loaded.gdrive_path, create=True)
    experiment = create_experiment(store, experiment_name, settings.public(loaded), time.time())
    return {"experiment": experiment.name, "run": experiment.run, "path": str(gdrive_path)}


def list_experiments(gdrive_path: str) -> list[str]:
    return _names(open_store(str(gdrive_path)))


def get_experiment_status(gdrive_path: str, experiment_name: str) -> dict[str, Any]:
    """Round, stage, peers, rewards. A missing experiment is {"error": "..."}."""
    try:
        return experiment_status(_open(gdrive_path, experiment_name))
    except SwarmError as error:
        return {"error": str(error)}


def get_experiment_metrics(gdrive_path: str, experiment_name: str) -> pd.DataFrame:
    """One row per node and round: round, stage, node_id, my_reward, timestamp, and the rest of the metrics."""
    rows = metric_rows(_open(gdrive_path, experiment_name))
    frame: pd.DataFrame = (
        pd.DataFrame(rows) if rows else pd.DataFrame(columns=["round", "stage", "node_id", "my_reward", "timestamp"])
    )
    return frame


def get_cumulative_rewards(gdrive_path: str, experiment_name: str) -> dict[str, float]:
    """Each node's sum of own rewards over rounds."""
    rewards = cumulative_rewards(_open(gdrive_path, experiment_name))
    return {node: sum(values) for node, values in rewards.items()}


def export_experiment_summary(gdrive_path: str, experiment_name: str, output_path: str | None = None) -> dict[str, Any]:
    """Status and settings, also written as JSON where `output_path` is given."""
    found = summary(_open(gdrive_path, experiment_name))
    if output_path is not None:
        Path(output_path).write_text(json.dumps(found, indent=2) + "\n")
    return found


def compare_experiments(gdrive_path: str, experiment_names: list[str]) -> pd.DataFrame:
    """One row per experiment: rounds, nodes, mean and cumulative own reward, last held-out reward."""
    rows = []
    for name in experiment_names:
        frame = get_experiment_metrics(gdrive_path, name)
        held_out = frame["eval_reward"].dropna() if "eval_reward" in frame else pd.Series(dtype=float)
        last = frame.loc[held_out.index] if len(held_out) else frame.iloc[:0]
        newest = last[last["round"] == last["round"].max()] if len(last) else last
        rows.append(
            {
                "experiment": name,
                "rounds": int(frame["round"].nunique()),
                "nodes": int(frame["node_id"].nunique()),
                "mean_reward": float(frame["my_reward"].mean()) if len(frame) else float("nan"),
                "cumulative_reward": float(frame["my_reward"].sum()),
                "final_eval_reward": float(newest["eval_reward"].mean()) if len(newest) else float("nan"),
            }
        )
    table: pd.DataFrame = pd.DataFrame(rows)
    return table


def cleanup_experiment(gdrive_path: str, experiment_name: str) -> int:
    """Delete an experiment with everything in it; returns how many files that were."""
    return _open(gdrive_path, experiment_name).delete()


def _open(gdrive_path: str, experiment_name: str) -> Experiment:
    return open_experiment(open_store(str(gdrive_path)), experiment_name)
