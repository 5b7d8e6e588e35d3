"""The values: advantages by hand, and when a group has something to teach."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from rl_swarm.gathering import score
from rl_swarm.policies.advantages import advantages
from rl_swarm.tasks.arithmetic import Arithmetic
from rl_swarm.types import SAME_REWARD, GroupName, Question, QuestionName, Rollout, RolloutGroup, ScoredGroup, Step

QUESTION = Question(QuestionName("arithmetic/sum", "v1", 1, 0), "1+1=", "2")


def scored(*rewards: float) -> ScoredGroup:
    rollouts = tuple(Rollout(str(reward)) for reward in rewards)
    return ScoredGroup(RolloutGroup("ada", Step(3, 1), "0", QUESTION, rollouts), rewards)


def test_advantages_are_those_worked_out_by_hand() -> None:
    # Mean 1/4; squared deviations 9/16 and three times 1/16, together 12/16, by n - 1 = 3: 1/4; deviation 1/2.
    assert advantages(scored(1.0, 0.0, 0.0, 0.0)) == pytest.approx((1.5, -0.5, -0.5, -0.5))
    # Mean 1/2; deviations of 1/2 each, squared and summed 1, by 3: 1/3; its root is 0.57735.
    assert advantages(scored(1.0, 0.0, 1.0, 0.0)) == pytest.approx((0.8660254, -0.8660254, 0.8660254, -0.8660254))
    # Two siblings: mean 1/2, squared deviations 1/4 + 1/4, by 1: 1/2; its root is 0.70711.
    assert advantages(scored(0.0, 1.0)) == pytest.approx((-0.7071068, 0.7071068))
    assert scored(1.0, 0.0, 0.0, 0.0).mean_reward == 0.25


def test_advantages_not_divided_by_the_spread_are_those_worked_out_by_hand() -> None:
    # Mean 1/4.
    assert advantages(scored(1.0, 0.0, 0.0, 0.0), "mean") == pytest.approx((0.75, -0.25, -0.25, -0.25))
    # Mean 0.5: a narrow spread stays narrow.
    assert advantages(scored(0.4, 0.6, 0.5), "mean") == pytest.approx((-0.1, 0.1, 0.0))


def test_advantages_against_the_others_are_those_worked_out_by_hand() -> None:
    # The mean of the others is 0 for the first and 1/3 for each of the rest.
    assert advantages(scored(1.0, 0.0, 0.0, 0.0), "leave_one_out") == pytest.approx((1.0, -1 / 3, -1 / 3, -1 / 3))
    # The means of the others are 0.55, 0.45 and 0.5.
    assert advantages(scored(0.4, 0.6, 0.5), "leave_one_out") == pytest.approx((-0.15, 0.15, 0.0))


@pytest.mark.parametrize("rule", ["std", "mean", "leave_one_out"])
@pytest.mark.parametrize("reward", [0.0, 0.5, 1.0])
def test_siblings_of_one_reward_teach_nothing(reward: float, rule: str) -> None:
    group = scored(reward, reward, reward)
    assert not group.informative
    assert advantages(group, rule) == (0.0, 0.0, 0.0)


def test_completions_left_out_take_no_part_in_the_comparison() -> None:
    # Of 1, 0 and 0.5 remain: mean 1/2; squared deviations 1/4 and 1/4, by 2: 1/4; deviation 1/2.
    group = replace(scored(1.0, 0.0, 1.0, 0.5), left_out=frozenset({2}))
    assert group.counted_rewards == (1.0, 0.0, 0.5)
    assert advantages(group) == pytest.approx((1.0, -1.0, 0.0, 0.0))
    assert advantages(group, "mean") == pytest.approx((0.5, -0.5, 0.0, 0.0))
    assert advantages(group, "leave_one_out") == pytest.approx((0.75, -0.75, 0.0, 0.0))
    assert group.mean_reward == 0.625, "what was rewarded is said of all"


@pytest.mark.parametrize("rule", ["std", "mean", "leave_one_out"])
@pytest.mark.parametrize("left_out", [{0}, {0, 1}, {1, 2, 3}, {0, 1, 2, 3}])
def test_a_group_teaches_nothing_if_those_that_remain_are_alike_or_alone(left_out: set[int], rule: str) -> None:
    group = replace(scored(1.0, 0.0, 0.0, 0.0), left_out=frozenset(left_out))
    assert not group.informative
    assert advantages(group, rule) == (0.0, 0.0, 0.0, 0.0)


@hypothesis_settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 8).map(lambda eighths: eighths / 8), min_size=2, max_size=12),
    st.sets(st.integers(0, 11), max_size=6),
)
def test_every_rule_is_its_equation_over_those_that_remain(rewards: list[float], left_out: set[int]) -> None:
    group = replace(scored(*rewards), left_out=frozenset(left_out))
    remaining = [number for number in range(len(rewards)) if number not in left_out]
    if len({rewards[number] for number in remaining}) < 2:
        assert not group.informative
        return
    for number, (mean, against_others) in enumerate(
        zip(advantages(group, "mean"), advantages(group, "leave_one_out"), strict=True)
    ):
        if number in left_out:
            assert mean == against_others == 0.0
            continue
        others = [rewards[other] for other in remaining if other != number]
        assert mean == pytest.approx(rewards[number] - fmean([*others, rewards[number]]))
        assert against_others == pytest.approx(rewards[number] - fmean(others))


def test_a_difference_of_rounding_is_no_difference() -> None:
    assert advantages(scored(0.5, 0.5 + SAME_REWARD / 2)) == (0.0, 0.0)
    assert scored(0.5, 0.5 + SAME_REWARD * 2).informative


@hypothesis_settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 8).map(lambda eighths: eighths / 8), min_size=2, max_size=16))
def test_advantages_sum_to_nothing_keep_the_order_and_never_explode(rewards: list[float]) -> None:
    group = scored(*rewards)
    found = advantages(group)
    assert len(found) == len(rewards)
    assert sum(found) == pytest.approx(0, abs=1e-6)
    assert group.informative == any(found) == (len(set(rewards)) > 1)
    assert max(map(abs, found)) <= len(rewards) ** 0.5
    for better, worse in ((i, j) for i in range(len(rewards)) for j in range(len(rewards)) if rewards[i] > rewards[j]):
        assert found[better] > found[worse]


def test_steps_compare_in_the_order_in_which_they_happen() -> None:
    steps = [Step(0), Step(0, 1), Step(1), Step(1, 1), Step(2), Step(10)]
    assert sorted(steps[place] for place in (5, 2, 0, 4, 1, 3)) == steps
    assert Step(3) == Step(3, 0) == (3, 0)


def test_a_completion_counts_its_tokens_where_they_are_known_and_its_characters_elsewhere() -> None:
    assert Rollout("abc", token_ids=(1, 2)).tokens == 2
    assert Rollout("abc", token_ids=()).tokens == 0
    assert Rollout("abc").tokens == 3


def test_a_group_is_found_under_its_name() -> None:
    assert scored(1.0, 0.0).group.name == GroupName("ada", Step(3, 1), "0")


def test_values_do_not_change() -> None:
    for value, field in ((QUESTION, "answer"), (scored(1.0, 0.0), "rewards"), (Rollout("a"), "text")):
        with pytest.raises(FrozenInstanceError):
            setattr(value, field, "other")


@pytest.mark.parametrize(
    ("rule", "rewards", "left_out", "expected"),
    [
        ("score", (1.0, 0.0, 1.0, 0.0), set(), (0.5, -0.5, 0.5, -0.5)),
        ("zero", (0.0, 0.0, 1.0, 0.0), set(), (-0.25, -0.25, 0.75, -0.25)),
        ("leave_out", (1.0, 0.0, 1.0, 0.0), {0, 3}, (0.0, -0.5, 0.5, 0.0)),
    ],
)
def test_completions_that_were_cut_off_are_scored_zeroed_or_left_out(
    rule: str, rewards: tuple[float, ...], left_out: set[int], expected: tuple[float, ...]
) -> None:
    """Right and cut off, wrong, right, wrong and cut off."""
    rollouts = (
        Rollout("<answer>2</answer>", truncated=True),
        Rollout("<answer>3</answer>"),
        Rollout("<answer>2</answer>"),
        Rollout("<answer>22", truncated=True),
    )
    for node in ("ada", "a peer"):
        found = score(Arithmetic(), RolloutGroup(node, Step(0), "0", QUESTION, rollouts), rule)
        assert found.rewards == rewards
        assert found.left_out == left_out
        assert advantages(found, "mean") == pytest.approx(expected)
    assert score(Arithmetic(), RolloutGroup("ada", Step(0), "0", QUESTION, rollouts)).left_out == frozenset()
