"""Real processes on a real folder, started by the commands users type."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from rgym_exp.utils.experiment_manager import get_experiment_status
from rl_swarm.experiment import Experiment, open_experiment
from rl_swarm.monitor.status import metric_rows
from rl_swarm.stores.folder import FolderStore
from rl_swarm.types import Step

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
LAUNCHER = [sys.executable, "-m", "rgym_exp.runner.swarm_launcher"]
PATIENCE = 120.0


def environment(root: Path, **given: object) -> dict[str, str]:
    shared = {"GDRIVE_PATH": root, "EXPERIMENT_NAME": "trial", "COORDINATOR_JOIN_GRACE": 4, "LEASE_SECONDS": 4}
    return {**os.environ, **{name: str(value) for name, value in (shared | given).items()}}


@contextmanager
def started(env: Mapping[str, str], **given: object) -> Iterator[subprocess.Popen[str]]:
    """A node as its user starts it; whatever happens, it does not outlive the test."""
    node = subprocess.Popen(
        LAUNCHER,
        cwd=ROOT,
        env={**env, **{name: str(value) for name, value in given.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield node
    finally:
        if node.poll() is None:
            node.kill()
        node.communicate()


def ended(node: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = node.communicate(timeout=PATIENCE)
    return node.returncode, output


def until(claim: Callable[[], Any]) -> None:
    """Wait for other processes to make something true."""
    deadline = time.monotonic() + PATIENCE
    while not claim():
        assert time.monotonic() < deadline, f"still not true after {PATIENCE:.0f} s"
        time.sleep(0.02)


def current_round(root: Path) -> int:
    status = get_experiment_status(str(root), "trial")
    return -1 if "error" in status else int(status["current_round"])


def trial(root: Path) -> Experiment:
    return open_experiment(FolderStore(root), "trial")


def validate(root: Path, rounds: int, nodes: int, transplants: int) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, "rgym_exp/test/validate_test_run.py", "--gdrive-path", str(root), "--experiment", "trial"]
    numbers = ["--rounds", str(rounds), "--nodes", str(nodes), "--transplants", str(transplants)]
    return subprocess.run([*script, *numbers], cwd=ROOT, capture_output=True, text=True, timeout=60)


def run_launchers(root: Path, model: str) -> None:
    """One coordinator and four workers, as the launcher's users type them."""
    env = environment(root, MODEL_NAME=model, TEST_MODE=True, NUM_TRANSPLANT_TREES=2)
    with ExitStack() as stack:
        nodes = [stack.enter_context(started(env, NODE_ROLE="coordinator", NODE_ID="coordinator_0"))]
        nodes += [
            stack.enter_context(started(env, NODE_ROLE="worker", NODE_ID=f"worker_{number}")) for number in range(1, 5)
        ]
        for node in nodes:
            code, output = ended(node)
            assert code == 0, output


def remove_a_row(log: Path) -> None:
    log.write_text("".join(log.read_text().splitlines(keepends=True)[1:]))


def forget_sharing(log: Path) -> None:
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    for row in rows:
        row |= {"external_used": 0, "external_missing": {"not_published": row["external_wanted"]}}
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_five_processes_finish_and_validation_sees_what_is_taken_away(tmp_path: Path) -> None:
    root = tmp_path / "swarm"
    run_launchers(root, "toy")
    passed = validate(root, 3, 5, 2)
    assert passed.returncode == 0, passed.stdout
    folder = root / "experiments" / "trial"
    damages: list[tuple[Path, Callable[[Path], None], str]] = [
        (folder / "rollouts/round_1/stage_0/worker_2.json", Path.unlink, "no rollout file of worker_2"),
        (folder / "rewards/round_2/stage_0/worker_4.json", Path.unlink, "no reward of worker_4"),
        (folder / "logs/worker_3/metrics.jsonl", remove_a_row, "0 metrics rows of worker_3"),
    ]
    for path, damage, reason in damages:
        before = path.read_bytes()
        damage(path)
        failed = validate(root, 3, 5, 2)
        assert failed.returncode == 1
        assert reason in failed.stdout
        path.write_bytes(before)
    assert validate(root, 3, 5, 2).returncode == 0
    assert validate(root, 4, 5, 2).returncode == 1, "a fourth round was never played"
    assert validate(root, 3, 6, 2).returncode == 1, "there is no sixth node"
    for number in range(1, 5):
        forget_sharing(folder / f"logs/worker_{number}/metrics.jsonl")
    failed = validate(root, 3, 5, 2)
    assert failed.returncode == 1
    assert "nothing was shared" in failed.stdout


@pytest.mark.torch
def test_five_processes_with_the_embedded_model_share_and_finish(tmp_path: Path) -> None:
    root = tmp_path / "swarm"
    run_launchers(root, "pico")
    passed = validate(root, 3, 5, 2)
    assert passed.returncode == 0, passed.stdout
    gaps = [row["logprob_gap"] for row in metric_rows(trial(root)) if row["informative_local"]]
    assert gaps and all(gap < 1e-4 for gap in gaps)


def test_a_coordinator_killed_and_restarted_goes_on_at_its_round(tmp_path: Path) -> None:
    env = environment(tmp_path, MODEL_NAME="toy", MAX_ROUNDS=10_000, COORDINATOR_JOIN_GRACE=0)
    with started(env, NODE_ROLE="worker", NODE_ID="worker_1"):
        with started(env, NODE_ROLE="coordinator", NODE_ID="first") as coordinator:
            until(lambda: current_round(tmp_path) >= 3)
            coordinator.kill()
            coordinator.wait()
        at_death = current_round(tmp_path)
        with started(env, NODE_ROLE="coordinator", NODE_ID="second"):
            until(lambda: current_round(tmp_path) >= at_death + 3)
    rounds = [row["round"] for row in metric_rows(trial(tmp_path))]
    assert rounds == list(range(len(rounds))), "no round lost, none twice, none again"


def test_a_second_coordinator_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    env = environment(tmp_path, MODEL_NAME="toy")
    with started(env, NODE_ROLE="coordinator", NODE_ID="first") as first:
        until(lambda: current_round(tmp_path) == 0)
        with started(env, NODE_ROLE="coordinator", NODE_ID="second") as second:
            code, output = ended(second)
        assert code == 1
        assert "has a coordinator already: first" in output
        assert first.poll() is None


def test_a_second_node_of_one_name_is_refused_and_takes_over_after_a_death(tmp_path: Path) -> None:
    env = environment(tmp_path, MODEL_NAME="toy", MAX_ROUNDS=10_000, COORDINATOR_JOIN_GRACE=0)
    with started(env, NODE_ROLE="coordinator", NODE_ID="clock"):
        with started(env, NODE_ROLE="worker", NODE_ID="twin") as first:
            until(lambda: current_round(tmp_path) >= 2)
            with started(env, NODE_ROLE="worker", NODE_ID="twin") as second:
                code, output = ended(second)
            assert code == 1
            assert "The node name twin is taken by process" in output
            first.kill()
            first.wait()
        at_death = current_round(tmp_path)
        with started(env, NODE_ROLE="worker", NODE_ID="twin"):
            until(lambda: current_round(tmp_path) >= at_death + 2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_round_writes_a_checkpoint_and_releases_the_name(
    tmp_path: Path, number: signal.Signals
) -> None:
    env = environment(tmp_path, MODEL_NAME="toy", MAX_ROUNDS=10_000, COORDINATOR_PACE="free", CHECKPOINT_INTERVAL=0)
    with started(env, NODE_ROLE="worker", NODE_ID="solo") as node:
        until(lambda: len(metric_rows(trial(tmp_path))) >= 3 if current_round(tmp_path) >= 0 else False)
        node.send_signal(number)
        code, output = ended(node)
    assert code == 0, output
    experiment = trial(tmp_path)
    last = metric_rows(experiment)[-1]["round"]
    assert experiment.checkpoint_rounds("solo") == [last]
    peer = experiment.peers().known["solo"]
    assert peer.left
    assert peer.learned == (last, 0)
    with started({**env, "MAX_ROUNDS": str(last + 3)}, NODE_ROLE="worker", NODE_ID="solo") as node:
        code, output = ended(node)
    assert code == 0, output
    assert f"resumed from the checkpoint of round {last}" in output
    assert [row["round"] for row in metric_rows(experiment)] == list(range(last + 3))


def test_a_worker_waits_for_an_experiment_that_is_not_there_yet_and_says_so(tmp_path: Path) -> None:
    env = environment(tmp_path, MODEL_NAME="toy", MAX_ROUNDS=2, COORDINATOR_JOIN_GRACE=0)
    with started(env, NODE_ROLE="worker", NODE_ID="early") as worker:
        assert worker.stdout is not None
        assert "Waiting for the coordinator" in worker.stdout.readline()
        with started(env, NODE_ROLE="coordinator", NODE_ID="clock") as coordinator:
            assert ended(worker)[0] == 0
            assert ended(coordinator)[0] == 0
    assert [row["round"] for row in metric_rows(trial(tmp_path))] == [0, 1]


def test_workers_meet_without_any_coordinator_at_their_own_pace(tmp_path: Path) -> None:
    env = environment(
        tmp_path, MODEL_NAME="toy", MAX_ROUNDS=60, COORDINATOR_PACE="free", NUM_TRANSPLANT_TREES=2, NODE_ROLE="worker"
    )
    with started(env, NODE_ID="a") as a, started(env, NODE_ID="b") as b:
        assert ended(a)[0] == 0
        assert ended(b)[0] == 0
    rows = metric_rows(trial(tmp_path))
    assert len(rows) == 120
    assert any(row["external_used"] for row in rows)


def test_hosting_runs_nodes_and_clock_in_one_process(tmp_path: Path) -> None:
    flags = ["--nodes", "3", "--node-id", "big", "--gdrive-path", str(tmp_path), "--experiment-name", "trial"]
    flags += ["--model-name", "toy", "--max-rounds", "5", "--num-transplant-trees", "2"]
    command = [sys.executable, "-m", "rl_swarm.cli", "host", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    experiment = trial(tmp_path)
    state = experiment.state()
    assert state is not None and state.finished and state.step == Step(4, 0)
    assert sorted(experiment.peers().known) == ["big_0", "big_1", "big_2", "big_coordinator"]
    assert len(metric_rows(experiment)) == 15


def test_a_missing_parent_folder_is_one_clear_sentence(tmp_path: Path) -> None:
    env = environment(tmp_path / "not" / "mounted", MODEL_NAME="toy")
    for role in ("coordinator", "worker"):
        with started(env, NODE_ROLE=role, NODE_ID="n") as node:
            code, output = ended(node)
        assert code == 1
        assert output.count("\n") == 1
        assert "does not exist" in output


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own that can be filled and made read-only."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"needs the right to mount a file system: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_read_only_disk_is_waited_for_and_no_round_is_lost(small_disk: Path) -> None:
    def remount(mode: str) -> None:
        # Refused while a file is open for writing, so it takes a few tries beside a busy node.
        command = ["mount", "-o", f"remount,{mode}", str(small_disk)]
        until(lambda: subprocess.run(command, capture_output=True).returncode == 0)

    survive_trouble(small_disk, lambda: remount("ro"), lambda: remount("rw"), "read-only")


def test_a_full_disk_is_waited_for_and_no_round_is_lost(small_disk: Path) -> None:
    filler = small_disk / "filler"

    def fill() -> None:
        with open(filler, "wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"x" * 4096)

    survive_trouble(small_disk, fill, filler.unlink, "disk is full")


def survive_trouble(disk: Path, harm: Callable[[], None], mend: Callable[[], None], said: str) -> None:
    """A lone worker meets trouble in the middle of its run, says so, and goes on when it is over."""
    env = environment(disk, MODEL_NAME="toy", MAX_ROUNDS=10_000, COORDINATOR_PACE="free")
    with started(env, NODE_ROLE="worker", NODE_ID="solo") as node:
        assert node.stdout is not None
        until(lambda: len(metric_rows(trial(disk))) >= 3 if current_round(disk) >= 0 else False)
        harm()
        for line in node.stdout:
            if said in line:
                break
        else:
            pytest.fail("the node ended instead of waiting")
        rows = metric_rows(trial(disk))
        assert [row["round"] for row in rows] == list(range(len(rows))), "every line in the log is whole"
        mend()
        until(lambda: len(metric_rows(trial(disk))) >= len(rows) + 3)
        node.send_signal(signal.SIGTERM)
        assert ended(node)[0] == 0
    rows = metric_rows(trial(disk))
    assert [row["round"] for row in rows] == list(range(len(rows)))
    assert not list(disk.rglob(".tmp-*"))


def test_the_coordinator_process_never_loads_torch(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from rl_swarm import run, settings, waiting\n"
        "stop = waiting.Stop()\n"
        "class Once(waiting.Watcher):\n"
        "    def say(self, line):\n"
        "        if 'live worker' in line: stop.request()\n"
        "run.coordinate(settings.load({'node_id': 'clock'}), stop, Once())\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment(tmp_path), capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
