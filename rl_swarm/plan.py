"""What a node decided to train on, written down before its weights move.

A node that is killed and started again replays its last steps. By then more may have been published than it had seen,
so it does not choose anew: it reads its plan, trains on the very same groups and reports the very same figures.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import msgspec

from rl_swarm.experiment import Experiment
from rl_swarm.gathering import Gathered
from rl_swarm.types import GroupName, ScoredGroup, Step

EVENT = "selected"


class Plan(msgspec.Struct, frozen=True):
    """The chosen groups by name, and what the choice was made from."""

    groups: tuple[tuple[str, int, int, str], ...] = ()
    informative: int = 0
    zero_advantage: int = 0
    rejected: dict[str, int] = {}
    mean_rewards: dict[str, float] = {}

    @property
    def names(self) -> list[GroupName]:
        return [GroupName(node, Step(round, stage), id) for node, round, stage, id in self.groups]


class _PlanEvent(msgspec.Struct, frozen=True):
    """Where a plan belongs, as its event says."""

    round: int
    stage: int


def make_plan(chosen: Sequence[ScoredGroup], gathered: Gathered) -> Plan:
    names = [scored.group.name for scored in chosen]
    rewards: dict[str, list[float]] = defaultdict(list)
    for scored in gathered.groups:
        rewards[scored.group.node].append(scored.mean_reward)
    informative = sum(scored.informative for scored in gathered.groups)
    return Plan(
        groups=tuple((name.node, name.step.round, name.step.stage, name.id) for name in names),
        informative=informative,
        zero_advantage=len(gathered.groups) - informative,
        rejected=dict(sorted(gathered.rejected.items())),
        mean_rewards={node: fmean(values) for node, values in sorted(rewards.items())},
    )


def write_plan(experiment: Experiment, node: str, step: Step, plan: Plan, timestamp: float) -> None:
    event = {"event": EVENT, "timestamp": timestamp, "round": step.round, "stage": step.stage}
    experiment.append_event(node, event | msgspec.to_builtins(plan))


def read_plans(experiment: Experiment, node: str) -> dict[Step, Plan]:
    plans: dict[Step, Plan] = {}
    for event in experiment.events(node).rows:
        if event.get("event") != EVENT:
            continue
        try:
            place, plan = msgspec.convert(event, _PlanEvent), msgspec.convert(event, Plan)
        except msgspec.ValidationError:
            continue  # damaged by somebody: a finished step without its plan is then replayed without peers' groups
        plans[Step(place.round, place.stage)] = plan
    return plans


def account(wanted: int, chosen: Sequence[ScoredGroup], plan: Plan, gone: Counter[str]) -> dict[str, Any]:
    """The part of the metrics row that says what became of J: used, and why each missing group is missing."""
    rejected = Counter(plan.rejected) + gone
    missing = wanted - len(chosen)
    reasons: dict[str, int] = {}
    for reason, count in (("zero_advantage", plan.zero_advantage), ("rejected", rejected.total())):
        if missing > 0 and count > 0:
            reasons[reason] = min(missing, count)
            missing -= reasons[reason]
    if missing > 0:
        reasons["not_published"] = missing
    return {
        "informative_external": plan.informative,
        "external_seen": plan.informative + plan.zero_advantage,
        "peers_seen": len(plan.mean_rewards),
        "external_wanted": wanted,
        "external_used": len(chosen),
        "external_missing": reasons,
        "external_from": dict(sorted(Counter(scored.group.node for scored in chosen).items())),
        "rejected": dict(sorted(rejected.items())),
    }


def vote(node: str, own: Sequence[ScoredGroup], plan: Plan) -> tuple[str, Mapping[str, float]]:
    """The node with the highest mean reward among all this one has seen, itself included, by its own scoring."""
    scores = {**plan.mean_rewards, node: fmean(scored.mean_reward for scored in own)}
    return max(sorted(scores), key=lambda peer: scores[peer]), scores
