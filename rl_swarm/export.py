"""Taking results out of a store: a summary with all metrics, or a node's model as an ordinary Hugging Face folder."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

from rl_swarm.errors import CheckpointError, ModelError, SwarmError
from rl_swarm.experiment import Experiment
from rl_swarm.monitor.screen import visible
from rl_swarm.monitor.status import experiment_status, metric_rows
from rl_swarm.policies import model_folder

# What a model folder holds beside weights: configuration, tokenizer, chat template.
DESCRIPTIONS = (".json", ".jinja", ".txt", ".model")


def summary(experiment: Experiment) -> dict[str, Any]:
    return {"status": experiment_status(experiment), "settings": experiment.birth.settings}


def metrics_csv(rows: list[dict[str, Any]]) -> str:
    """Rows as CSV; nested values (seconds, reasons) as JSON in their cell."""
    # Names and texts may be anyone's: nothing in them may reach a terminal as a command to it.
    rows = [{visible(name): value for name, value in row.items()} for row in rows]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _cell(value) for name, value in row.items()})
    return text.getvalue()


def _cell(value: object) -> object:
    if value is None or isinstance(value, (int, float)):
        return value
    return visible(value if isinstance(value, str) else json.dumps(value))


def export_summary(experiment: Experiment, out: Path) -> list[Path]:
    """summary.json and metrics.csv in a folder."""
    out.mkdir(parents=True, exist_ok=True)
    files = [out / "summary.json", out / "metrics.csv"]
    files[0].write_text(json.dumps(summary(experiment), indent=2) + "\n")
    files[1].write_text(metrics_csv(metric_rows(experiment)))
    return files


def export_model(experiment: Experiment, node: str, out: Path) -> int:
    """The node's newest checkpoint as a model folder that transformers loads; returns its round."""
    peer = experiment.peers().known.get(node)
    if peer is None:
        known = ", ".join(sorted(experiment.peers().known))
        raise SwarmError(f"There is no node {node} in {experiment.name}; there are: {known}.")
    rounds = experiment.checkpoint_rounds(node)
    if not rounds:
        raise CheckpointError(f"Node {node} has no checkpoint yet.")
    if peer.model == "toy":
        raise ModelError("The toy policy is no language model: there is nothing to export.")

    from rl_swarm.policies.stacked import read_saved_weights, save_weights

    source = model_folder(peer.model)
    weights = read_saved_weights(experiment.read_checkpoint(node, rounds[-1]))
    out.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix in DESCRIPTIONS and not path.name.endswith(".index.json"):
            shutil.copyfile(path, out / path.name)
    save_weights(weights, out)
    return rounds[-1]
