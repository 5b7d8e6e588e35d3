"""Solved questions shown before each question: they teach a small model the form of an answer without any training."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from functools import cached_property

from rl_swarm.protocols import Task
from rl_swarm.tasks.text import CLOSE, OPEN
from rl_swarm.types import Example, Question, QuestionName

# From so many questions, all kinds together, examples are taken. A kind without stored answers has none among them.
DRAWS = 500


class WithExamples:
    """A Task whose questions carry the same few examples of their own kind, never themselves."""

    def __init__(self, task: Task, count: int) -> None:
        self._task, self._count = task, count

    def sample(self, count: int, rng: random.Random, *, held_out: bool = False) -> list[Question]:
        return [self._shown(question) for question in self._task.sample(count, rng, held_out=held_out)]

    def rebuild(self, name: QuestionName) -> Question:
        return self._shown(self._task.rebuild(name))

    def score(self, question: Question, text: str) -> float:
        return self._task.score(question, text)

    def _shown(self, question: Question) -> Question:
        others = [one for one in self._examples[question.name.task] if one.prompt != question.prompt]
        return replace(question, examples=tuple(others[: self._count]))

    @cached_property
    def _examples(self) -> dict[str, list[Example]]:
        """By kind, one more than needed, in case one of them is the question itself; the same for everyone."""
        found: dict[str, list[Example]] = defaultdict(list)
        for question in self._task.sample(DRAWS, random.Random(0)):
            examples = found[question.name.task]
            example = Example(question.prompt, f"{OPEN}{question.answer}{CLOSE}")
            wanted = len(examples) <= self._count and example not in examples
            if wanted and self._task.score(question, example.answer) == 1:
                examples.append(example)
        return found
