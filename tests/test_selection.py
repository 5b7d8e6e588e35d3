"""Which of the peers' groups are chosen: informative ones only, uniformly, and others in every round."""

from __future__ import annotations

import random
from collections import Counter

from rl_swarm.randomness import named_rng
from rl_swarm.selection import RULES, informative, uniform
from rl_swarm.types import Question, QuestionName, Rollout, RolloutGroup, ScoredGroup, Step


def group(number: int, *rewards: float) -> ScoredGroup:
    question = Question(QuestionName("arithmetic/sum", "v1", number, 0), f"{number}+0=", str(number))
    rollouts = tuple(Rollout(str(reward)) for reward in rewards)
    return ScoredGroup(RolloutGroup(f"node_{number % 3}", Step(0), str(number), question, rollouts), rewards)


USEFUL = [group(number, 1.0, 0.0, 0.0, 0.0) for number in range(12)]
USELESS = [group(number, reward, reward) for number, reward in ((20, 0.0), (21, 1.0), (22, 0.5), (23, 0.5))]
MIXED = [chosen for pair in zip(USEFUL, USELESS * 3, strict=True) for chosen in pair]


def test_the_settings_know_both_rules() -> None:
    assert {"informative": informative, "uniform": uniform} == RULES


def test_groups_without_advantages_are_never_chosen_by_the_papers_rule() -> None:
    for seed in range(50):
        chosen = informative(MIXED, 8, random.Random(seed))
        assert len(chosen) == 8
        assert all(scored.informative for scored in chosen)
    assert informative(USELESS, 8, random.Random(0)) == []


def test_the_control_takes_groups_of_either_kind() -> None:
    chosen = [scored for seed in range(50) for scored in uniform(MIXED, 8, random.Random(seed))]
    share = sum(scored.informative for scored in chosen) / len(chosen)
    assert 0.4 < share < 0.6


def test_no_group_is_chosen_twice_and_no_more_than_there_are() -> None:
    for rule in RULES.values():
        chosen = rule(USEFUL, 5, random.Random(1))
        assert len({scored.group.id for scored in chosen}) == 5
        assert sorted(s.group.id for s in rule(USEFUL, 50, random.Random(1))) == sorted(s.group.id for s in USEFUL)
        assert rule([], 5, random.Random(1)) == [] == rule(USEFUL, 0, random.Random(1))


def test_over_many_rounds_every_group_is_chosen_equally_often() -> None:
    rounds, wanted = 3000, 3
    for rule in RULES.values():
        counts: Counter[str] = Counter()
        for round in range(rounds):
            counts.update(s.group.id for s in rule(USEFUL, wanted, named_rng(42, "ada", "select", Step(round))))
        expected = rounds * wanted / len(USEFUL)
        assert len(counts) == len(USEFUL)
        # Five standard deviations of a binomial draw: chance does not reach it, a favoured slot does.
        spread = 5 * (expected * (1 - wanted / len(USEFUL))) ** 0.5
        assert all(abs(count - expected) < spread for count in counts.values()), counts


def test_the_choice_changes_from_round_to_round_and_from_node_to_node() -> None:
    def chosen(node: str, step: Step) -> tuple[str, ...]:
        return tuple(s.group.id for s in informative(USEFUL, 4, named_rng(42, node, "select", step)))

    assert len({chosen("ada", Step(round)) for round in range(100)}) > 95
    assert sum(chosen("ada", Step(round)) == chosen("bob", Step(round)) for round in range(100)) < 5
    assert chosen("ada", Step(7)) == chosen("ada", Step(7)), "and a replay is exact"
