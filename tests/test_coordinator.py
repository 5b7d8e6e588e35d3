"""The coordinator as a clock: when a step is over at each pace, for whom it waits, and how it begins and ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from swarms import FakeClock, a_peer, toy_experiment, toy_settings

from rl_swarm.coordinator import Coordinator
from rl_swarm.errors import ExperimentMissing, ExperimentReplaced
from rl_swarm.lease import this_process
from rl_swarm.records import Process
from rl_swarm.settings import Settings
from rl_swarm.stores.memory import MemoryStore
from rl_swarm.types import Step

INTERVAL, LEASE, GRACE = 60.0, 20.0, 15.0


class Swarm:
    """Workers that beat, share and learn when told, and one coordinator that looks at them."""

    def __init__(self, **given: Any) -> None:
        times = {"coordinator_round_interval": INTERVAL, "lease_seconds": LEASE, "coordinator_join_grace": 0.0}
        self.settings: Settings = toy_settings(**{**times, **given})
        self.experiment = toy_experiment(MemoryStore(), self.settings)
        self.timer, self.clock = FakeClock(1000.0), FakeClock(5.0)
        self.beats: dict[str, int] = {}
        self.coordinator = self.started()

    def started(self) -> Coordinator:
        return Coordinator(self.experiment, "clock", self.settings, self.clock, self.timer)

    def beat(self, *nodes: str, **facts: Any) -> None:
        for node in nodes:
            self.beats[node] = self.beats.get(node, 0) + 1
            peer = a_peer(self.experiment, node, beat=self.beats[node], **facts)
            self.experiment.write_lease(self.experiment.peer_key(node), peer)

    def tick(self) -> Step:
        return self.coordinator.tick().step

    def wait(self, seconds: float) -> Step:
        """Let time pass in which every worker goes on beating as it was, looking once a second."""
        step = self.coordinator.state.step
        for _ in range(int(seconds)):
            self.timer.advance(1.0)
            for node, peer in self.experiment.peers().known.items():
                if not peer.left:
                    self.beat(node, learned=peer.learned, node_role=peer.node_role)
            step = self.tick()
        return step


def test_a_new_experiment_begins_at_round_0_and_says_who_keeps_the_clock() -> None:
    swarm = Swarm()
    state = swarm.experiment.state()
    assert state is not None
    assert (state.step, state.finished, state.updated_by, state.updated_at) == (Step(0), False, "clock", 5.0)
    assert state.run == swarm.experiment.run


# Paces


def test_at_the_interval_pace_only_time_counts() -> None:
    swarm = Swarm(coordinator_pace="interval")
    swarm.beat("ada", "bob", learned=(0, 0))
    swarm.tick()
    assert swarm.wait(INTERVAL - 1) == Step(0)
    assert swarm.wait(1) == Step(1)
    assert swarm.wait(INTERVAL - 1) == Step(1)
    assert swarm.wait(1) == Step(2)


def test_at_the_quorum_pace_a_step_is_over_when_every_live_worker_has_learned_it() -> None:
    swarm = Swarm(coordinator_pace="quorum")
    swarm.beat("ada", "bob")
    assert swarm.tick() == Step(0)
    swarm.beat("ada", learned=(0, 0))
    assert swarm.tick() == Step(0)
    swarm.beat("bob", learned=(0, 0))
    assert swarm.tick() == Step(1)
    assert swarm.tick() == Step(1), "what was learned counts for its own step only"
    swarm.beat("ada", "bob", learned=(1, 0))
    assert swarm.tick() == Step(2)


def test_at_the_quorum_pace_nobody_is_waited_for_longer_than_the_interval() -> None:
    swarm = Swarm(coordinator_pace="quorum")
    swarm.beat("ada", learned=(0, 0))
    swarm.beat("slow")
    swarm.tick()
    assert swarm.wait(INTERVAL - 1) == Step(0)
    assert swarm.wait(1) == Step(1)


def test_at_the_free_pace_the_clock_follows_the_fastest() -> None:
    swarm = Swarm(coordinator_pace="free")
    swarm.beat("ada", "slow")
    swarm.tick()
    assert swarm.wait(10 * INTERVAL) == Step(0)
    swarm.beat("ada", learned=(0, 0))
    assert swarm.tick() == Step(1)
    assert swarm.tick() == Step(1)


def test_a_round_goes_through_its_stages() -> None:
    swarm = Swarm(max_stages=2)
    steps = []
    for learned in ((0, 0), (0, 1), (1, 0), (1, 1)):
        swarm.beat("ada", learned=learned)
        steps.append(swarm.tick())
    assert steps == [Step(0, 1), Step(1, 0), Step(1, 1), Step(2, 0)]


# For whom it waits


@pytest.mark.parametrize("pace", ["interval", "quorum", "free"])
def test_time_does_not_run_without_workers(pace: str) -> None:
    swarm = Swarm(coordinator_pace=pace)
    assert swarm.wait(10 * INTERVAL) == Step(0)
    swarm.beat("another_clock", node_role="coordinator", learned=(0, 0))
    assert swarm.wait(10 * INTERVAL) == Step(0)


def test_the_interval_begins_with_the_first_worker_and_anew_after_the_last_has_gone() -> None:
    swarm = Swarm(coordinator_pace="interval")
    swarm.wait(100)
    swarm.beat("ada")
    swarm.tick()
    assert swarm.wait(INTERVAL - 1) == Step(0)
    swarm.beat("ada", left=True)
    assert swarm.wait(100) == Step(0)
    swarm.beat("ada")
    swarm.tick()
    assert swarm.wait(INTERVAL - 1) == Step(0)
    assert swarm.wait(1) == Step(1)


def test_a_worker_whose_beat_stops_no_longer_holds_up_the_others() -> None:
    swarm = Swarm(coordinator_pace="quorum", coordinator_round_interval=10_000.0)
    swarm.beat("ada", learned=(0, 0))
    swarm.beat("dead")
    swarm.tick()
    for second in range(int(LEASE)):
        assert swarm.coordinator.state.step == Step(0), f"taken for dead after {second} s"
        swarm.timer.advance(1.0)
        swarm.beat("ada", learned=(0, 0))
        swarm.tick()
    assert swarm.coordinator.state.step == Step(1)
    assert [peer.peer_id for peer in swarm.coordinator.workers] == ["ada"]


def test_a_worker_that_comes_back_is_waited_for_again() -> None:
    swarm = Swarm(coordinator_pace="quorum", coordinator_round_interval=10_000.0)
    swarm.beat("ada", "bob", learned=(0, 0))
    assert swarm.tick() == Step(1)
    swarm.beat("bob", left=True)
    swarm.beat("ada", learned=(1, 0))
    assert swarm.tick() == Step(2)
    swarm.beat("bob", learned=(0, 0))
    swarm.beat("ada", learned=(2, 0))
    assert swarm.tick() == Step(2)


def test_a_dead_process_of_this_machine_is_seen_to_be_dead_at_once() -> None:
    here = this_process()
    swarm = Swarm(coordinator_pace="quorum")
    swarm.beat("ada", learned=(0, 0))
    swarm.beat("dead", process=Process(here.host, here.boot, here.pid, "another start"))
    assert swarm.tick() == Step(1)


def test_clocks_of_other_machines_do_not_matter() -> None:
    swarm = Swarm(coordinator_pace="quorum")
    swarm.beat("past", registered_at=-1e12, learned=(0, 0))
    swarm.beat("future", registered_at=1e12)
    swarm.tick()
    assert sorted(peer.peer_id for peer in swarm.coordinator.workers) == ["future", "past"]


def test_under_quorum_round_0_stays_open_until_nobody_has_joined_for_a_while() -> None:
    swarm = Swarm(coordinator_pace="quorum", coordinator_join_grace=GRACE)
    swarm.beat("ada", learned=(0, 0))
    assert swarm.tick() == Step(0)
    assert swarm.wait(GRACE - 1) == Step(0)
    swarm.beat("bob", learned=(0, 0))
    assert swarm.tick() == Step(0)
    assert swarm.wait(GRACE - 1) == Step(0), "whoever joins starts the wait again"
    assert swarm.wait(1) == Step(1)
    swarm.beat("ada", "bob", "cleo", learned=(1, 0))
    assert swarm.tick() == Step(2), "later rounds wait for nobody who is not there"


@pytest.mark.parametrize("pace", ["interval", "free"])
def test_other_paces_know_no_such_wait(pace: str) -> None:
    swarm = Swarm(coordinator_pace=pace, coordinator_join_grace=1000.0)
    swarm.beat("ada", learned=(0, 0))
    swarm.tick()
    assert swarm.wait(INTERVAL) == Step(1)


# Beginning again, and ending


def test_a_restarted_coordinator_goes_on_at_its_round() -> None:
    swarm = Swarm()
    for round in range(2):
        swarm.beat("ada", learned=(round, 0))
        swarm.tick()
    written = swarm.experiment.state()
    swarm.clock.advance(100)
    swarm.coordinator = swarm.started()
    assert swarm.coordinator.state == swarm.experiment.state() == written
    assert swarm.tick() == Step(2)


def test_the_experiment_is_finished_when_the_last_step_is_over() -> None:
    swarm = Swarm(max_rounds=2, max_stages=2)
    for learned in ((0, 0), (0, 1), (1, 0)):
        swarm.beat("ada", learned=learned)
        assert not swarm.coordinator.tick().finished
    swarm.beat("ada", learned=(1, 1))
    state = swarm.coordinator.tick()
    assert state.finished and state.step == Step(1, 1) and swarm.experiment.state() == state
    swarm.clock.advance(1)
    swarm.beat("ada", learned=(5, 0))
    assert swarm.coordinator.tick() == state
    assert swarm.started().tick() == state


def test_workers_that_did_the_last_step_and_left_leave_a_finished_experiment() -> None:
    swarm = Swarm(max_rounds=2, coordinator_pace="free")
    swarm.beat("ada", learned=(1, 0), left=True)
    assert not swarm.coordinator.tick().finished, "it follows step by step"
    assert swarm.coordinator.tick().finished


def test_at_the_quorum_pace_the_last_step_ends_with_the_last_worker() -> None:
    swarm = Swarm(max_rounds=2)
    swarm.beat("ada", learned=(0, 0))
    assert swarm.tick() == Step(1)
    swarm.beat("ada", learned=(0, 0), left=True)
    assert not swarm.coordinator.tick().finished, "nobody has done the last step yet"
    swarm.beat("ada", learned=(1, 0), left=True)
    assert swarm.coordinator.tick().finished


def test_nobody_ends_an_experiment_by_claiming_to_have_done_it_all() -> None:
    swarm = Swarm(max_rounds=5)
    swarm.beat("evil", learned=(4, 0), left=True)
    assert swarm.tick() == swarm.tick() == Step(0)
    swarm.experiment.store.delete("experiments/trial/state/current_state.json")
    swarm.beat("evil", learned=(10**9, 0))
    swarm.coordinator = swarm.started()
    assert swarm.coordinator.state.step == Step(4), "a lost clock is set within bounds"
    assert swarm.experiment.state() == swarm.coordinator.state


def test_workers_that_left_before_the_last_step_do_not() -> None:
    swarm = Swarm(max_rounds=2)
    swarm.beat("ada", learned=(0, 0), left=True)
    assert not swarm.coordinator.tick().finished
    assert swarm.wait(10 * INTERVAL) == Step(0)


@pytest.mark.parametrize("start", [lambda swarm: swarm.started(), lambda swarm: swarm.experiment.state()])
def test_the_clock_of_another_run_is_not_taken_for_ones_own(start: Callable[[Swarm], object]) -> None:
    swarm = Swarm()
    swarm.experiment.delete()
    with pytest.raises(ExperimentMissing):
        start(swarm)
    anew = toy_experiment(swarm.experiment.store, swarm.settings)
    with pytest.raises(ExperimentReplaced, match="made anew"):
        start(swarm)
    Coordinator(anew, "clock", swarm.settings, swarm.clock, swarm.timer)
    with pytest.raises(ExperimentReplaced, match="made anew"):
        start(swarm)
