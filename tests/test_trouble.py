"""Trouble that users and peers make while a swarm runs, each with its way out."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from swarms import ELSEWHERE, FakeClock, a_peer, toy_experiment, toy_host, toy_run, toy_settings

from rl_swarm import cli, heart, run
from rl_swarm.coordinator import Coordinator
from rl_swarm.errors import ExperimentMissing, SettingsError, Stopped, StoreUnavailable
from rl_swarm.experiment import PublishedFile, create_experiment, open_experiment
from rl_swarm.lease import claim
from rl_swarm.records import State
from rl_swarm.stores.folder import FolderStore
from rl_swarm.stores.memory import MemoryStore
from rl_swarm.types import Step
from rl_swarm.waiting import Stop, Watcher


def test_an_experiment_deleted_under_a_running_node_ends_it_and_leaves_nothing_behind(tmp_path: Path) -> None:
    chosen = toy_settings(
        gdrive_path=str(tmp_path), node_id="n", coordinator_pace="free", max_rounds=10**6, lease_seconds=0.5
    )
    failures: list[Exception] = []
    stop = Stop()

    def node() -> None:
        try:
            run.work(chosen, ["n"], stop, Watcher())
        except ExperimentMissing as error:
            failures.append(error)

    thread = threading.Thread(target=node)
    thread.start()
    store = FolderStore(tmp_path)
    name = chosen.experiment_name
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "experiments" / name / "logs" / "n" / "metrics.jsonl").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        open_experiment(store, name).delete()
        thread.join(timeout=60)
        assert not thread.is_alive(), "the node notices at its next beat"
    finally:
        stop.request()
        thread.join()
    assert len(failures) == 1
    # Whatever the node wrote with its last breath belongs to a run that is over.
    anew = create_experiment(store, name, {}, 0.0)
    assert anew.metrics("n").rows == []
    assert anew.state() is None
    assert toy_host(anew, ["n"], chosen).recorded_steps("n") == set()


def test_a_clock_restarted_with_smaller_limits_ends() -> None:
    experiment = toy_experiment(MemoryStore(), toy_settings())
    experiment.write_state(State(experiment.run, 50, 2, 0.0, "before"))
    experiment.write_lease(experiment.peer_key("ada"), a_peer(experiment, "ada", learned=(50, 2)))
    clock = FakeClock()
    coordinator = Coordinator(experiment, "now", toy_settings(max_rounds=20), clock, clock)
    clock.advance(100)
    assert coordinator.tick().finished


def test_a_finished_experiment_goes_on_when_more_rounds_are_asked_for() -> None:
    experiment, _ = toy_run(MemoryStore(), max_rounds=2)
    clock = FakeClock()
    assert Coordinator(experiment, "now", toy_settings(max_rounds=2), clock, clock).state.finished
    state = Coordinator(experiment, "now", toy_settings(max_rounds=5), clock, clock).state
    assert (state.round, state.finished) == (2, False)


def test_a_damaged_clock_is_set_by_what_the_workers_have_done() -> None:
    store = MemoryStore()
    experiment, _ = toy_run(store, max_rounds=2)
    (key,) = store.keys("experiments/trial/state/")
    store.put(key, b"{")
    assert experiment.state() is None
    clock = FakeClock()
    assert Coordinator(experiment, "now", toy_settings(max_rounds=9), clock, clock).state.step == Step(2)


def test_waiting_for_a_store_does_not_end_after_any_number_of_tries() -> None:
    stop = Stop()
    wait = run._waiter(stop, Watcher())
    threading.Timer(0.05, stop.request).start()
    wait(StoreUnavailable("away"), 10**6)
    with pytest.raises(StoreUnavailable):
        wait(StoreUnavailable("away"), 10**6 + 1)


def test_a_stop_while_a_name_is_watched_ends_the_wait() -> None:
    experiment = toy_experiment(MemoryStore(), toy_settings())
    key = experiment.peer_key("ada")
    experiment.write_lease(key, a_peer(experiment, "ada", process=ELSEWHERE))
    stop = Stop()
    stop.request()
    with pytest.raises(Stopped):
        claim(experiment, key, "ada", "worker", "toy", 0.0, 600.0, time.monotonic, stop.pause_or_end)
    assert experiment.read_lease(key).process == ELSEWHERE


def test_names_that_a_host_makes_of_a_long_one_are_refused_at_start(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["host", "--nodes", "1", "--model-name", "toy", "--gdrive-path", str(tmp_path / "r")]
    assert cli.main([*flags, "--node-id", "n" * 120]) == 2
    assert capsys.readouterr().err.startswith("rl-swarm: NODE_ID makes the name")
    assert not (tmp_path / "r").exists()


def test_an_error_in_the_heart_reaches_the_working_thread() -> None:
    class Broken:
        def beat(self, **given: object) -> None:
            raise ZeroDivisionError("anything at all")

    stop = Stop()
    with heart.Heart([Broken()], 0.01, stop) as beating:  # type: ignore[list-item]
        deadline = time.monotonic() + 30
        while not stop.requested:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        with pytest.raises(ZeroDivisionError):
            beating.check()


def test_one_peer_does_not_fill_the_others_training_with_itself() -> None:
    experiment = toy_experiment(MemoryStore(), toy_settings())
    greedy = toy_host(experiment, ["greedy"], toy_settings(num_train_samples=60))
    honest = toy_host(experiment, ["h1", "h2", "h3"], toy_settings())
    victim = toy_host(
        experiment, ["victim"], toy_settings(num_transplant_trees=64, select="uniform", num_train_samples=4)
    )
    capped = toy_host(
        experiment, ["capped"], toy_settings(num_transplant_trees=4, select="uniform", num_train_samples=4)
    )
    greedy.share(Step(0))
    honest.share(Step(0))
    row = capped.learn(Step(0), capped.share(Step(0)))["capped"]
    assert row["rejected"]["over_share"] >= 50
    assert row["external_used"] == 4
    everything = victim.learn(Step(0), victim.share(Step(0)))["victim"]
    assert "over_share" not in everything["rejected"], "who asks for that much gets it"


def test_numbers_beyond_reason_in_a_peers_record_are_no_record() -> None:
    experiment = toy_experiment(MemoryStore(), toy_settings())
    fair = a_peer(experiment, "ada")
    record = msgspec.to_builtins(fair)
    for damage in ({"shared": [10**300, 0]}, {"learned": [-1, 0]}, {"beat": 10**30}, {"lease_seconds": 1e9}):
        experiment.store.put(experiment.peer_key("ada"), msgspec.json.encode({**record, **damage}))
        assert experiment.peers().known == {}
        assert experiment.peers().malformed == ["ada"]


def test_a_file_planted_in_a_nodes_place_does_not_silence_it() -> None:
    store = MemoryStore()
    experiment = toy_experiment(store, toy_settings())
    store.put("experiments/trial/rollouts/round_0/stage_0/ada.json", b"junk")
    host = toy_host(experiment, ["ada"], toy_settings())
    host.share(Step(0))
    (file,) = experiment.published(Step(0))
    assert isinstance(file, PublishedFile)
    assert len(experiment.read_rollouts(file).rollouts) == 4


def test_what_is_too_large_for_any_reader_is_published_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_swarm import codec

    experiment = toy_experiment(MemoryStore(), toy_settings())
    host = toy_host(experiment, ["ada"], toy_settings())
    monkeypatch.setattr(codec, "MAX_FILE_BYTES", 1500)
    host.share(Step(0))
    files = experiment.published(Step(0))
    assert [file.part for file in files if isinstance(file, PublishedFile)] == [0, 1, 2, 3]


def test_interrupting_a_notebook_cell_reaches_the_node_behind_a_shell(tmp_path: Path) -> None:
    # The node says that it ended in order; the cell is interrupted as Jupyter does it.
    node = (
        "import signal, sys, time, pathlib\n"
        f"place = pathlib.Path({str(tmp_path)!r})\n"
        "signal.signal(signal.SIGTERM, lambda *_: ((place / 'ended').touch(), sys.exit(0)))\n"
        "(place / 'started').touch()\n"
        "time.sleep(120)\n"
    )
    (tmp_path / "node.py").write_text(node)
    cell = (
        "from rgym_exp.utils.notebook_utils import run_with_live_output\n"
        f"print('code', run_with_live_output('cd /; {sys.executable} {tmp_path}/node.py'))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", cell], stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "started").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
    assert (tmp_path / "ended").exists()


def test_duplicates_are_found_by_what_is_asked_not_by_the_name_it_goes_under() -> None:
    experiment = toy_experiment(MemoryStore(), toy_settings())
    host = toy_host(experiment, ["ada"], toy_settings(num_train_samples=200))
    asked = [scored.group.question.prompt for scored in host.share(Step(0)).mine["ada"]]
    reader = toy_host(experiment, ["bob"], toy_settings(num_transplant_trees=2, num_train_samples=2))
    row = reader.learn(Step(0), reader.share(Step(0)))["bob"]
    assert row["rejected"].get("duplicate", 0) == len(asked) - len(set(asked))
    assert len(set(asked)) < len(asked), "three small kinds, two hundred questions: some repeat"


def test_a_node_keeps_the_model_it_was_trained_with(tmp_path: Path) -> None:
    """Started again with another model, it would overwrite its own checkpoints."""
    given = {"gdrive_path": str(tmp_path), "coordinator_pace": "free", "max_rounds": 2}
    run.work(toy_settings(**given), ["n"], Stop(), Watcher())
    experiment = open_experiment(FolderStore(tmp_path), "default_experiment")
    before = experiment.read_checkpoint("n", 1)
    with pytest.raises(SettingsError, match=r"was trained as 'toy'.*another NODE_ID"):
        run.work(toy_settings(**given, model_name="pico"), ["n"], Stop(), Watcher())
    assert experiment.read_checkpoint("n", 1) == before
    assert experiment.peers().known["n"].model == "toy"


def test_a_model_folder_that_is_not_there_is_refused_before_the_node_registers(tmp_path: Path) -> None:
    chosen = toy_settings(gdrive_path=str(tmp_path), coordinator_pace="free", model_name="./no/such/folder")
    with pytest.raises(SettingsError, match="neither a folder here nor a Hub id"):
        run.work(chosen, ["n"], Stop(), Watcher())
    assert open_experiment(FolderStore(tmp_path), "default_experiment").peers().known == {}


def test_the_launcher_explains_itself_instead_of_starting_when_given_arguments() -> None:
    launcher = [sys.executable, "-m", "rgym_exp.runner.swarm_launcher"]
    for arguments, code in ((["--help"], 0), (["--rounds", "3"], 2)):
        done = subprocess.run([*launcher, *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == code
        assert "takes no arguments" in done.stderr


def test_a_round_without_all_wanted_groups_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    from rl_swarm.live import RoundLines

    experiment = toy_experiment(MemoryStore(), toy_settings())
    toy_host(experiment, ["other_size"], toy_settings(num_generations=8)).share(Step(0))
    host = toy_host(experiment, ["n"], toy_settings())
    RoundLines(3).rows(Step(0), host.learn(Step(0), host.share(Step(0))))
    assert "peers' groups 0 of 2" in (line := capsys.readouterr().out)
    assert "(missing: group_size 4)" in line
