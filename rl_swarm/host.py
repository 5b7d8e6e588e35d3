"""Algorithm 1 on one screen: a host shares its nodes' rollouts, then each node learns from its own and its peers'.

A host runs one or more nodes on one machine. `share` and `learn` are two halves because the swarm breathes between
them: somebody else decides when the second begins. Both may be called again for a step that was interrupted; they then
do the same again, and what is already written stays.
"""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from rl_swarm.allocation import Allocation, allocate, seen
from rl_swarm.errors import LearningFailed
from rl_swarm.evaluation import Evaluation, evaluate
from rl_swarm.experiment import Experiment, PublishedFile
from rl_swarm.gathering import Gathered, PeerReader, score
from rl_swarm.plan import Plan, account, make_plan, read_plans, vote, write_plan
from rl_swarm.protocols import Policy, Task
from rl_swarm.prune import prune_rollouts
from rl_swarm.randomness import named_rng, named_seed
from rl_swarm.selection import RULES
from rl_swarm.settings import Settings
from rl_swarm.types import Question, RolloutGroup, ScoredGroup, Step

# Updates that were not numbers, one after the other, before a node gives up.
MOST_DROPPED = 3


@dataclass(slots=True)
class Shared:
    """The first half of a step, on its way to the second."""

    mine: dict[str, list[ScoredGroup]]
    seconds: dict[str, float]


class _Available(NamedTuple):
    """Which peers have files to read, and how many files had no acceptable name."""

    files: dict[str, list[PublishedFile]]
    rejected: Counter[str]


@dataclass(slots=True)
class _Choice:
    """What one node trains on: all its own groups, and the peers' that its plan names."""

    own: list[ScoredGroup]
    chosen: list[ScoredGroup]
    plan: Plan
    gone: Counter[str]


class Host:
    def __init__(
        self,
        experiment: Experiment,
        nodes: Sequence[str],
        task: Task,
        policy: Policy,
        settings: Settings,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.experiment, self.nodes = experiment, tuple(nodes)
        self.task, self.policy, self.settings = task, policy, settings
        self._clock, self._timer = clock, timer
        self._reader = PeerReader(experiment, task, policy, settings)
        self._select = RULES[settings.select]
        self._plans = {node: read_plans(experiment, node) for node in nodes}
        self._history = {node: [seen(row) for row in experiment.metrics(node).rows] for node in nodes}
        self._dropped = dict.fromkeys(nodes, 0)
        self._recorded = {node: {one.step for one in self._history[node]} for node in nodes}

    # First half

    def share(self, step: Step) -> Shared:
        """Sample I questions for each node, answer each G times, publish."""
        clock = _Stopwatch(self._timer)
        mine: dict[str, list[ScoredGroup]] = {node: [] for node in self.nodes}
        for part, answered in self._answers(step):
            clock.lap("generate")
            for node, groups in answered.items():
                mine[node] += groups
            if self.settings.rollout_publish_frequency != "round":
                self._publish(step, part, answered)
                clock.lap("publish")
        return Shared(mine, clock.seconds)

    def _answers(self, step: Step) -> Iterator[tuple[int | None, dict[str, list[ScoredGroup]]]]:
        """Every node's answered questions: in parts where each question is published by itself, else all at once."""
        questions = {
            node: self.task.sample(self._allocation(node, step).own, self._rng(node, "questions", step))
            for node in self.nodes
        }
        if self.settings.rollout_publish_frequency == "generation":
            for part in range(max(len(asked) for asked in questions.values())):
                one_each = {node: asked[part : part + 1] for node, asked in questions.items()}
                yield part, self._answer(step, one_each, part)
        else:
            yield None, self._answer(step, questions, 0)

    def _answer(self, step: Step, questions: Mapping[str, list[Question]], first: int) -> dict[str, list[ScoredGroup]]:
        seeds = {node: self._seed(node, f"generate {first}", step) for node in self.nodes}
        answers = self.policy.generate(questions, self.settings.num_generations, seeds)
        return {
            node: [
                score(
                    self.task,
                    RolloutGroup(node, step, str(first + number), question, rollouts),
                    self.settings.truncated_completions,
                )
                for number, (question, rollouts) in enumerate(zip(asked, answers[node], strict=True))
            ]
            for node, asked in questions.items()
        }

    def _publish(self, step: Step, part: int | None, groups: Mapping[str, Sequence[ScoredGroup]]) -> None:
        for node, scored in groups.items():
            if scored:
                self.experiment.publish(node, step, part, self._clock(), self.settings.model_name, scored)

    # Second half

    def learn(
        self, step: Step, shared: Shared, peer_steps: Mapping[str, Step] | None = None, skipped: int = 0
    ) -> dict[str, dict[str, Any]]:
        """Add J of the peers' groups to each node's own, update all nodes, record; returns the metrics rows.

        `peer_steps` names each peer's newest step where there is no common clock; `skipped` counts the rounds this
        host sat out before this one. A node that finished this step before a restart sits it out.
        """
        clock = _Stopwatch(self._timer, shared.seconds)
        nodes = [node for node in self.nodes if step not in self._recorded[node]]
        available = self._available(step, peer_steps)
        choices = {node: self._choose(node, step, shared.mine[node], available) for node in nodes}
        clock.lap("gather")
        stats = self._update(choices)
        clock.lap("update")
        held_out = self.evaluate() if nodes and self._is_evaluated(step) else {}
        clock.lap("evaluate")
        if self.settings.rollout_publish_frequency == "round":
            self._publish(step, None, {node: shared.mine[node] for node in nodes})
            clock.lap("publish")
        rows: dict[str, dict[str, Any]] = {}
        for node in nodes:
            row = self._row(node, step, choices[node], stats[node])
            if node in held_out:
                row |= held_out[node].figures()
            rows[node] = row | {"skipped_rounds": skipped, "seconds": clock.seconds}
            self._record(node, step, choices[node], rows[node])
            if self.settings.rollout_cleanup_enabled:
                prune_rollouts(self.experiment, node, step, self.settings)
        self._check_learning(rows)
        return rows

    def _check_learning(self, rows: Mapping[str, Mapping[str, Any]]) -> None:
        """An update that is not a number is dropped and counted; a node that has no others any more is at its end."""
        for node, row in rows.items():
            if row.get("dropped_updates", 0):
                self._dropped[node] = 0 if row["updated"] else self._dropped[node] + 1
            elif row.get("updated", 0):
                self._dropped[node] = 0
            if self._dropped[node] >= MOST_DROPPED:
                raise LearningFailed(
                    f"{node} ends: in its last {MOST_DROPPED} rounds loss or gradient was not a finite number. "
                    "Its weights are those before them. Try a lower LEARNING_RATE, DTYPE=float32, or another model."
                )

    def replay(self, step: Step, nodes: Sequence[str]) -> int:
        """Do a finished step again for some nodes, writing nothing; returns how many of its groups are gone."""
        mine: dict[str, list[ScoredGroup]] = {node: [] for node in self.nodes}
        for _, answered in self._answers(step):
            for node, groups in answered.items():
                mine[node] += groups
        choices = {node: self._planned(self._plans[node].pop(step, Plan()), mine[node]) for node in nodes}
        self._update(choices)
        return sum(choice.gone.total() for choice in choices.values())

    def _update(self, choices: Mapping[str, _Choice]) -> dict[str, dict[str, float]]:
        batches = {node: choices[node].own + choices[node].chosen if node in choices else [] for node in self.nodes}
        return self.policy.update(batches)

    def _available(self, step: Step, peer_steps: Mapping[str, Step] | None) -> _Available:
        """Each peer's newest files within the window, found by listing, one call a step."""
        files: dict[str, list[PublishedFile]] = {}
        rejected: Counter[str] = Counter()
        if not self.settings.shares:
            return _Available(files, rejected)
        if peer_steps is None:
            oldest = max(0, step.round - self.settings.rollout_staleness)
            # Published after the update means for the next round: else it would matter who of two learns first.
            newest = step.round - (self.settings.rollout_publish_frequency == "round")
            window = [Step(round, step.stage) for round in range(newest, oldest - 1, -1)]
        else:
            window = sorted(set(peer_steps.values()), reverse=True)
        for wanted in window:
            found: dict[str, list[PublishedFile]] = defaultdict(list)
            for file in self.experiment.published(wanted):
                if not isinstance(file, PublishedFile):
                    rejected[file.reason] += 1
                elif peer_steps is None or peer_steps.get(file.node) == wanted:
                    found[file.node].append(file)
            files = dict(found) | files
        return _Available(files, rejected)

    def _choose(self, node: str, step: Step, own: list[ScoredGroup], available: _Available) -> _Choice:
        wanted = self._allocation(node, step).peers
        if wanted == 0:
            return _Choice(own, [], Plan(), Counter())
        if step in self._plans[node]:
            return self._planned(self._plans[node][step], own)
        gathered = self._gather(node, step, available)
        chosen = self._select(gathered.groups, wanted, self._rng(node, "select", step))
        plan = self._plans[node][step] = make_plan(chosen, gathered)
        write_plan(self.experiment, node, step, plan, self._clock())
        return _Choice(own, chosen, plan, Counter())

    def _planned(self, plan: Plan, own: list[ScoredGroup]) -> _Choice:
        """What the node had chosen before it was restarted."""
        found = self._reader.find(plan.names)
        return _Choice(own, found.groups, plan, found.rejected)

    def _gather(self, node: str, step: Step, available: _Available) -> Gathered:
        peers = sorted(peer for peer in available.files if peer != node)
        asked = self._rng(node, "peers", step).sample(peers, min(len(peers), self.settings.fetch_max_peers))
        gathered = Gathered(rejected=Counter(available.rejected))
        deadline = self._timer() + self.settings.fetch_timeout_seconds
        # However much a peer publishes, it does not fill the others' training with itself.
        share = self.settings.most_groups
        for peer in sorted(asked):
            found = self._reader.read(available.files[peer], lambda: self._timer() > deadline)
            gathered.rejected += found.rejected
            if len(found.groups) > share:
                gathered.rejected["over_share"] += len(found.groups) - share
                kept = sorted(self._rng(node, f"share of {peer}", step).sample(range(len(found.groups)), share))
                found.groups = [found.groups[index] for index in kept]
            gathered.groups += found.groups
        return gathered

    # Held-out questions

    def evaluate(self) -> dict[str, Evaluation]:
        """How each node does on held-out questions, off the training path."""
        return evaluate(self.nodes, self.task, self.policy, self.settings)

    def _is_evaluated(self, step: Step) -> bool:
        every = self.settings.eval_every
        return every > 0 and step.stage == self.settings.max_stages - 1 and (step.round + 1) % every == 0

    # What is left behind

    def _row(self, node: str, step: Step, choice: _Choice, stats: Mapping[str, float]) -> dict[str, Any]:
        completions = [rollout for scored in choice.own for rollout in scored.group.rollouts]
        ages = [step.round - scored.group.step.round for scored in choice.chosen]
        return {
            "run": self.experiment.run,
            "timestamp": self._clock(),
            "round": step.round,
            "stage": step.stage,
            "node_id": node,
            "experiment": self.experiment.name,
            "my_reward": fmean(scored.mean_reward for scored in choice.own),
            "train_reward": fmean(scored.mean_reward for scored in choice.own + choice.chosen),
            "informative_local": sum(scored.informative for scored in choice.own),
            "own_groups": len(choice.own),
            **account(self._allocation(node, step).peers, choice.chosen, choice.plan, choice.gone),
            "external_age": fmean(ages) if ages else 0.0,
            "generated_tokens": sum(rollout.tokens for rollout in completions),
            "truncated": fmean(rollout.truncated for rollout in completions),
            **stats,
        }

    def _record(self, node: str, step: Step, choice: _Choice, row: Mapping[str, Any]) -> None:
        """Reward and vote first, the metrics row last: with it the step counts as done."""
        self.experiment.write_reward(node, step, row["my_reward"], self._clock())
        self.experiment.write_vote(node, step, *vote(node, choice.own, choice.plan))
        self.experiment.append_metrics(node, row)
        self._recorded[node].add(step)
        self._history[node].append(seen(row))
        self._plans[node].pop(step, None)

    def recorded_steps(self, node: str) -> set[Step]:
        """The steps this node has finished, in this life or an earlier one."""
        return set(self._recorded[node])

    def forget_old_plans(self) -> None:
        """Drop the plans of finished steps: once the host stands where it stood, nobody replays them."""
        for node in self.nodes:
            self._plans[node] = {s: plan for s, plan in self._plans[node].items() if s not in self._recorded[node]}

    def _allocation(self, node: str, step: Step) -> Allocation:
        return allocate(self.settings, self._history[node], step)

    def _rng(self, node: str, purpose: str, step: Step) -> random.Random:
        return named_rng(self.settings.seed, node, purpose, step)

    def _seed(self, node: str, purpose: str, step: Step) -> int:
        return named_seed(self.settings.seed, node, purpose, step)


class _Stopwatch:
    """Seconds by phase; phases that come several times add up."""

    def __init__(self, timer: Callable[[], float], seconds: Mapping[str, float] | None = None) -> None:
        self._timer, self._last = timer, timer()
        self.seconds: dict[str, float] = dict(seconds or {})

    def lap(self, phase: str) -> None:
        now = self._timer()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
