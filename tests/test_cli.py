"""The command's verbs that look after experiments, as a user types them, on a small finished run."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from swarms import NODES, a_peer, toy_experiment, toy_run, toy_settings

from rl_swarm import __version__, cli
from rl_swarm.cli import main
from rl_swarm.errors import NameTaken
from rl_swarm.experiment import Experiment
from rl_swarm.monitor.screen import console
from rl_swarm.stores.folder import FolderStore

RUNNERS = ["demo", "host", "join", "coordinate"]
READERS = ["status", "peers", "rollouts", "metrics", "delete"]
VERBS = [*RUNNERS, "init", "list", *READERS, "validate", "export", "push", "bench"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir()
    return path


@pytest.fixture
def experiment(root: Path) -> Experiment:
    return toy_run(FolderStore(root, durable=False), num_generations=4, num_transplant_trees=2, eval_every=1)[0]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every command is started in an empty folder, and leaves it so unless told to write there."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    yield
    assert [path.name for path in here.iterdir() if path.name != "out"] == []


class Shell:
    """Runs commands against one root and gives back what they printed."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self.capsys = root, capsys

    def __call__(self, *words: str, code: int = 0) -> str:
        self.capsys.readouterr()
        found = main([words[0], "--gdrive-path", str(self.root), *words[1:]])
        shown = self.capsys.readouterr()
        assert found == code, shown.err
        assert bool(shown.err) == (code != 0), shown.err
        assert shown.err.count("\n") <= 1 and "Traceback" not in shown.err
        return shown.err if code else shown.out


@pytest.fixture
def shell(root: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(root, capsys)


# Making, listing, deleting


def test_init_makes_an_experiment_once(shell: Shell, root: Path) -> None:
    out = shell("init", "first", "--model-name", "toy", "--max-rounds", "7")
    birth = json.loads((root / "experiments/first/experiment.json").read_text())
    assert birth["run"] in out and "first" in out
    assert (birth["name"], birth["made_by"], birth["version"]) == ("first", "init", __version__)
    assert birth["settings"]["max_rounds"] == 7
    assert "exists already" in shell("init", "first", code=1)
    assert json.loads((root / "experiments/first/experiment.json").read_text()) == birth


def test_list_shows_every_experiment_and_its_state(shell: Shell, experiment: Experiment) -> None:
    toy_experiment(experiment.store, toy_settings(), "waiting")
    lines = shell("list").splitlines()
    assert lines[0].split()[:2] == ["experiment", "state"]
    assert [line.split()[:3] for line in lines[1:]] == [["trial", "finished", "2"], ["waiting", "not", "started"]]


def test_list_says_what_to_do_where_there_is_nothing(shell: Shell) -> None:
    assert "rl-swarm demo" in shell("list")


def test_one_damaged_experiment_does_not_hide_the_others(shell: Shell, experiment: Experiment) -> None:
    experiment.store.put("experiments/backup/experiment.json.bak", b"")
    for damage in (b"", b"{}", b"\xff", b"[" * 100_000):
        experiment.store.put("experiments/damaged/experiment.json", damage)
        rows = [line.split()[:2] for line in shell("list").splitlines()[1:]]
        assert rows == [["damaged", "unreadable"], ["trial", "finished"]]


def test_delete_asks_first(
    shell: Shell, experiment: Experiment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = list(experiment.store.keys(""))
    assert "--yes" in shell("delete", "trial", code=2), "nobody can be asked"
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert main(["delete", "trial", "--gdrive-path", str(shell.root)]) == 1
    assert "Nothing was deleted" in capsys.readouterr().out
    assert list(experiment.store.keys("")) == before
    monkeypatch.setattr("builtins.input", lambda question: "y")
    shell("delete", "trial")
    assert list(experiment.store.keys("")) == []


def test_delete_removes_one_experiment_with_its_archive_and_leaves_nothing_of_it(
    shell: Shell, experiment: Experiment, root: Path
) -> None:
    other = toy_run(experiment.store, name="other")[0]
    kept = list(other.store.keys("experiments/other/"))
    experiment.store.put("archives/trial/rollouts/round_0/stage_0/ada.json", b"{}")
    experiment.store.put("archives/other/rollouts/round_0/stage_0/ada.json", b"{}")
    count = len(list(experiment.store.keys("experiments/trial/"))) + 1
    assert f"{count} files" in shell("delete", "trial", "--yes")
    assert not (root / "experiments/trial").exists() and not (root / "archives/trial").exists()
    assert list(other.store.keys("")) == ["archives/other/rollouts/round_0/stage_0/ada.json", *kept]
    assert "no experiment trial" in shell("delete", "trial", "--yes", code=1)
    shell("init", "trial")


def test_files_of_impossible_names_do_not_save_an_experiment_from_deletion(
    shell: Shell, experiment: Experiment, root: Path
) -> None:
    folder = os.fsencode(root / "experiments/trial/rollouts/round_0/stage_0")
    for name in (b"\x1b[2J.json", b"a\nb", b"\xff.json", b"back\\slash"):
        with open(os.path.join(folder, name), "wb"):
            pass
    shell("delete", "trial", "--yes")
    assert list(experiment.store.keys("experiments/trial/experiment.json")) == []
    assert "no experiment" in shell("list")


# Looking


def test_status_at_a_glance(shell: Shell, experiment: Experiment) -> None:
    out = shell("status", "trial")
    assert "trial: round 2, finished, 0 active peers" in out
    assert "rows 9, latest checkpoint none" in out
    assert "own reward by round" in out and "held-out reward" in out
    totals = {words[0]: float(words[1]) for words in map(str.split, out.splitlines()[-3:])}
    for node in NODES:
        own = sum(row["my_reward"] for row in experiment.metrics(node).rows)
        assert totals[node] == pytest.approx(own, rel=1e-3)


@pytest.mark.usefixtures("experiment")
def test_status_as_json_has_the_documented_keys(shell: Shell) -> None:
    status = json.loads(shell("status", "trial", "--json"))
    documented = (
        "current_round current_stage num_active_peers active_peers peer_ids last_updated latest_checkpoint "
        "cumulative_rewards total_cumulative_reward total_metric_entries"
    )
    assert set(documented.split()) <= set(status)
    assert status["current_round"] == 2 and status["total_metric_entries"] == 9


def test_peers_are_listed_with_what_they_say_of_themselves(shell: Shell, experiment: Experiment) -> None:
    hostile = a_peer(experiment, "evil", model="\x1b[2Jmodel", learned=(7, 0))
    experiment.write_lease(experiment.peer_key("evil"), hostile)
    lines = shell("peers", "trial").splitlines()
    assert lines[0].split()[:3] == ["node", "role", "state"]
    assert [line.split()[:4] for line in lines[1:4]] == [[node, "worker", "left", "2"] for node in NODES]
    assert lines[4].split() == ["evil", "worker", "active", "7", "\\x1b[2Jmodel", "elsewhere"]


def test_rollouts_shows_questions_and_answers_of_the_newest_round(shell: Shell, root: Path) -> None:
    toy_run(FolderStore(root, durable=False), num_transplant_trees=0)
    file = json.loads((root / "experiments/trial/rollouts/round_2/stage_0/ada.json").read_text())
    lines = shell("rollouts", "trial", "--limit", "2").splitlines()
    assert lines[0] == "round 2  ada" == lines[6]
    assert lines[1] == file["rollouts"]["0"][0]["prompt"]
    assert lines[2:6] == [f"  {r['reward']:5.2f}  {r['response']}" for r in file["rollouts"]["0"]]
    assert len(lines) == 12
    assert shell("rollouts", "trial", "--round", "1", "--node", "bob", "--limit", "1").startswith("round 1  bob\n")
    assert len(shell("rollouts", "trial", "--limit", "100").splitlines()) == 3 * 4 * 6
    assert "No rollouts match: round 9" in shell("rollouts", "trial", "--round", "9")
    assert "node nobody" in shell("rollouts", "trial", "--node", "nobody")


def test_rollouts_says_when_nothing_was_published(shell: Shell) -> None:
    shell("init", "new")
    assert "Nothing was published in new yet" in shell("rollouts", "new")


def publish_as_evil(experiment: Experiment, root: Path, **rollout: Any) -> None:
    """A file of a node that knows how to write one, with whatever it likes in its texts."""
    folder = root / "experiments/trial/rollouts/round_2/stage_0"
    file = json.loads((folder / "ada.json").read_text())
    file["peer_id"] = "evil"
    for group in file["rollouts"].values():
        for completion in group:
            completion.update(rollout)
    (folder / "evil.json").write_text(json.dumps(file))


def test_text_of_peers_is_shown_escaped_and_otherwise_as_it_is(
    shell: Shell, experiment: Experiment, root: Path
) -> None:
    text = "\x1b[2J\x1b]0;pwned\x07[bold red]not markup[/bold red] :smile: \u202e <answer>1</answer>\nround 2  ada"
    publish_as_evil(experiment, root, response=text, prompt="\x1b[1mprompt\r")
    out = shell("rollouts", "trial", "--node", "evil", "--limit", "1")
    lines = out.splitlines()
    assert "\x1b" not in out and "\x07" not in out and "\r" not in out and "\u202e" not in out
    assert lines[1] == "\\x1b[1mprompt\\r"
    assert lines[2].endswith(
        "\\x1b[2J\\x1b]0;pwned\\x07[bold red]not markup[/bold red] :smile: \\u202e <answer>1</answer>\\nround 2  ada"
    )


def test_a_long_text_is_not_broken_into_lines(shell: Shell, experiment: Experiment, root: Path) -> None:
    publish_as_evil(experiment, root, response="word " * 500 + "end")
    assert "word " * 500 + "end" in shell("rollouts", "trial", "--node", "evil")


def test_a_bad_file_among_the_rollouts_is_a_line_not_an_end(shell: Shell, experiment: Experiment, root: Path) -> None:
    folder = root / "experiments/trial/rollouts/round_2/stage_0"
    (folder / "a_bad_one.json").write_bytes(b"{")
    (folder / "\x1b[2J.json").write_bytes(b"{}")
    os.mkfifo(folder / "a_pipe.json")
    out = shell("rollouts", "trial", "--limit", "100")
    assert "a_bad_one: not_json" in out and "a_pipe: not_a_file" in out
    assert out.count("round 2  ") == 12 and "\x1b" not in out


def test_an_empty_group_hides_no_others(shell: Shell, experiment: Experiment, root: Path) -> None:
    path = root / "experiments/trial/rollouts/round_2/stage_0/ada.json"
    file = json.loads(path.read_text())
    file["rollouts"]["0"] = []
    path.write_text(json.dumps(file))
    assert shell("rollouts", "trial", "--node", "ada").count("round 2  ada") == 3


def test_metrics_in_three_formats(shell: Shell, experiment: Experiment) -> None:
    rows = [json.loads(line) for line in shell("metrics", "trial", "--format", "json").splitlines()]
    assert [(row["round"], row["node_id"]) for row in rows] == [(round, node) for round in range(3) for node in NODES]
    for node in NODES:
        assert [row for row in rows if row["node_id"] == node] == experiment.metrics(node).rows
    cells = list(csv.DictReader(io.StringIO(shell("metrics", "trial", "--format", "csv"))))
    assert [float(cell["my_reward"]) for cell in cells] == [row["my_reward"] for row in rows]
    assert [json.loads(cell["external_missing"]) for cell in cells] == [row["external_missing"] for row in rows]
    lines = shell("metrics", "trial", "--last", "4", "--node", "bob").splitlines()
    assert len(lines) == 1 + 3 and all(line.split()[1] == "bob" for line in lines[1:])
    assert len(shell("metrics", "trial", "--last", "4").splitlines()) == 1 + 4


@pytest.mark.usefixtures("experiment")
def test_metrics_of_a_node_that_cannot_be_are_none(shell: Shell) -> None:
    for node in ("nobody", "../../trial/logs/ada", "a\x1b", "x" * 300):
        assert shell("metrics", "trial", "--format", "json", "--node", node) == ""


# Taking out


def test_export_writes_summary_and_metrics(shell: Shell, experiment: Experiment) -> None:
    out = shell("export", "trial", "--out", "out/deeper")
    assert out.splitlines() == ["out/deeper/summary.json", "out/deeper/metrics.csv"]
    found = json.loads(Path("out/deeper/summary.json").read_text())
    assert found["status"]["run"] == experiment.run and found["settings"]["num_transplant_trees"] == 2
    assert len(Path("out/deeper/metrics.csv").read_text().splitlines()) == 1 + 9


def test_what_cannot_be_exported_is_one_sentence(shell: Shell, experiment: Experiment) -> None:
    assert "There is no node nobody in trial; there are: ada, bob, cleo" in shell(
        "export", "trial", "--out", "out", "--node", "nobody", code=1
    )
    assert "Node ada has no checkpoint yet" in shell("export", "trial", "--out", "out", "--node", "ada", code=1)
    experiment.write_checkpoint("ada", 2, b"{}")
    assert "toy policy is no language model" in shell("export", "trial", "--out", "out", "--node", "ada", code=1)
    Path("out").write_text("a file")
    assert "Cannot write to the folder out: File exists" in shell("export", "trial", "--out", "out", code=1)


# What is not there


@pytest.mark.parametrize("verb", READERS)
def test_a_missing_experiment_is_one_sentence_that_helps(shell: Shell, verb: str) -> None:
    shell("init", "trial")
    assert shell(verb, "tral", code=1) == "rl-swarm: There is no experiment tral in this store (there are: trial).\n"
    for name in ("../trial", "a\x1b[2J", "", "x" * 300):
        told = shell(verb, name, code=1)
        assert told.startswith("rl-swarm: ") and "cannot be an experiment's name" in told and "\x1b" not in told


@pytest.mark.parametrize("verb", [*READERS, "list"])
def test_readers_make_no_root_where_there_is_none(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [verb] if verb == "list" else [verb, "trial"]
    assert main([*words, "--gdrive-path", str(tmp_path / "nowhere")]) == 1
    assert "does not exist" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()


# The command itself


def test_an_error_sentence_is_shown_not_obeyed_by_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> NoReturn:
        raise NameTaken("The node name ada is taken by process 1 on \x1b[2Jhost\nrl-swarm: all is well")

    assert cli.exit_code(fail) == 1
    shown = capsys.readouterr().err
    assert "\x1b" not in shown and shown.count("\n") == 1


def test_an_interrupt_has_its_own_code() -> None:
    def interrupted() -> NoReturn:
        raise KeyboardInterrupt

    assert cli.exit_code(interrupted) == 130


def test_what_is_not_raised_on_purpose_is_not_swallowed() -> None:
    def broken() -> NoReturn:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cli.exit_code(broken)


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == f"rl-swarm {__version__}"


def test_the_help_names_every_verb_and_each_has_help_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    overview = capsys.readouterr().out
    for verb in VERBS:
        assert f"\n    {verb}" in overview
        with pytest.raises(SystemExit) as caught:
            main([verb, "--help"])
        assert caught.value.code == 0
        assert ("--gdrive-path" in capsys.readouterr().out) == (verb != "bench"), "only bench needs no root"


def test_nothing_is_coloured_where_no_terminal_is() -> None:
    assert not console.is_terminal
