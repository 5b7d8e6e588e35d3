"""I and J that follow the data: the formula, its limits, and that a replayed round has the same."""

from __future__ import annotations

import pytest
from swarms import toy_experiment, toy_host, toy_settings, write_checkpoints

from rl_swarm.allocation import WINDOW, Allocation, Seen, allocate, seen
from rl_swarm.checkpoints import restore
from rl_swarm.monitor.status import metric_rows
from rl_swarm.settings import Settings
from rl_swarm.stores.memory import MemoryStore
from rl_swarm.types import Step


def adaptive(own: int = 4, peers: int = 4) -> Settings:
    return toy_settings(adaptive_ij_enabled=True, num_train_samples=own, num_transplant_trees=peers)


def history(share: float, peers: int, rounds: int = 30) -> list[Seen]:
    return [Seen(Step(round), int(100 * share), 100, peers) for round in range(rounds)]


# For eight nodes and I + J = 8 the best J by the expectation I*p + E[min(J, Binomial(7*I, p))], worked out by hand.
@pytest.mark.parametrize(("share", "best"), [(0.1, 3), (0.2, 4), (0.3, 5), (0.5, 6)])
def test_j_is_the_best_one_for_eight_nodes(share: float, best: int) -> None:
    assert allocate(adaptive(), history(share, peers=7), Step(30)) == Allocation(8 - best, best)


def test_j_stays_within_its_limits() -> None:
    for share in (0.0, 0.01, 0.5, 1.0):
        for peers in (0, 1, 7, 1000):
            for own, others in ((1, 1), (8, 0), (1, 7), (2, 6)):
                found = allocate(adaptive(own, others), history(share, peers), Step(30))
                assert sum(found) == own + others and found.own >= 1 and found.peers >= 1
    assert allocate(adaptive(), history(0.0, 7), Step(30)).peers == 1, "one is kept, to see when it gets better"
    assert allocate(adaptive(), history(1.0, 1000), Step(30)).peers == 7


def test_j_follows_what_was_seen_lately_and_not_what_is_still_to_come() -> None:
    early, late = history(0.0, 7), [Seen(Step(100 + round), 50, 100, 7) for round in range(WINDOW)]
    assert allocate(adaptive(), early + late, Step(200)).peers == 6
    assert allocate(adaptive(), early + late, Step(50)).peers == 1
    assert allocate(adaptive(), [], Step(0)) == Allocation(4, 4)


def test_without_the_setting_nothing_moves() -> None:
    fixed = toy_settings(num_train_samples=3, num_transplant_trees=5)
    assert allocate(fixed, history(0.5, 7), Step(30)) == Allocation(3, 5)


def test_a_row_of_an_earlier_version_says_nothing() -> None:
    row = {"round": 1, "stage": 0, "informative_local": 3, "informative_external": 5}
    assert seen(row).groups == 0
    assert allocate(adaptive(), [seen(row)], Step(2)) == Allocation(4, 4)


def test_a_swarm_divides_its_groups_anew_every_round_and_a_restarted_node_divides_them_alike() -> None:
    settings = adaptive(own=6, peers=0)
    experiment = toy_experiment(MemoryStore(), settings)
    host = toy_host(experiment, ["a", "b", "c"], settings)
    for round in range(6):
        host.learn(Step(round), host.share(Step(round)))
        if round == 2:
            write_checkpoints(host, Step(2))
    for node in host.nodes:
        rows = metric_rows(experiment, node)
        assert [row["own_groups"] + row["external_wanted"] for row in rows] == [6] * 6
        assert rows[0]["external_wanted"] == 0, "as configured, before anything is known"
        assert all(row["external_wanted"] >= 1 for row in rows[1:])
        assert any(row["external_used"] for row in rows)
    again = toy_host(experiment, ["a", "b", "c"], settings)
    assert restore(again, lambda line: None, lambda: False) == Step(5)
    assert [again.policy.save(node, {}) for node in again.nodes] == [host.policy.save(node, {}) for node in host.nodes]
