"""The checks of a test run: a complete one passes, and whatever is taken away is named."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from swarms import a_peer, toy_run

from rgym_exp.test.validate_test_run import main as older_command
from rl_swarm.cli import main
from rl_swarm.experiment import Experiment
from rl_swarm.monitor.validate import Check, report, validate
from rl_swarm.records import State
from rl_swarm.stores.folder import FolderStore
from rl_swarm.stores.memory import MemoryStore

ROUNDS, J = 3, 2


def finished_run(root: Path, **given: Any) -> Experiment:
    """Three workers and a coordinator, as a real swarm would leave them."""
    chosen = {"max_rounds": ROUNDS, "num_transplant_trees": J, "num_generations": 8, **given}
    experiment, _ = toy_run(FolderStore(root, durable=False), **chosen)
    clock = a_peer(experiment, "clock", node_role="coordinator", left=True)
    experiment.write_lease(experiment.peer_key("clock"), clock)
    return experiment


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    return finished_run(tmp_path)


def validated(root: Path, rounds: int = ROUNDS, nodes: int = 4, transplants: int = J) -> int:
    numbers = ["--rounds", str(rounds), "--nodes", str(nodes), "--transplants", str(transplants)]
    return main(["validate", "trial", "--gdrive-path", str(root), *numbers])


@pytest.mark.usefixtures("experiment")
def test_a_complete_run_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert validated(tmp_path) == 0
    names = ["peers", "clock", "rollouts", "rewards", "metrics", "sharing"]
    assert capsys.readouterr().out.splitlines() == [f"ok     {name}" for name in names]


@pytest.mark.parametrize("frequency", ["generation", "round"])
def test_so_does_one_published_otherwise_and_in_stages(tmp_path: Path, frequency: str) -> None:
    finished_run(tmp_path, rollout_publish_frequency=frequency, max_stages=2)
    assert validated(tmp_path) == 0
    (tmp_path / "experiments/trial/rewards/round_1/stage_1/bob.json").unlink()
    assert validated(tmp_path) == 1, "every stage is looked at"


@pytest.mark.usefixtures("experiment")
@pytest.mark.parametrize("transplants", [[], ["--transplants", str(J)]])
def test_the_older_command_says_the_same(
    tmp_path: Path, transplants: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--gdrive-path", str(tmp_path), "--experiment", "trial", "--rounds", "3", "--nodes", "4", *transplants]
    monkeypatch.setattr(sys, "argv", ["validate_test_run.py", *words])
    assert older_command() == 0
    assert ("sharing" in capsys.readouterr().out) == bool(transplants)
    (tmp_path / "experiments/trial/rewards/round_1/stage_0/bob.json").unlink()
    assert older_command() == 1


def edited(path: str, edit: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        lines = (folder / path).read_text().splitlines(keepends=True)
        (folder / path).write_text("".join(edit(lines)))

    return damage


def changed(path: str, **changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / path).write_text(json.dumps({**json.loads((folder / path).read_text()), **changes}) + "\n")

    return damage


def in_row(**changes: Any) -> Callable[[list[str]], list[str]]:
    return lambda lines: [json.dumps({**json.loads(lines[0]), **changes}) + "\n", *lines[1:]]


METRICS, ROLLOUTS = "logs/bob/metrics.jsonl", "rollouts/round_1/stage_0/bob.json"
DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a rollout file removed": (
        lambda folder: (folder / ROLLOUTS).unlink(), "rollouts", "round 1 stage 0: no rollout file of bob"
    ),
    "a rollout file cut short": (
        edited(ROLLOUTS, lambda lines: [lines[0][:-9]]), "rollouts", "bob.json: not_json"
    ),
    "a rollout file of another run": (changed(ROLLOUTS, run="another"), "rollouts", "bob.json: wrong_run"),
    "a rollout file without groups": (changed(ROLLOUTS, rollouts={}), "rollouts", "no completions in it"),
    "a group without completions": (changed(ROLLOUTS, rollouts={"0": []}), "rollouts", "no completions in it"),
    "a rollout file of no node": (
        lambda folder: (folder / ROLLOUTS).with_name("..json").touch(), "rollouts", "a rollout file with a bad name"
    ),
    "a reward removed": (
        lambda folder: (folder / "rewards/round_2/stage_0/ada.json").unlink(),
        "rewards",
        "round 2 stage 0: no reward of ada",
    ),
    "a row removed": (
        edited(METRICS, lambda lines: lines[:-1]), "metrics", "round 2 stage 0: 0 metrics rows of bob, 1 expected"
    ),
    "all rows removed": (
        lambda folder: (folder / METRICS).unlink(), "metrics", "round 0 stage 0: 0 metrics rows of bob, 1 expected"
    ),
    "a row doubled": (
        edited(METRICS, lambda lines: [lines[0], *lines]), "metrics", "round 0 stage 0: 2 metrics rows of bob, 1"
    ),
    "a row torn": (edited(METRICS, lambda lines: ["{\n", *lines]), "metrics", "bob: 1 unreadable lines"),
    "a reward above one": (edited(METRICS, in_row(my_reward=1.5)), "metrics", "bob reports a reward of 1.5"),
    "groups not accounted for": (
        edited(METRICS, in_row(external_used=0, external_missing={})), "sharing", "does not account for all of its 2"
    ),
    "other groups wanted": (
        edited(METRICS, in_row(external_wanted=0, external_used=0, external_missing={})),
        "sharing",
        "round 0: bob wanted 0 groups of its peers, 2 expected",
    ),
    "a node never registered": (
        lambda folder: (folder / "peers/clock.json").unlink(), "peers", "4 nodes expected, 3 registered: ada, bob, cleo"
    ),
    "no clock": (
        lambda folder: (folder / "state/current_state.json").unlink(), "clock", "no coordinator ever wrote the state"
    ),
    "a clock that stopped": (
        changed("state/current_state.json", round=1, finished=False), "clock", "stands at round 1, 3 rounds expected"
    ),
    "not finished": (changed("state/current_state.json", finished=False), "clock", "the experiment is not finished"),
}  # fmt: skip


@pytest.mark.usefixtures("experiment")
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_missing_is_named_and_the_exit_code_is_1(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    do, check, reason = DAMAGES[damage]
    do(tmp_path / "experiments/trial")
    assert validated(tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"FAILED {check}" in lines
    assert any(reason in line for line in lines[lines.index(f"FAILED {check}") + 1 :]), lines
    others = [line for line in lines if line.startswith("FAILED") and line != f"FAILED {check}"]
    assert others in ([], ["FAILED sharing"]), "a damage shows where it is"


def test_a_run_in_which_no_peers_group_was_used_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment, _ = toy_run(FolderStore(tmp_path, durable=False), ["ada"], num_transplant_trees=J, max_rounds=ROUNDS)
    assert {row["external_used"] for row in experiment.metrics("ada").rows} == {0}
    assert validated(tmp_path, nodes=1) == 1
    assert "no node used a single group of a peer: nothing was shared" in capsys.readouterr().out
    assert validated(tmp_path, nodes=1, transplants=0) == 0


@pytest.mark.usefixtures("experiment")
def test_more_rounds_or_nodes_than_there_were_are_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert validated(tmp_path, rounds=5) == 1
    assert "the clock stands at round 2, 5 rounds expected" in capsys.readouterr().out
    assert validated(tmp_path, nodes=5) == 1
    assert validated(tmp_path, nodes=3) == 1


def test_a_clock_without_a_round_and_an_empty_swarm_are_no_traceback() -> None:
    experiment, _ = toy_run(MemoryStore(), max_rounds=1)
    experiment.write_state(State(experiment.run, 0, 0, 0.0, "clock"))
    assert [check.passed for check in validate(experiment, 1, 3)] == [True, False, True, True, True]


def test_a_report_shows_the_first_problems_and_counts_the_rest() -> None:
    shown = report([Check("a", []), Check("b", [f"problem {number}" for number in range(8)])]).splitlines()
    assert shown[:3] == ["ok     a", "FAILED b", "         problem 0"]
    assert shown[-2:] == ["         problem 4", "         and 3 more"]
