"""Saving nodes and bringing them back exactly: the newest whole checkpoint, then a replay of the steps since.

A checkpoint holds weights and optimiser. Generators and the position in the question stream need no place in it: both
are functions of the round. Steps a node finished after its checkpoint are done again from what lies in the store, its
own plan included, so a node killed at any moment ends with the weights of one that was not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rl_swarm.errors import CheckpointError, KeyMissing
from rl_swarm.host import Host
from rl_swarm.types import Step


def write_checkpoints(host: Host, round: int) -> None:
    """One for each node of the host; the oldest beyond CHECKPOINT_KEEP go."""
    for node in host.nodes:
        host.experiment.write_checkpoint(node, round, host.policy.save(node, _note(host, node, round)))
        for old in host.experiment.checkpoint_rounds(node)[: -host.settings.checkpoint_keep]:
            host.experiment.delete_checkpoint(node, old)


def restore(host: Host, say: Callable[[str], None]) -> Step | None:
    """Bring the host to where its nodes were; returns the last step they did, None if they never did any."""
    checkpoint = _load_newest(host, say)
    steps = sorted({step for node in host.nodes for step in host.recorded_steps(node)})
    replayed = [step for step in steps if checkpoint is None or step.round > checkpoint]
    if replayed:
        say(f"doing rounds {replayed[0].round} to {replayed[-1].round} again to be exactly where this node was")
    for step in replayed:
        host.learn(step, host.share(step))
    return steps[-1] if steps else None


def _load_newest(host: Host, say: Callable[[str], None]) -> int | None:
    """Load the newest round of which every node has a whole checkpoint. They go together: one program, one round."""
    rounds = set.intersection(*(set(host.experiment.checkpoint_rounds(node)) for node in host.nodes))
    fresh = {node: host.policy.save(node, {}) for node in host.nodes} if rounds else {}
    for round in sorted(rounds, reverse=True):
        try:
            for node in host.nodes:
                saved = host.experiment.read_checkpoint(node, round)
                host.policy.load(node, saved, _note(host, node, round))
        except (CheckpointError, KeyMissing) as error:
            say(f"passing over the checkpoint of round {round}: {error}")
            # One node's may have been whole and loaded before another's was not.
            for node, saved in fresh.items():
                host.policy.load(node, saved, {})
            continue
        say(f"resumed from the checkpoint of round {round}")
        return round
    return None


def _note(host: Host, node: str, round: int) -> Mapping[str, str | int]:
    return {"run": host.experiment.run, "node": node, "seed": host.settings.seed, "round": round}
