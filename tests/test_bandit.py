"""Every objective learns: one question, a reward for answers that begin with a certain character, a few updates.

`pico` answers `1+2=` with all sorts of digits, seldom with 3. All runs are seeded and repeat exactly; the bounds leave
room for another machine's rounding.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rl_swarm.gathering import score
from rl_swarm.models import PICO_FOLDER
from rl_swarm.policies.engine import Learning
from rl_swarm.policies.learner import Learner
from rl_swarm.policies.stacked import stacked_learner
from rl_swarm.types import Question, QuestionName, Rollout, RolloutGroup, ScoredGroup, Step

pytestmark = pytest.mark.torch
torch.set_num_threads(1)

LEARNING = Learning(learning_rate=1e-4, max_new_tokens=6)


class BeginsWith:
    """Reward 1 for completions that begin with a character; one question for all time."""

    question = Question(QuestionName("bandit", "v1", 0, 0), "1+2=", "")

    def __init__(self, character: str = "3") -> None:
        self.character = character

    def score(self, question: Question, text: str) -> float:
        return float(text.startswith(self.character))

    def group(self, node: str, rollouts: tuple[Rollout, ...]) -> ScoredGroup:
        group = RolloutGroup(node, Step(0), "0", self.question, rollouts)
        return score(self, group)  # type: ignore[arg-type]  # it asks and rebuilds nothing here


def make_learner(**changes: object) -> Learner:
    values = {name: getattr(LEARNING, name) for name in Learning.__dataclass_fields__}
    return stacked_learner(["me"], PICO_FOLDER, Learning(**(values | changes)))


def own_groups(policy: Learner, task: BeginsWith, groups: int, size: int, seed: int) -> list[ScoredGroup]:
    answers = policy.generate({"me": [task.question] * groups}, size, {"me": seed})["me"]
    return [task.group("me", rollouts) for rollouts in answers]


def success(policy: Learner, task: BeginsWith) -> float:
    """The share of 200 sampled answers that are rewarded, always with the same draws."""
    (group,) = own_groups(policy, task, 1, 200, seed=999)
    return group.mean_reward


def practise(policy: Learner, task: BeginsWith, rounds: int, seed: int = 0) -> float:
    """Rounds of four groups of 16; returns the success after the last."""
    for number in range(rounds):
        policy.update({"me": own_groups(policy, task, 4, 16, seed * 1000 + number)})
    return success(policy, task)


def test_the_start_is_known() -> None:
    assert 0.03 < success(make_learner(), BeginsWith("3")) < 0.1
    assert success(make_learner(), BeginsWith("1")) < 0.02


@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo"])
def test_every_objective_learns_to_begin_with_a_three(loss: str, aggregate: str) -> None:
    """With four updates a round: with one all three losses are the same."""
    policy = make_learner(loss=loss, aggregate=aggregate, minibatches=4)
    assert practise(policy, BeginsWith("3"), rounds=4) > 0.75


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("advantage", ["std", "mean", "leave_one_out"])
def test_every_advantage_learns_it_with_one_update_a_round(advantage: str, seed: int) -> None:
    assert practise(make_learner(advantage=advantage), BeginsWith("3"), rounds=6, seed=seed) > 0.75


def test_learning_from_good_answers_alone_is_enough() -> None:
    assert practise(make_learner(negative_weight=0.0), BeginsWith("3"), rounds=6) > 0.85


def test_nothing_is_learned_where_every_answer_has_the_same_reward() -> None:
    policy = make_learner()
    before = success(policy, BeginsWith("3"))
    practise(policy, BeginsWith(""), rounds=3)
    assert success(policy, BeginsWith("3")) == before


def test_a_little_kl_lets_it_learn_and_much_holds_it_where_it_began() -> None:
    task = BeginsWith("3")
    assert practise(make_learner(kl_beta=0.1), task, rounds=6) > 0.85
    assert practise(make_learner(kl_beta=10.0), task, rounds=6) < 0.15
    held = practise(make_learner(kl_beta=1.0), task, rounds=6)
    assert 0.15 < held < 0.85, "between the two it settles in between"


# Peers


@pytest.fixture(scope="module")
def peers() -> dict[str, Learner]:
    """For each task a node that learned it before, and is right more often than not."""
    found = {}
    for character in ("3", "1"):
        policy, task, number = make_learner(), BeginsWith(character), 0
        while success(policy, task) < 0.6:
            policy.update({"me": own_groups(policy, task, 8, 16, 70_000 + number)})
            number += 1
        found[character] = policy
    return found


def as_received(scored: ScoredGroup) -> ScoredGroup:
    """A peer's group: text, and what its writer says its log-prob was."""
    rollouts = tuple(
        Rollout(one.text, truncated=one.truncated, said_logprob=math.fsum(one.logprobs or ()))
        for one in scored.group.rollouts
    )
    return replace(scored, group=replace(scored.group, node="peer", rollouts=rollouts))


def practise_with(peer: Learner | None, task: BeginsWith, updates: int, seed: int, **changes: object) -> float:
    """Updates on one own group of eight each, and on two of the peer's if there is one."""
    policy = make_learner(**changes)
    for number in range(updates):
        own = own_groups(policy, task, 1, 8, 1000 * seed + number)
        theirs = own_groups(peer, task, 2, 8, 500_000 + 1000 * seed + number) if peer else []
        policy.update({"me": own + [as_received(scored) for scored in theirs]})
    return success(policy, task)


@pytest.fixture(scope="module")
def alone() -> dict[int, float]:
    """The success after four updates without a peer, by seed."""
    return {seed: practise_with(None, BeginsWith("3"), 4, seed) for seed in (0, 1, 2)}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("off_policy", ["none", "damp", "positive", "topr", "truncated"])
def test_two_groups_of_a_better_peer_teach_faster_than_being_alone(
    off_policy: str, seed: int, peers: dict[str, Learner], alone: dict[int, float]
) -> None:
    shared = practise_with(peers["3"], BeginsWith("3"), 4, seed, off_policy=off_policy)
    assert shared > 0.6
    assert shared > alone[seed] + 0.3


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("off_policy", ["damp", "positive", "topr"])
def test_what_a_node_would_never_find_by_itself_it_learns_from_a_peer(
    off_policy: str, seed: int, peers: dict[str, Learner]
) -> None:
    task = BeginsWith("1")
    assert practise_with(None, task, 6, seed) < 0.02
    assert practise_with(peers["1"], task, 6, seed, off_policy=off_policy) > 0.6


def test_noise_from_a_peer_is_not_learned_however_it_is_rewarded() -> None:
    """Texts that no model would write, called right by a broken verifier: they are counted and have no effect."""
    policy, task = make_learner(), BeginsWith("z")
    texts = tuple(Rollout(text) for text in ("z)q%", "zx.,", "5", "7"))
    noise = task.group("peer", texts)
    assert noise.rewards == (1.0, 1.0, 0.0, 0.0)
    only_bad_are_left = policy.update({"me": [noise]})["me"]
    assert only_bad_are_left["unlikely_texts"] == 2
    assert success(policy, task) == 0.0
