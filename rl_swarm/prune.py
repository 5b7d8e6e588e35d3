"""Retention: each owner removes or archives its own old rollout files, never what somebody may still need."""

from __future__ import annotations

from rl_swarm.experiment import Experiment, PublishedFile
from rl_swarm.settings import Settings
from rl_swarm.types import Step

FORGOTTEN = 10


def prune_rollouts(experiment: Experiment, node: str, step: Step, settings: Settings) -> int:
    """Retire this node's files of rounds that are out of everyone's reach; returns how many.

    What stays: the rounds asked for; those inside the staleness window; those a restarted peer replays from its last
    checkpoint; and everything since the round that the slowest peer has not learned yet.
    """
    # A checkpoint is written in the background: at the worst the one before it is the newest there is.
    replayed = 2 * settings.checkpoint_interval
    reach = max(settings.rollout_keep_last_n_rounds, settings.rollout_staleness + 1 + replayed)
    oldest_kept = step.round - reach + 1
    lag = settings.rollout_staleness + replayed
    for peer in experiment.peers().known.values():
        behind = (peer.learned_step or Step(0)).round - lag
        # Whoever is so far behind is dead or starts anew; it must not keep everything for ever.
        if peer.node_role == "worker" and not peer.left and step.round - behind < FORGOTTEN * reach:
            oldest_kept = min(oldest_kept, behind)
    retired = 0
    for round in experiment.rollout_rounds():
        if round >= oldest_kept:
            break
        for stage in experiment.rollout_stages(round):
            for file in experiment.published(Step(round, stage)):
                if isinstance(file, PublishedFile) and file.node == node:
                    experiment.retire_rollouts(file, settings.rollout_archive_old)
                    retired += 1
    return retired
