"""Bringing nodes back: stages, nodes of one host with different pasts, damaged checkpoints, groups that are gone."""

from __future__ import annotations

import pytest
from swarms import toy_experiment, toy_host, toy_settings, write_checkpoints

from rl_swarm.checkpoints import restore
from rl_swarm.errors import Stopped
from rl_swarm.experiment import Experiment
from rl_swarm.host import Host
from rl_swarm.stores.memory import MemoryStore
from rl_swarm.types import Step


class Lives:
    """One experiment in which hosts live and die; what they say is kept."""

    def __init__(self, **given: object) -> None:
        self.settings = toy_settings(num_generations=8, **given)
        self.experiment: Experiment = toy_experiment(MemoryStore(), self.settings)
        self.said: list[str] = []

    def host(self, *nodes: str) -> Host:
        return toy_host(self.experiment, nodes, self.settings)

    def restore(self, *nodes: str) -> tuple[Host, Step | None]:
        host = self.host(*nodes)
        return host, restore(host, self.said.append, lambda: False)


def play(host: Host, *steps: Step) -> None:
    for step in steps:
        host.learn(step, host.share(step))


def states(host: Host) -> dict[str, bytes]:
    return {node: host.policy.save(node, {}) for node in host.nodes}


def test_a_checkpoint_in_the_middle_of_a_round_loses_no_stage() -> None:
    lives = Lives(max_stages=2)
    host = lives.host("a", "b")
    play(host, Step(0), Step(0, 1), Step(1))
    write_checkpoints(host, Step(1))
    play(host, Step(1, 1))
    again, done = lives.restore("a", "b")
    assert done == Step(1, 1)
    assert states(again) == states(host)


def test_a_node_that_is_new_on_a_host_gets_no_past_and_holds_nobody_up() -> None:
    lives = Lives()
    host = lives.host("a", "b")
    play(host, *(Step(round) for round in range(6)))
    write_checkpoints(host, Step(3))  # as if the last two rounds came after it
    before = states(host)
    again, done = lives.restore("a", "b", "c")
    assert done == Step(5)
    assert lives.experiment.metrics("c").rows == []
    assert lives.experiment.checkpoint_rounds("c") == []
    assert states(again)["c"] == states(lives.host("c"))["c"], "it starts from the start"
    assert before.keys() < states(again).keys()
    play(again, Step(6))
    assert [row["round"] for row in lives.experiment.metrics("c").rows] == [6]


def test_nodes_killed_between_one_record_and_the_next_meet_again() -> None:
    lives, unharmed = Lives(), Lives()
    host = lives.host("a", "b")
    play(host, Step(0))
    shared = host.share(Step(1))
    lone = lives.host("a")  # only a's half of the step was recorded when the host was killed
    lone.policy.load("a", host.policy.save("a", {}), {})
    lone.learn(Step(1), shared)
    again, done = lives.restore("a", "b")
    assert done == Step(0), "the step is not done before all have done it"
    play(again, Step(1))
    expected = unharmed.host("a", "b")
    play(expected, Step(0), Step(1))
    assert states(again) == states(expected)
    for node in ("a", "b"):
        assert [row["round"] for row in lives.experiment.metrics(node).rows] == [0, 1]


def test_checkpoints_of_different_rounds_are_enough() -> None:
    lives = Lives(checkpoint_keep=1)
    host = lives.host("a", "b")
    for round in range(4):
        play(host, Step(round))
        if round == 1:
            write_checkpoints(host, Step(round))
    # Killed after a's newer checkpoint was written and b's was not.
    note: dict[str, str | int] = {
        "run": lives.experiment.run,
        "node": "a",
        "seed": lives.settings.seed,
        "round": 3,
        "stage": 0,
    }
    lives.experiment.write_checkpoint("a", 3, host.policy.save("a", note))
    lives.experiment.delete_checkpoint("a", 1)
    again, done = lives.restore("a", "b")
    assert done == Step(3)
    assert states(again) == states(host)
    assert "doing rounds 2 to 3 again to be exactly where this node was" in lives.said


def test_a_damaged_newest_checkpoint_is_passed_over_with_a_sentence() -> None:
    lives = Lives()
    host = lives.host("a")
    for round in range(3):
        play(host, Step(round))
        write_checkpoints(host, Step(round))
    lives.experiment.write_checkpoint("a", 2, b"half a che")
    again, done = lives.restore("a")
    assert done == Step(2)
    assert states(again) == states(host)
    assert any("passing over the checkpoint of round 2 of a" in line for line in lives.said)
    assert "a resumed from the checkpoint of round 1" in lives.said


def test_checkpoints_of_another_seed_or_run_are_not_used() -> None:
    lives = Lives()
    host = lives.host("a")
    play(host, Step(0))
    write_checkpoints(host, Step(0))
    other = toy_host(lives.experiment, ["a"], toy_settings(num_generations=8, seed=7))
    restore(other, lives.said.append, lambda: False)
    assert any("passing over" in line and "'seed': 7" in line for line in lives.said)


def test_groups_that_are_gone_are_missed_aloud() -> None:
    lives = Lives()
    hosts = [lives.host("a"), lives.host("b")]
    shared = [host.share(Step(0)) for host in hosts]
    for host, mine in zip(hosts, shared, strict=True):
        host.learn(Step(0), mine)
    for file in lives.experiment.published(Step(0)):
        lives.experiment.retire_rollouts(file, archive=False)  # type: ignore[arg-type]
    lives.restore("a")
    assert any("are gone: the weights are near what they were" in line for line in lives.said)


def test_doing_rounds_again_can_be_stopped() -> None:
    lives = Lives()
    play(lives.host("a"), Step(0), Step(1))
    with pytest.raises(Stopped):
        restore(lives.host("a"), lives.said.append, lambda: True)
