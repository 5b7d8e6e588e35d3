"""What there is to know about an experiment at a glance. Reads only; loads no torch."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from rl_swarm.experiment import Experiment
from rl_swarm.lease import process_state
from rl_swarm.records import Peer


def is_active(peer: Peer) -> bool:
    """Not signed off, and not known to be dead. A single look cannot tell more: beats must be watched for a while."""
    return not peer.left and process_state(peer.process) != "dead"


def experiment_status(experiment: Experiment) -> dict[str, Any]:
    state = experiment.state()
    peers = experiment.peers()
    active = [node for node, peer in peers.known.items() if is_active(peer)]
    rewards = cumulative_rewards(experiment)
    return {
        "experiment": experiment.name,
        "run": experiment.run,
        "current_round": state.round if state else 0,
        "current_stage": state.stage if state else 0,
        "finished": state.finished if state else False,
        "last_updated": state.updated_at if state else None,
        "num_active_peers": len(active),
        "active_peers": len(active),
        "peer_ids": sorted(peers.known),
        "malformed_peers": peers.malformed,
        "latest_checkpoint": experiment.latest_checkpoint(),
        "cumulative_rewards": {node: sum(values) for node, values in rewards.items()},
        "total_cumulative_reward": sum(sum(values) for values in rewards.values()),
        "total_metric_entries": sum(len(values) for values in rewards.values()),
    }


def metric_rows(experiment: Experiment, node: str | None = None) -> list[dict[str, Any]]:
    """All metrics rows, ordered by step and node."""
    nodes = [name for name in experiment.logged_nodes() if node in (None, name)]
    rows = [row for name in nodes for row in experiment.metrics(name).rows]
    return sorted(rows, key=lambda row: (row["round"], row["stage"], row["node_id"]))


def cumulative_rewards(experiment: Experiment) -> dict[str, list[float]]:
    """Each node's own rewards, one a step."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for row in metric_rows(experiment):
        rewards[row["node_id"]].append(float(row["my_reward"]))
    return dict(rewards)


def reward_curve(rows: list[dict[str, Any]], column: str = "my_reward") -> dict[int, float]:
    """Mean over nodes by round, of the rounds that have the column."""
    values: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if row.get(column) is not None:
            values[row["round"]].append(float(row[column]))
    return {round: sum(found) / len(found) for round, found in sorted(values.items())}
