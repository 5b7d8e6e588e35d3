"""The same run twice is the same run; sharing makes it another one; a node killed anywhere ends where it would have."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from swarms import ELSEWHERE

from rl_swarm import settings
from rl_swarm.experiment import Experiment, create_experiment, open_experiment
from rl_swarm.host import Host
from rl_swarm.monitor.status import metric_rows
from rl_swarm.policies import open_policy
from rl_swarm.simulate import simulate
from rl_swarm.stores.folder import FolderStore
from rl_swarm.stores.memory import MemoryStore
from rl_swarm.tasks import open_tasks

# Times, and the name of the run, which is drawn when an experiment is made.
TIMES = ("timestamp", "seconds", "run")
NODES = ["n0", "n1", "n2"]


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def swarm(rounds: int, **given: Any) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Metrics rows and final state of each node of a simulated swarm."""
    loaded = settings.load({"num_train_samples": 2, "num_generations": 4, "learning_rate": 1e-3, **given})
    experiment = create_experiment(MemoryStore(), "x", {}, 0.0)
    assert loaded.tasks is not None
    host = Host(experiment, NODES, open_tasks(loaded.tasks, "default"), open_policy(loaded, NODES), loaded)
    rows = simulate(experiment, [host], rounds)
    return timeless(rows), {node: host.policy.save(node, {}) for node in NODES}


@pytest.mark.torch
def test_the_same_seed_gives_the_same_weights_and_metrics() -> None:
    first, second = (swarm(3, model_name="pico", num_transplant_trees=2) for _ in range(2))
    assert first == second


@pytest.mark.torch
def test_another_seed_gives_another_run() -> None:
    rows = [swarm(1, model_name="pico", seed=seed)[0] for seed in (1, 2)]
    assert rows[0] != rows[1]


@pytest.mark.torch
def test_sharing_changes_the_weights_after_one_round_and_every_row_accounts_for_it() -> None:
    alone_rows, alone = swarm(1, model_name="pico", num_transplant_trees=0, num_generations=8)
    shared_rows, shared = swarm(1, model_name="pico", num_transplant_trees=4, num_generations=8)
    assert sum(row["external_used"] for row in shared_rows) > 0
    for row in alone_rows + shared_rows:
        assert row["external_used"] + sum(row["external_missing"].values()) == row["external_wanted"]
        node = row["node_id"]
        assert (alone[node] != shared[node]) == (shared_rows[NODES.index(node)]["external_used"] > 0)
    # The same questions and answers, so the difference is the peers' groups and nothing else.
    assert [row["my_reward"] for row in alone_rows] == [row["my_reward"] for row in shared_rows]


# A worker that ends itself with SIGKILL just before its n-th write to the store, driven to the end of an experiment.
DRIVER = """
import os, signal, sys
from pathlib import Path
from rl_swarm import run, settings, waiting
from rl_swarm.stores.folder import FolderStore

class Killing(FolderStore):
    writes = int(os.environ["KILL_AT"])
    def _count(self, key):
        if "/peers/" in key: return            # beats come from another thread, at any time
        Killing.writes -= 1
        if Killing.writes == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    def put(self, key, value): self._count(key); super().put(key, value)
    def create(self, key, value): self._count(key); super().create(key, value)
    def append(self, key, line): self._count(key); super().append(key, line)

loaded = settings.load()
store = Killing(Path(loaded.gdrive_path))
nodes = os.environ["NODES"].split()
run.work(loaded, nodes, waiting.Stop(), waiting.Watcher(), store)
print("writes left", Killing.writes)
"""
# So that there is something to share: a peer whose files lie there before the worker starts.
SETTINGS = {
    "EXPERIMENT_NAME": "x",
    "COORDINATOR_PACE": "free",
    "NUM_TRAIN_SAMPLES": "2",
    "NUM_GENERATIONS": "4",
    "NUM_TRANSPLANT_TREES": "2",
    "MAX_ROUNDS": "4",
    "CHECKPOINT_INTERVAL": "2",
    "LEARNING_RATE": "1e-3",
    "EVAL_EVERY": "2",
    "EVAL_QUESTIONS": "4",
}


def prepare(root: Path, model: str) -> Experiment:
    """An experiment in which an honest peer has published round 0."""
    root.mkdir()
    experiment = create_experiment(FolderStore(root), "x", {}, 0.0)
    loaded = settings.load({"model_name": model, "num_train_samples": 3, "num_generations": 4, "seed": 5})
    assert loaded.tasks is not None
    host = Host(experiment, ["peer"], open_tasks(loaded.tasks, "default"), open_policy(loaded, ["peer"]), loaded)
    simulate(experiment, [host], 1)
    # It is still there, only slow: without a common clock nobody reads from those who left.
    key = experiment.peer_key("peer")
    peer = experiment.read_lease(key)
    experiment.write_lease(key, msgspec.structs.replace(peer, left=False, process=ELSEWHERE))
    return experiment


def drive(root: Path, model: str, nodes: str, kill_at: int) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        **SETTINGS,
        "GDRIVE_PATH": str(root),
        "MODEL_NAME": model,
        "NODES": nodes,
        "KILL_AT": str(kill_at),
    }
    return subprocess.run([sys.executable, "-c", DRIVER], env=env, capture_output=True, text=True, timeout=120)


def learned_state(checkpoint: bytes) -> object:
    """What a checkpoint holds, in a form that compares exactly; without its note, which names the run."""
    if checkpoint.startswith(b"{"):
        return json.loads(checkpoint)["logits"]
    import torch

    state = torch.load(io.BytesIO(checkpoint), weights_only=True)
    parts = {
        part: {name: t.numpy().tobytes() for name, t in state[part].items()} for part in ("weights", "first", "second")
    }
    return {**parts, "steps": float(state["steps"])}


def outcome(root: Path, nodes: str) -> dict[str, Any]:
    """Rows, rewards, rollouts without their times, and the last checkpoint of each node."""
    experiment = open_experiment(FolderStore(root), "x")
    found: dict[str, Any] = {}
    for node in nodes.split():
        found[f"{node} rows"] = timeless(metric_rows(experiment, node))
        found[f"{node} state"] = learned_state(experiment.read_checkpoint(node, 3))
    files = sorted((root / "experiments" / "x").rglob("r*/round_*/stage_0/*.json"))
    for file in files:
        record = json.loads(file.read_text())
        found[str(file.relative_to(root))] = {
            k: v for k, v in record.items() if k not in ("timestamp", "submitted_at", "run")
        }
    return found


def compare_killed_with_unharmed(tmp_path: Path, model: str, nodes: str, kills: list[int] | None) -> None:
    prepare(tmp_path / "unharmed", model)
    unharmed = drive(tmp_path / "unharmed", model, nodes, 1_000_000)
    assert unharmed.returncode == 0, unharmed.stderr
    expected = outcome(tmp_path / "unharmed", nodes)
    assert all(len(expected[f"{node} rows"]) == 4 for node in nodes.split())
    assert any(row["external_used"] for node in nodes.split() for row in expected[f"{node} rows"])
    total = 1_000_000 - int(unharmed.stdout.rpartition("writes left")[2])
    for kill_at in kills or range(1, total + 1):
        root = tmp_path / f"killed_{kill_at}"
        prepare(root, model)
        killed = drive(root, model, nodes, kill_at)
        assert killed.returncode == -signal.SIGKILL, f"write {kill_at} of {total}: {killed.stderr}"
        again = drive(root, model, nodes, 1_000_000)
        assert again.returncode == 0, f"write {kill_at}: {again.stderr}"
        assert outcome(root, nodes) == expected, f"killed before write {kill_at} of {total}"


@pytest.mark.slow
def test_a_worker_killed_before_any_of_its_writes_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    compare_killed_with_unharmed(tmp_path, "toy", "solo", None)


@pytest.mark.torch
def test_the_same_for_weights_of_a_real_model_and_for_two_nodes_in_one_process(tmp_path: Path) -> None:
    # One kill in each phase of a round after the first checkpoint: before publishing, choosing, recording, saving.
    compare_killed_with_unharmed(tmp_path, "pico", "one two", [25, 27, 29, 33, 36, 39])
