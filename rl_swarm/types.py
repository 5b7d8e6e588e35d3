"""The values a swarm passes around: frozen, and free of behaviour beyond what they imply.

the paper (arXiv:2509.08721)        here
------------------------------      ---------------------------------------------
question q with its metadata        Question, named by QuestionName
one completion                      Rollout
rollout R(q): G completions of q    RolloutGroup
rollout with its rewards            ScoredGroup
zero-advantage rollout              not ScoredGroup.informative
local / external rollouts           a group whose `node` is / is not the learner's own
round t                             Step.round (a round may have several stages)
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

# Rewards closer together than this are the same reward: dividing by their spread would only amplify rounding.
SAME_REWARD = 1e-6


class Step(NamedTuple):
    """One share-and-learn cycle. Steps compare in the order in which they happen."""

    round: int
    stage: int = 0

    def following(self, stages: int) -> Step:
        """The step after this one, in rounds of so many stages."""
        return Step(self.round, self.stage + 1) if self.stage + 1 < stages else Step(self.round + 1)


class QuestionName(NamedTuple):
    """All that is ever sent of a question: from this the receiver rebuilds prompt and answer by itself."""

    task: str
    config: str
    seed: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here


class Example(NamedTuple):
    """A question with the answer one would like to see, to be shown before another question of its kind."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Question:
    """Examples are how this node puts the question to its own model: they never travel, and peers may use others."""

    name: QuestionName
    prompt: str
    answer: str
    examples: tuple[Example, ...] = ()


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion. Token ids and log-probs exist only where it was sampled; to everyone else it is text.

    `said_logprob` is what a peer says the log-prob of its whole text was when it wrote it.
    """

    text: str
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    truncated: bool = False
    said_logprob: float | None = None

    @property
    def tokens(self) -> int:
        return len(self.text) if self.token_ids is None else len(self.token_ids)


@dataclass(frozen=True, slots=True)
class GroupName:
    """Where a group was published; it stays findable under this name for as long as its file is kept."""

    node: str
    step: Step
    id: str


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """G sibling completions of one question by one node at one step."""

    node: str
    step: Step
    id: str
    question: Question
    rollouts: tuple[Rollout, ...]

    @property
    def name(self) -> GroupName:
        return GroupName(self.node, self.step, self.id)


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group with one reward per completion, always by the verifier of the node that holds this value.

    `left_out` names completions by number that are neither compared with their siblings nor learned from.
    """

    group: RolloutGroup
    rewards: tuple[float, ...]
    left_out: frozenset[int] = frozenset()

    @property
    def mean_reward(self) -> float:
        return fmean(self.rewards)

    @property
    def counted_rewards(self) -> tuple[float, ...]:
        return tuple(reward for index, reward in enumerate(self.rewards) if index not in self.left_out)

    @property
    def informative(self) -> bool:
        """Whether the siblings differ in reward: if not, every advantage is zero and there is nothing to learn."""
        counted = self.counted_rewards
        return len(counted) > 1 and max(counted) - min(counted) > SAME_REWARD
