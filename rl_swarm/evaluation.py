"""How nodes do on questions nobody trains on: sampled as in training, and greedily as a user of the model would."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

from rl_swarm.gathering import score
from rl_swarm.protocols import Policy, Task
from rl_swarm.randomness import named_rng, named_seed
from rl_swarm.settings import Settings
from rl_swarm.types import RolloutGroup, Step

# The same held-out questions for every node of every experiment with the same seed, at any round.
EVERYONE = "everyone"
ALWAYS = Step(0)


class Evaluation(NamedTuple):
    """Rewards of one node on held-out questions, in order: one sampled answer each, and the likeliest one."""

    sampled: list[float]
    greedy: list[float]
    tasks: list[str]

    def figures(self) -> dict[str, Any]:
        by_task: dict[str, list[float]] = defaultdict(list)
        for task, reward in zip(self.tasks, self.sampled, strict=True):
            by_task[task].append(reward)
        return {
            "eval_reward": fmean(self.sampled),
            "eval_reward_greedy": fmean(self.greedy),
            "eval_by_task": {task: fmean(rewards) for task, rewards in sorted(by_task.items())},
        }


def evaluate(nodes: Sequence[str], task: Task, policy: Policy, settings: Settings) -> dict[str, Evaluation]:
    """Answers are scored and forgotten: nothing of it is learned from, and no draw of training depends on it."""
    rng = named_rng(settings.seed, EVERYONE, "evaluate", ALWAYS)
    questions = task.sample(settings.eval_questions, rng, held_out=True)
    asked = dict.fromkeys(nodes, questions)
    seeds = {node: named_seed(settings.seed, node, "evaluate", ALWAYS) for node in nodes}

    def rewards(greedy: bool) -> dict[str, list[float]]:
        answers = policy.generate(asked, 1, seeds, greedy=greedy)
        return {
            node: [
                score(
                    task, RolloutGroup(node, ALWAYS, "", question, rollouts), settings.truncated_completions
                ).mean_reward
                for question, rollouts in zip(questions, given, strict=True)
            ]
            for node, given in answers.items()
        }

    sampled, greedy = rewards(greedy=False), rewards(greedy=True)
    tasks = [question.name.task for question in questions]
    return {node: Evaluation(sampled[node], greedy[node], tasks) for node in nodes}
