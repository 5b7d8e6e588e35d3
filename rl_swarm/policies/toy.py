"""A policy without torch: a softmax over a dozen fixed answers. For tests, trials and simulations of the swarm itself.

It learns by the same policy gradient as the real one, and there is just enough for it to learn: which answers are right
more often than others. Questions are ignored.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence

from rl_swarm.errors import CheckpointError
from rl_swarm.policies.advantages import advantages
from rl_swarm.protocols import CheckpointNote
from rl_swarm.types import Question, Rollout, ScoredGroup

ANSWERS = (*(f"<answer>{number}</answer>" for number in range(12)), "no idea")


class ToyPolicy:
    def __init__(self, nodes: Sequence[str], learning_rate: float) -> None:
        self._logits = {node: [0.0] * len(ANSWERS) for node in nodes}
        self._learning_rate = learning_rate

    def generate(
        self,
        questions: Mapping[str, Sequence[Question]],
        group_size: int,
        seeds: Mapping[str, int],
        *,
        greedy: bool = False,
    ) -> dict[str, list[tuple[Rollout, ...]]]:
        return {
            node: self._draw(node, len(asked), group_size, random.Random(seeds[node]), greedy)
            for node, asked in questions.items()
        }

    def _draw(
        self, node: str, questions: int, group_size: int, rng: random.Random, greedy: bool
    ) -> list[tuple[Rollout, ...]]:
        chances = self._chances(node)

        def one() -> Rollout:
            pick = chances.index(max(chances)) if greedy else rng.choices(range(len(ANSWERS)), chances)[0]
            return Rollout(ANSWERS[pick], token_ids=(pick,), logprobs=(math.log(chances[pick]),))

        return [tuple(one() for _ in range(group_size)) for _ in range(questions)]

    def update(self, batches: Mapping[str, Sequence[ScoredGroup]]) -> dict[str, dict[str, float]]:
        return {node: self._learn(node, groups) for node, groups in batches.items()}

    def _learn(self, node: str, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        chances = self._chances(node)
        gradient = [0.0] * len(ANSWERS)
        count, loss = 0, 0.0
        for scored in groups:
            for rollout, advantage in zip(scored.group.rollouts, advantages(scored), strict=True):
                if rollout.text not in ANSWERS:
                    continue
                count += 1
                pick = ANSWERS.index(rollout.text)
                loss -= advantage
                for index, chance in enumerate(chances):
                    gradient[index] += advantage * ((index == pick) - chance)
        for index, slope in enumerate(gradient):
            self._logits[node][index] += self._learning_rate * slope / max(1, count)
        return {
            "loss": loss / max(1, count),
            "grad_norm": math.hypot(*gradient) / max(1, count),
            "entropy": -sum(chance * math.log(chance) for chance in chances),
            "clip_fraction": 0.0,
            "logprob_gap": 0.0,
            "trained_tokens": count,
        }

    def save(self, node: str, note: CheckpointNote) -> bytes:
        return json.dumps({"logits": self._logits[node], "note": dict(note)}).encode()

    def fits(self, question: Question, rollouts: Sequence[Rollout]) -> bool:
        return True

    def about(self, own: int, peers: int, group_size: int) -> str:
        return "the toy policy takes next to no memory"

    def load(self, node: str, saved: bytes, expected: CheckpointNote) -> CheckpointNote:
        try:
            state = json.loads(saved)
        except ValueError:
            raise CheckpointError("not a whole checkpoint") from None
        note: dict[str, str | int] = state.get("note", {}) if isinstance(state, dict) else {}
        if not expected.items() <= note.items():
            raise CheckpointError(f"it belongs to {note}, not to {dict(expected)}")
        self._logits[node] = [float(value) for value in state["logits"]]
        return note

    def _chances(self, node: str) -> list[float]:
        highest = max(self._logits[node])
        weights = [math.exp(value - highest) for value in self._logits[node]]
        return [weight / sum(weights) for weight in weights]
