"""The seams: what a task, a policy and a store must do. Anything with these methods fits; nothing is inherited."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from rl_swarm.types import Question, QuestionName, Rollout, ScoredGroup

# What a checkpoint says of itself: run, node, seed, round and stage; generators follow from these.
CheckpointNote = Mapping[str, str | int]

# Which of the peers' groups to train on: (candidates in canonical order, how many at most, rng) -> chosen.
Select = Callable[[Sequence[ScoredGroup], int, random.Random], list[ScoredGroup]]


class Task(Protocol):
    """A source of questions with a verifier. Questions are named, so that a peer can rebuild them."""

    def sample(self, count: int, rng: random.Random, *, held_out: bool = False) -> list[Question]:
        """Fresh questions. Those with `held_out` never coincide with those without: no node trains on them."""
        ...

    def rebuild(self, name: QuestionName) -> Question:
        """The question of that name. Raises MalformedRecord if there is none, or if it is held out."""
        ...

    def score(self, question: Question, text: str) -> float:
        """0 to 1. The text may come from anyone: it is parsed, never executed."""
        ...


class Policy(Protocol):
    """The models of all nodes of one host. With one node an ordinary trainer, with many one batched program."""

    def generate(
        self,
        questions: Mapping[str, Sequence[Question]],
        group_size: int,
        seeds: Mapping[str, int],
        *,
        greedy: bool = False,
    ) -> dict[str, list[tuple[Rollout, ...]]]:
        """For each node and question `group_size` completions, drawn from that node's seed alone.

        With `greedy` the likeliest token each time, and no draws.
        """
        ...

    def update(self, batches: Mapping[str, Sequence[ScoredGroup]]) -> dict[str, dict[str, float]]:
        """One round of learning for each node on its groups; returns a few figures per node for the metrics row."""
        ...

    def save(self, node: str, note: CheckpointNote) -> bytes:
        """Everything the node needs to go on as if it had never stopped, with the note inside."""
        ...

    def load(self, node: str, saved: bytes, expected: CheckpointNote) -> CheckpointNote:
        """The reverse of `save`; returns the note, of which `expected` must be a part.

        Raises CheckpointError, and changes nothing, if bytes or note do not fit.
        """
        ...

    def fits(self, question: Question, rollouts: Sequence[Rollout]) -> bool:
        """Whether a peer's completions can be trained on: no longer than the node's own may be, and not nothing.

        A rule that weighs them by their writer's log-probs needs these too.
        """
        ...

    def about(self, own: int, peers: int, group_size: int) -> str:
        """A sentence before the first round of so many groups: what the models will take of this machine."""
        ...


class Store(Protocol):
    """Named byte strings that several processes share. Keys are relative paths with `/` between segments."""

    def get(self, key: str, limit: int | None = None) -> bytes:
        """The whole value. Raises KeyMissing; raises MalformedRecord('too_large') before reading past `limit`."""
        ...

    def put(self, key: str, value: bytes) -> None:
        """Write or replace. A reader sees the old value or the new one, never a part."""
        ...

    def create(self, key: str, value: bytes) -> None:
        """Write a key that must not exist yet; of several at once exactly one succeeds. Raises KeyExists."""
        ...

    def append(self, key: str, line: bytes) -> None:
        """Add one line (without its newline) to a log that only this process writes."""
        ...

    def keys(self, prefix: str, *, shallow: bool = False) -> Iterable[str]:
        """Every key that starts with `prefix`, sorted. A prefix ending in `/` is a folder.

        With `shallow`, what lies in folders below the prefix's own is named by its folder alone, with a final `/`.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove a key; nothing happens if it is not there."""
        ...

    def move(self, key: str, target: str) -> None:
        """Rename a key. Raises KeyMissing."""
        ...
