"""Names: taken when free, refused while their holder lives, taken over when it is dead, and lost with notice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from swarms import ELSEWHERE, FakeClock, a_peer, toy_experiment, toy_settings

from rl_swarm import __version__
from rl_swarm.errors import ExperimentMissing, ExperimentReplaced, NameTaken, StoreUnavailable
from rl_swarm.experiment import Experiment
from rl_swarm.lease import Lease, Watch, claim, process_state, this_process
from rl_swarm.records import Peer, Process
from rl_swarm.stores.folder import FolderStore
from rl_swarm.stores.memory import MemoryStore
from rl_swarm.types import Step

LEASE = 20.0
HERE = this_process()
DEAD_HERE = Process(HERE.host, HERE.boot, HERE.pid, "another start")


class Claimant:
    """Someone who wants the name `ada`. Its pauses take no time; `meanwhile` happens in each of them."""

    def __init__(self, experiment: Experiment, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.experiment, self.clock, self.meanwhile = experiment, FakeClock(), meanwhile
        self.waited = 0.0

    def pause(self, seconds: float) -> None:
        self.waited += seconds
        self.clock.advance(seconds)
        self.meanwhile()

    def claim(self, key: str | None = None, role: str = "worker") -> Lease:
        key = key or self.experiment.peer_key("ada")
        return claim(self.experiment, key, "ada", role, "toy", 7.0, LEASE, self.clock, self.pause)


@pytest.fixture
def experiment() -> Experiment:
    return toy_experiment(MemoryStore(), toy_settings())


def record(experiment: Experiment) -> Peer:
    return experiment.read_lease(experiment.peer_key("ada"))


def held(experiment: Experiment, **facts: object) -> Peer:
    """Somebody else holds the name."""
    peer = a_peer(experiment, "ada", **facts)
    experiment.write_lease(experiment.peer_key("ada"), peer)
    return peer


# Claiming


def test_a_free_name_is_taken_at_once_and_the_record_says_who_has_it(experiment: Experiment) -> None:
    claimant = Claimant(experiment)
    lease = claimant.claim()
    assert lease.name == "ada" and claimant.waited == 0
    found = record(experiment)
    assert (found.run, found.peer_id, found.node_role, found.model) == (experiment.run, "ada", "worker", "toy")
    assert (found.version, found.registered_at, found.process) == (__version__, 7.0, HERE)
    assert (found.beat, found.shared, found.learned, found.left) == (0, None, None, False)
    assert experiment.peers().known == {"ada": found}


def test_a_name_held_by_a_live_process_here_is_refused_at_once_with_a_sentence(experiment: Experiment) -> None:
    Claimant(experiment).claim()
    before = record(experiment)
    second = Claimant(experiment)
    with pytest.raises(NameTaken) as caught:
        second.claim()
    assert f"process {os.getpid()} on {HERE.host}" in str(caught.value)
    assert "ada" in str(caught.value) and "NODE_ID" in str(caught.value)
    assert second.waited == 0 and record(experiment) == before


def test_a_second_coordinator_is_refused_in_other_words(experiment: Experiment) -> None:
    seat = experiment.coordinator_key()
    Claimant(experiment).claim(seat, "coordinator")
    with pytest.raises(NameTaken, match="has a coordinator already: ada, process") as caught:
        Claimant(experiment).claim(seat, "coordinator")
    assert "NODE_ID" not in str(caught.value)
    assert experiment.peers().known == {}, "the seat is no node"


def test_a_name_held_elsewhere_is_refused_when_its_beat_moves(experiment: Experiment) -> None:
    beats = iter(range(1, 100))
    held(experiment)
    claimant = Claimant(experiment, lambda: held(experiment, beat=next(beats)))
    with pytest.raises(NameTaken, match="process 4711 on elsewhere"):
        claimant.claim()
    assert 0 < claimant.waited < LEASE
    assert record(experiment).token == "token of ada"


def test_a_name_held_elsewhere_is_refused_even_if_its_beat_moves_at_the_last_moment(experiment: Experiment) -> None:
    held(experiment)
    claimant = Claimant(experiment, lambda: held(experiment, beat=int(claimant.waited >= 0.95 * LEASE)))
    with pytest.raises(NameTaken):
        claimant.claim()


def test_a_name_held_elsewhere_whose_beat_stands_still_is_taken_over_after_the_lease(experiment: Experiment) -> None:
    held(experiment, beat=41)
    claimant = Claimant(experiment)
    lease = claimant.claim()
    assert LEASE <= claimant.waited < 1.2 * LEASE
    assert record(experiment).process == HERE
    lease.beat()


def test_a_holder_that_beats_slowly_is_given_its_own_time(experiment: Experiment) -> None:
    held(experiment, lease_seconds=5 * LEASE)
    claimant = Claimant(experiment, lambda: held(experiment, lease_seconds=100.0, beat=int(claimant.waited >= 60.0)))
    with pytest.raises(NameTaken):
        claimant.claim()
    assert claimant.waited >= 60.0


@pytest.mark.parametrize(
    "facts", [{"left": True}, {"process": DEAD_HERE}, {"run": "an earlier run"}], ids=["left", "dead here", "earlier"]
)
def test_a_name_whose_holder_is_surely_gone_is_taken_without_waiting(
    experiment: Experiment, facts: dict[str, object]
) -> None:
    held(experiment, **facts)
    claimant = Claimant(experiment)
    claimant.claim().beat()
    assert claimant.waited < 0.1 * LEASE
    assert record(experiment).process == HERE and not record(experiment).left


@pytest.mark.parametrize("change", ["leaves", "is removed", "is damaged"])
def test_a_holder_that_goes_while_it_is_watched_is_followed_at_once(experiment: Experiment, change: str) -> None:
    held(experiment)
    key = experiment.peer_key("ada")
    happens: dict[str, Callable[[], object]] = {
        "leaves": lambda: held(experiment, left=True),
        "is removed": lambda: experiment.store.delete(key),
        "is damaged": lambda: experiment.store.put(key, b"{"),
    }
    events = [happens[change]]
    claimant = Claimant(experiment, lambda: events.pop()() if events else None)
    claimant.claim()
    assert claimant.waited < 0.5 * LEASE
    assert record(experiment).process == HERE


@pytest.mark.parametrize("data", [b"", b"hello", b"[]", b'{"run": 1}', b"[" * 10_000, b"\xff", b"x" * 2**21])
def test_a_malformed_record_is_nobodys(experiment: Experiment, data: bytes) -> None:
    experiment.store.put(experiment.peer_key("ada"), data)
    claimant = Claimant(experiment)
    claimant.claim().beat()
    assert claimant.waited < 0.1 * LEASE
    assert record(experiment).process == HERE


def test_of_two_who_find_the_holder_dead_one_gets_the_name(experiment: Experiment) -> None:
    held(experiment, process=DEAD_HERE)
    rival = a_peer(experiment, "ada", token="the rival's", process=ELSEWHERE)
    claimant = Claimant(experiment, lambda: experiment.write_lease(experiment.peer_key("ada"), rival))
    with pytest.raises(NameTaken, match="process 4711 on elsewhere"):
        claimant.claim()
    assert record(experiment) == rival


@pytest.mark.parametrize("name", ["../ada", "a/b", "", "a" * 300, "a\n", "ada.0"])
def test_no_name_leads_out_of_its_place(experiment: Experiment, name: str) -> None:
    with pytest.raises(ValueError, match="a name "):
        experiment.peer_key(name)


# Holding


def test_a_beat_grows_and_news_stays(experiment: Experiment) -> None:
    lease = Claimant(experiment).claim()
    lease.beat(shared=Step(3))
    lease.beat(learned=Step(2, 1))
    lease.beat()
    found = record(experiment)
    assert (found.beat, found.shared, found.learned) == (3, (3, 0), (2, 1))
    assert found.registered_at == 7.0


def test_a_holder_that_was_taken_for_dead_learns_it_at_its_next_beat(experiment: Experiment) -> None:
    lease = Claimant(experiment).claim()
    lease.beat()
    successor = held(experiment)
    with pytest.raises(NameTaken, match="taken over by process 4711 on elsewhere"):
        lease.beat(learned=Step(1))
    lease.release()
    assert record(experiment) == successor, "another's record is left alone"


def test_a_released_name_is_free(experiment: Experiment) -> None:
    lease = Claimant(experiment).claim()
    lease.beat(learned=Step(4))
    lease.release()
    assert record(experiment).left and record(experiment).learned == (4, 0)
    claimant = Claimant(experiment)
    claimant.claim()
    assert claimant.waited < 0.1 * LEASE


def test_a_damaged_or_removed_record_is_mended_by_the_next_beat(experiment: Experiment) -> None:
    lease = Claimant(experiment).claim()
    key = experiment.peer_key("ada")
    experiment.store.put(key, b"garbage")
    lease.beat(learned=Step(1))
    assert record(experiment).learned == (1, 0)
    experiment.store.delete(key)
    lease.beat()
    assert record(experiment).learned == (1, 0)


def test_a_holder_notices_that_its_experiment_is_gone_or_another(experiment: Experiment) -> None:
    lease = Claimant(experiment).claim()
    experiment.delete()
    with pytest.raises(ExperimentMissing):
        lease.beat()
    toy_experiment(experiment.store, toy_settings())
    with pytest.raises(ExperimentReplaced):
        lease.beat()
    assert list(experiment.store.keys("experiments/trial/peers/")) == []


def test_news_that_a_failing_store_did_not_take_comes_with_the_next_beat(tmp_path: Path) -> None:
    root = tmp_path / "root"
    experiment = toy_experiment(FolderStore(root, create=True), toy_settings())
    lease = Claimant(experiment).claim()
    root.rename(tmp_path / "away")
    with pytest.raises(StoreUnavailable):
        lease.beat(learned=Step(5))
    (tmp_path / "away").rename(root)
    lease.beat()
    assert record(experiment).learned == (5, 0)


# Watching


def test_a_peer_lives_as_long_as_its_beat_moves_within_the_observers_own_time(experiment: Experiment) -> None:
    clock = FakeClock(500.0)
    watch = Watch(clock)

    def seen(node: str, **given: Any) -> Peer:
        return a_peer(experiment, node, lease_seconds=LEASE, **given)

    assert watch.live(seen("ada", beat=1))
    clock.advance(LEASE - 0.1)
    assert watch.live(seen("ada", beat=1))
    assert watch.live(seen("ada", beat=2))
    clock.advance(LEASE - 0.1)
    assert watch.live(seen("ada", beat=2))
    clock.advance(0.1)
    assert not watch.live(seen("ada", beat=2))
    assert watch.live(seen("bob", beat=2)), "whoever is seen for the first time has his time before him"
    assert watch.live(seen("ada", beat=2, token="started again"))
    assert not watch.live(seen("ada", beat=3, left=True))
    assert not watch.live(seen("cleo", process=DEAD_HERE))
    clock.advance(LEASE)
    patient = a_peer(experiment, "dora", lease_seconds=3 * LEASE)
    assert watch.live(patient)
    clock.advance(2 * LEASE)
    assert watch.live(patient), "it beats in its own time, and says so"


# Processes

needs_a_process_table = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system has no /proc")


@needs_a_process_table
def test_this_process_is_alive_and_those_of_other_machines_are_unknown() -> None:
    assert process_state(HERE) == "alive"
    assert process_state(DEAD_HERE) == "dead"
    assert process_state(Process(HERE.host, HERE.boot, 2**22 + 1, "1")) == "dead"
    assert process_state(Process(HERE.host, "another boot", HERE.pid, HERE.started)) == "unknown"
    assert process_state(Process("another host", HERE.boot, HERE.pid, HERE.started)) == "unknown"


@needs_a_process_table
def test_a_killed_child_that_nobody_has_waited_for_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
    process = Process(HERE.host, HERE.boot, child.pid, started)
    assert process_state(process) == "alive"
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, but still in the table
    assert process_state(process) == "dead"
    child.communicate()
    assert process_state(process) == "dead"
