"""How a node divides its training set of I + J groups between its own and its peers': fixed, or following the data.

Adaptive (ADAPTIVE_IJ_ENABLED): peers' groups are filtered for informative ones, own groups are not. So with p the
chance that a group is informative and N - 1 peers of the same I, a node's own groups give I * p informative ones, and
its peers offer (N - 1) * I * p to fill J from. More J means more of the training set is informative, until the offer
runs out, at J = (N - 1) * I * p. With I + J = T fixed that is

    J = T * (N - 1) * p / (1 + (N - 1) * p)        rounded down, at least 1, at most T - 1

p and N are measured over the node's last twenty rounds: the share of informative groups among all it wrote or read, and
the number of peers it read from. Before the first round I and J are as configured.

What the formula leaves out: that a peer's group may teach less than an own one (it was not sampled from this model),
that peers may have another I, be slower or repeat themselves, that groups of earlier rounds may fill J too
(ROLLOUT_STALENESS), and that fewer own groups mean less for the others to read. It maximises how many informative
groups a node trains on, not how much it learns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any, NamedTuple

from rl_swarm.settings import Settings
from rl_swarm.types import Step

WINDOW = 20


class Allocation(NamedTuple):
    """I and J of one node in one round."""

    own: int
    peers: int


class Seen(NamedTuple):
    """What one finished round says about the swarm."""

    step: Step
    informative: int
    groups: int
    peers: int


def seen(row: Mapping[str, Any]) -> Seen:
    """From a metrics row; rows of earlier versions, without these counts, say nothing."""
    informative = row.get("informative_local", 0) + row.get("informative_external", 0)
    groups = row.get("own_groups", 0) + row.get("external_seen", 0)
    return Seen(Step(row["round"], row["stage"]), informative, groups, row.get("peers_seen", 0))


def allocate(settings: Settings, history: Iterable[Seen], step: Step) -> Allocation:
    """The node's I and J at a step: a function of what it recorded before, so that a replayed round has the same."""
    configured = Allocation(settings.num_train_samples, settings.num_transplant_trees)
    if not settings.adaptive_ij_enabled:
        return configured
    recent = sorted(one for one in history if one.step < step)[-WINDOW:]
    groups = sum(one.groups for one in recent)
    if not groups:
        return configured
    total = sum(configured)
    chance = sum(one.informative for one in recent) / groups
    # Informative groups on offer for each own one.
    offered = fmean(one.peers for one in recent) * chance
    peers = min(total - 1, max(1, int(total * offered / (1 + offered))))
    return Allocation(total - peers, peers)
