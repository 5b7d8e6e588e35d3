"""Arithmetic and reasoning-gym side by side: every single task is drawn equally often."""

from __future__ import annotations

import random

from rl_swarm.protocols import Task
from rl_swarm.tasks import arithmetic
from rl_swarm.types import Question, QuestionName


class Mixture:
    """Two task families, weighted by how many tasks each holds; a question's name tells which one it belongs to."""

    def __init__(self, small: Task, small_count: int, gym: Task, gym_count: int) -> None:
        self._small, self._gym = small, gym
        self._small_share = small_count / (small_count + gym_count)

    def sample(self, count: int, rng: random.Random, *, held_out: bool = False) -> list[Question]:
        drawn = (self._small if rng.random() < self._small_share else self._gym for _ in range(count))
        return [task.sample(1, rng, held_out=held_out)[0] for task in drawn]

    def rebuild(self, name: QuestionName) -> Question:
        return self._owner(name).rebuild(name)

    def score(self, question: Question, text: str) -> float:
        return self._owner(question.name).score(question, text)

    def _owner(self, name: QuestionName) -> Task:
        return self._small if name.task.startswith(arithmetic.FAMILY + "/") else self._gym
