"""Resume is exact, with the real command: six rounds straight, and three, SIGKILL, three, end bit for bit the same."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_swarm.experiment import Experiment, open_experiment
from rl_swarm.models import PICO_FOLDER
from rl_swarm.policies.saving import from_bytes
from rl_swarm.stores.folder import FolderStore

pytestmark = [pytest.mark.torch, pytest.mark.slow]

COMMON = {"MODEL_NAME": "pico", "MAX_ROUNDS": "6", "NUM_TRAIN_SAMPLES": "2", "NUM_GENERATIONS": "4", "DEVICE": "cpu"}
COMMON |= {"EXPERIMENT_NAME": "x", "NODE_ID": "n", "CHECKPOINT_INTERVAL": "2", "CHECKPOINT_KEEP": "3"}
COMMON |= {"COORDINATOR_JOIN_GRACE": "0", "LEASE_SECONDS": "2", "LEARNING_RATE": "1e-3", "NUM_TRANSPLANT_TREES": "2"}
COMMON |= {"OMP_NUM_THREADS": "1"}


def start(root: Path, nodes: int, **changes: str) -> subprocess.Popen[str]:
    env = {**os.environ, **COMMON, "GDRIVE_PATH": str(root), **changes}
    command = [sys.executable, "-m", "rl_swarm.cli", "host", "--nodes", str(nodes)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


def experiment(root: Path) -> Experiment:
    return open_experiment(FolderStore(root), "x")


def kill_after(root: Path, process: subprocess.Popen[str], nodes: int, round: int) -> None:
    """SIGKILL as soon as every node has recorded this round."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        logs = [root / "experiments" / "x" / "logs" / f"n_{k}" / "metrics.jsonl" for k in range(nodes)]
        if all(log.is_file() and len(log.read_text().splitlines()) > round for log in logs):
            process.kill()
            process.communicate()
            assert process.returncode == -signal.SIGKILL
            return
        time.sleep(0.02)
    process.kill()
    raise AssertionError("it never came so far")


def learned(root: Path, node: str) -> dict[str, object]:
    """Weights and optimiser after the last round, in a form that compares exactly."""
    state, note = from_bytes(experiment(root).read_checkpoint(node, 5))
    assert note["round"] == 5
    found: dict[str, object] = {"steps": float(state["steps"])}
    for part in ("weights", "first", "second"):
        found |= {f"{part} {name}": tensor.numpy().tobytes() for name, tensor in state[part].items()}
    return found


@pytest.mark.parametrize("nodes", [1, 4])
def test_three_rounds_sigkill_and_three_more_are_six_rounds(nodes: int, tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    finish(start(straight, nodes))
    kill_after(killed, process := start(killed, nodes), nodes, 2)
    assert process.returncode == -signal.SIGKILL
    output = finish(start(killed, nodes))
    assert "resumed from the checkpoint of round" in output or "doing rounds 0 to" in output
    for k in range(nodes):
        assert learned(killed, f"n_{k}") == learned(straight, f"n_{k}")
        assert [row["round"] for row in experiment(killed).metrics(f"n_{k}").rows] == list(range(6))
    if nodes > 1:
        assert any(row["external_used"] for row in experiment(killed).metrics("n_0").rows)


def test_a_damaged_newest_checkpoint_is_passed_over_with_a_sentence_and_nothing_is_lost(tmp_path: Path) -> None:
    straight, damaged = tmp_path / "straight", tmp_path / "damaged"
    finish(start(straight, 1))
    finish(start(damaged, 1, MAX_ROUNDS="4"))
    path = damaged / "experiments" / "x" / "checkpoints" / "round_3" / "n_0.pt"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    output = finish(start(damaged, 1))
    assert "passing over the checkpoint of round 3 of n_0: not a whole checkpoint" in output
    assert "n_0 resumed from the checkpoint of round 1" in output
    assert learned(damaged, "n_0") == learned(straight, "n_0")


def test_three_updates_that_are_no_numbers_end_the_node_with_the_reason_and_keep_its_weights(tmp_path: Path) -> None:
    """A model whose scores overflow: what it samples has no probability, and every gradient would be NaN."""
    folder, root = tmp_path / "model", tmp_path / "root"
    shutil.copytree(PICO_FOLDER, folder)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.norm.weight": weights["model.norm.weight"] * 1e38}, folder / "model.safetensors")
    chosen = {"MODEL_NAME": str(folder), "TASKS": "arithmetic", "MAX_NEW_TOKENS": "8", "CHECKPOINT_INTERVAL": "1"}
    process = start(root, 1, **chosen, MAX_ROUNDS="50")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert "not a finite number" in output and "LEARNING_RATE" in output and "Traceback" not in output
    rows = experiment(root).metrics("n_0").rows
    assert [(row["round"], row["dropped_updates"], row["updated"]) for row in rows] == [(r, 1, 0.0) for r in range(3)]
    kept = from_bytes(experiment(root).read_checkpoint("n_0", 1))[0]["weights"]
    assert all(torch.equal(kept[name], weight) for name, weight in load_file(folder / "model.safetensors").items())


def test_another_lora_rank_is_refused_and_other_settings_are_said(tmp_path: Path) -> None:
    finish(start(tmp_path, 1, MAX_ROUNDS="2"))
    process = start(tmp_path, 1, LORA_RANK="4")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2, output
    assert "LORA_RANK=4 is not allowed for n_0" in output and "made with 0" in output
    assert experiment(tmp_path).checkpoint_rounds("n_0") == [1]
    output = finish(start(tmp_path, 1, LEARNING_RATE="1e-5", MAX_ROUNDS="3"))
    assert "n_0 was last started otherwise: LEARNING_RATE was 0.001 and is 1e-05" in output
