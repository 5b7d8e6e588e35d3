"""A whole swarm in one process: the same every time, whoever hosts whom, and complete for every reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from swarms import NODES, FakeClock, accounted, toy_experiment, toy_host, toy_run, toy_settings

from rl_swarm.monitor.validate import validate
from rl_swarm.protocols import Store
from rl_swarm.simulate import simulate
from rl_swarm.stores.folder import FolderStore
from rl_swarm.stores.memory import MemoryStore
from rl_swarm.types import Step

Rows = list[dict[str, Any]]
GIVEN: dict[str, Any] = {"num_generations": 8, "num_transplant_trees": 4, "max_rounds": 5, "eval_every": 2}


def plain(rows: Rows) -> Rows:
    """What does not depend on when and how fast it was."""
    return [{name: value for name, value in row.items() if name not in ("timestamp", "seconds", "run")} for row in rows]


def test_the_same_seed_gives_the_same_rows_and_another_seed_others() -> None:
    first, again = (toy_run(MemoryStore(), seed=7, **GIVEN)[1] for _ in range(2))
    other = toy_run(MemoryStore(), seed=8, **GIVEN)[1]
    assert plain(first) == plain(again)
    assert [row["my_reward"] for row in first] != [row["my_reward"] for row in other]
    assert sum(row["external_used"] for row in first) > 0


def test_a_folder_and_a_store_in_memory_give_the_same_rows(tmp_path: Path) -> None:
    stores: list[Store] = [MemoryStore(), FolderStore(tmp_path, durable=False)]
    memory, folder = (toy_run(store, **GIVEN) for store in stores)
    assert plain(memory[1]) == plain(folder[1])
    assert list(memory[0].store.keys("")) == list(folder[0].store.keys(""))


@pytest.mark.parametrize("frequency", ["generation", "stage", "round"])
@pytest.mark.parametrize("grouping", [[NODES], [NODES[:1], NODES[1:]], [NODES[2:], NODES[:2]]], ids=repr)
def test_rows_do_not_depend_on_who_is_hosted_with_whom(grouping: list[tuple[str, ...]], frequency: str) -> None:
    given = {**GIVEN, "rollout_publish_frequency": frequency}
    settings = toy_settings(**given)
    experiment = toy_experiment(MemoryStore(), settings)
    hosts = [toy_host(experiment, nodes, settings) for nodes in grouping]
    rows = simulate(experiment, hosts, settings.max_rounds)
    separate = toy_run(MemoryStore(), **given)[1]

    def by_node(found: Rows) -> Rows:
        return sorted(plain(found), key=lambda row: (row["round"], row["node_id"]))

    assert by_node(rows) == by_node(separate)


def test_every_row_of_a_long_run_accounts_for_its_groups_and_learning_shows() -> None:
    chosen = {"max_rounds": 40, "learning_rate": 4.0, "tasks": "arithmetic/bits", "eval_every": 0}
    _, rows = toy_run(MemoryStore(), **{**GIVEN, **chosen})
    assert len(rows) == 40 * 3
    assert all(accounted(row) for row in rows)
    early = [row["my_reward"] for row in rows if row["round"] < 5]
    late = [row["my_reward"] for row in rows if row["round"] >= 35]
    assert sum(late) > 2 * sum(early)


def test_what_lies_in_the_store_afterwards_is_a_complete_experiment() -> None:
    experiment, rows = toy_run(MemoryStore(), **GIVEN, max_stages=2)
    state = experiment.state()
    assert state is not None and state.finished and state.step == Step(4, 1)
    peers = experiment.peers().known
    assert sorted(peers) == sorted(NODES)
    assert all(peer.left and peer.learned == (4, 1) and peer.model == "toy" for peer in peers.values())
    assert [check for check in validate(experiment, 5, 3, 4) if not check.passed] == []
    for node in NODES:
        assert experiment.metrics(node).rows == [row for row in rows if row["node_id"] == node]


def test_whoever_watches_sees_each_step_as_it_ends_and_the_clock_where_it_is() -> None:
    settings, clock = toy_settings(max_rounds=2, max_stages=2), FakeClock(100.0)
    experiment = toy_experiment(MemoryStore(), settings)
    seen: list[Step] = []

    def on_step(step: Step, rows: dict[str, dict[str, Any]]) -> None:
        state = experiment.state()
        assert state is not None and state.step == step and not state.finished
        assert state.updated_at == clock.now
        assert sorted(rows) == sorted(NODES) and all(row["round"] == step.round for row in rows.values())
        assert all(peer.learned == step and not peer.left for peer in experiment.peers().known.values())
        clock.advance(1.0)
        seen.append(step)

    hosts = [toy_host(experiment, [node], settings) for node in NODES]
    simulate(experiment, hosts, 2, 2, clock=clock, on_step=on_step)
    assert seen == [Step(0), Step(0, 1), Step(1), Step(1, 1)]


def test_retention_works_in_a_simulation_too() -> None:
    kept = {"rollout_cleanup_enabled": True, "rollout_keep_last_n_rounds": 2, "checkpoint_interval": 1}
    experiment, rows = toy_run(MemoryStore(), **{**GIVEN, **kept, "max_rounds": 8})
    assert experiment.rollout_rounds() == [3, 4, 5, 6, 7], "out of reach of the window and of a restart"
    assert plain(rows) == plain(toy_run(MemoryStore(), **{**GIVEN, "max_rounds": 8})[1])
