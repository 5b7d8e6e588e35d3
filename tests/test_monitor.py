"""Status, rows and curves: right for a finished run, and not to be stopped by what some node wrote into its log."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from swarms import NODES, a_peer, toy_experiment, toy_run, toy_settings

from rl_swarm.cli import main
from rl_swarm.experiment import Experiment
from rl_swarm.lease import this_process
from rl_swarm.monitor.figures import save_curves, sparkline
from rl_swarm.monitor.screen import visible
from rl_swarm.monitor.status import cumulative_rewards, experiment_status, is_active, metric_rows, reward_curve
from rl_swarm.records import Process
from rl_swarm.stores.folder import FolderStore
from rl_swarm.stores.memory import MemoryStore
from rl_swarm.types import Step


def test_the_status_of_a_finished_run() -> None:
    experiment, rows = toy_run(MemoryStore(), max_rounds=4)
    experiment.write_checkpoint("ada", 3, b"")
    status = experiment_status(experiment)
    assert (status["experiment"], status["run"]) == ("trial", experiment.run)
    assert (status["current_round"], status["current_stage"], status["finished"]) == (3, 0, True)
    assert status["num_active_peers"] == status["active_peers"] == 0
    assert status["peer_ids"] == sorted(NODES) and status["malformed_peers"] == []
    assert status["latest_checkpoint"] == "checkpoints/round_3"
    assert status["last_updated"] == 0.0
    assert status["total_metric_entries"] == 12
    for node in NODES:
        own = sum(row["my_reward"] for row in rows if row["node_id"] == node)
        assert status["cumulative_rewards"][node] == pytest.approx(own)
    assert status["total_cumulative_reward"] == pytest.approx(sum(row["my_reward"] for row in rows))
    assert json.loads(json.dumps(status)) == status


def test_the_status_of_an_experiment_that_has_not_begun() -> None:
    status = experiment_status(toy_experiment(MemoryStore(), toy_settings()))
    assert (status["current_round"], status["finished"], status["last_updated"]) == (0, False, None)
    assert (status["peer_ids"], status["cumulative_rewards"], status["latest_checkpoint"]) == ([], {}, None)


def test_looking_changes_nothing() -> None:
    experiment, _ = toy_run(MemoryStore())
    before = {key: experiment.store.get(key) for key in experiment.store.keys("")}
    experiment_status(experiment)
    metric_rows(experiment)
    assert {key: experiment.store.get(key) for key in experiment.store.keys("")} == before


def test_a_peer_is_active_until_it_has_left_or_is_known_to_be_dead() -> None:
    experiment, here = toy_experiment(MemoryStore(), toy_settings()), this_process()
    assert is_active(a_peer(experiment, "ada"))
    assert is_active(a_peer(experiment, "ada", process=here))
    assert not is_active(a_peer(experiment, "ada", left=True))
    assert not is_active(a_peer(experiment, "ada", process=Process(here.host, here.boot, here.pid, "another start")))
    assert a_peer(experiment, "ada").learned_step is None
    assert a_peer(experiment, "ada", learned=(3, 1)).learned_step == Step(3, 1)


def test_rows_come_in_the_order_of_steps_and_of_one_node_if_asked() -> None:
    experiment, rows = toy_run(MemoryStore(), max_stages=2)
    written = [{"run": experiment.run, **row} for row in rows]
    assert metric_rows(experiment) == sorted(written, key=lambda row: (row["round"], row["stage"], row["node_id"]))
    assert metric_rows(experiment, "bob") == [row for row in written if row["node_id"] == "bob"]
    assert metric_rows(experiment, "nobody") == metric_rows(experiment, "../bob") == []


def test_a_curve_is_the_mean_over_nodes_of_the_rounds_that_have_the_figure() -> None:
    rows: list[dict[str, Any]] = [
        {"round": 0, "my_reward": 0.25},
        {"round": 1, "my_reward": 0.5, "eval_reward": 0.125},
        {"round": 0, "my_reward": 0.75, "eval_reward": None},
    ]
    assert reward_curve(rows) == {0: 0.5, 1: 0.5}
    assert reward_curve(rows, "eval_reward") == {1: 0.125}


# Logs that others wrote


def line(**changes: Any) -> bytes:
    """A good row, with these changes; RUN stands for the run id."""
    row = {"run": "RUN", "round": 0, "stage": 0, "node_id": "evil", "my_reward": 0.5}
    row |= {"external_wanted": 0, "external_used": 0, "external_missing": {}}
    return json.dumps({name: value for name, value in {**row, **changes}.items() if value != "absent"}).encode() + b"\n"


BAD_LINES = {
    "no JSON": b"hello\n",
    "an empty line": b"\n",
    "a list": b"[]\n",
    "an empty row": b"{}\n",
    "no reward": line(my_reward="absent"),
    "a reward in words": line(my_reward="high"),
    "a round in words": line(round="first"),
    "a round of twenty digits": line(round=10**20),
    "another run": line(run="another"),
    "no run": line(run="absent"),
    "another's name": line(node_id="ada"),
    "a reward for another": line(node_id="ada", my_reward=1e9),
    "a held-out reward in words": line(eval_reward="high"),
    "no account of groups": line(external_missing="absent"),
    "a list of missing groups": line(external_missing=[]),
    "invalid UTF-8": b'{"round": "\xff"}\n',
    "brackets": b"[" * 100_000 + b"\n",
}


@pytest.fixture
def finished(tmp_path: Path) -> Experiment:
    return toy_run(FolderStore(tmp_path, durable=False), max_rounds=2)[0]


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_line_that_is_no_metrics_row_is_counted_and_skipped(finished: Experiment, kind: str) -> None:
    expected, totals = metric_rows(finished), cumulative_rewards(finished)
    text = (BAD_LINES[kind] + line() + b'{"torn": ').replace(b"RUN", finished.run.encode())
    finished.store.put("experiments/trial/logs/evil/metrics.jsonl", text)
    log = finished.metrics("evil")
    assert log.unreadable == 1 and len(log.rows) == 1
    assert [row for row in metric_rows(finished) if row["node_id"] != "evil"] == expected
    assert cumulative_rewards(finished) == {**totals, "evil": [0.5]}


PLANTED: dict[str, Callable[[Path], None]] = {
    "a pipe": lambda path: os.mkfifo(path),
    "a folder": lambda path: path.mkdir(),
    "a link": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", PLANTED)
def test_a_log_that_is_no_file_stops_no_reader(
    finished: Experiment, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "experiments/trial/logs/evil"
    folder.mkdir()
    PLANTED[kind](folder / "metrics.jsonl")
    assert finished.metrics("evil") == ([], 1)
    assert len(metric_rows(finished)) == 6
    assert main(["status", "trial", "--gdrive-path", str(tmp_path)]) == 0
    assert "ada" in capsys.readouterr().out


# Figures and text


def test_a_sparkline_shows_the_shape() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.0, 0.5, 1.0]) == "▁▄█"
    assert sparkline([1.0, 1.0]) == "██"
    assert sparkline([0.0, 0.0]) == "▁▁"
    assert sparkline([-1.0, 1.0]) == "▁█"
    assert len(sparkline([float(value) for value in range(1000)], width=40)) == 40


def test_curves_are_saved_as_an_image(tmp_path: Path) -> None:
    save_curves(tmp_path / "curves.png", {"alone": {0: 0.1, 5: 0.2}, "sharing": {0: 0.1, 5: 0.4}}, "title", "reward")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, √2 and \N{SNAKE}", "plain text, √2 and \N{SNAKE}"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\x9b2J", "\\x9b2J"),
        ("a\nb\r\tc\x00\x07", "a\\nb\\r\\tc\\x00\\x07"),
        ("\u202eevil", "\\u202eevil"),
        ("\udcff", "\\udcff"),
    ],
)
def test_text_from_anyone_is_shown_not_obeyed(text: str, shown: str) -> None:
    assert visible(text) == shown
