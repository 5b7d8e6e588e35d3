"""A whole swarm in one process, in lockstep: no waiting, no clocks, the same result every time.

All hosts share, then all hosts learn, then the next step begins. What lies in the store afterwards is what a real
swarm would have left, so every reader works on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rl_swarm import __version__
from rl_swarm.experiment import Experiment
from rl_swarm.host import Host
from rl_swarm.lease import this_process
from rl_swarm.records import Peer, State
from rl_swarm.types import Step

SIMULATOR = "simulator"


def simulate(
    experiment: Experiment,
    hosts: Sequence[Host],
    rounds: int,
    stages: int = 1,
    clock: Callable[[], float] = lambda: 0.0,
    on_step: Callable[[Step, dict[str, dict[str, Any]]], None] = lambda step, rows: None,
) -> list[dict[str, Any]]:
    """Run the swarm; returns all metrics rows in order. `on_step` sees the rows of each step as it ends."""
    _register(experiment, hosts, clock(), left=False)
    every: list[dict[str, Any]] = []
    for step in (Step(round, stage) for round in range(rounds) for stage in range(stages)):
        experiment.write_state(State(experiment.run, step.round, step.stage, clock(), SIMULATOR))
        shared = [host.share(step) for host in hosts]
        rows: dict[str, dict[str, Any]] = {}
        for host, mine in zip(hosts, shared, strict=True):
            rows |= host.learn(step, mine)
        _register(experiment, hosts, clock(), left=False, learned=step)
        every += rows.values()
        on_step(step, rows)
    experiment.write_state(State(experiment.run, rounds - 1, stages - 1, clock(), SIMULATOR, finished=True))
    _register(experiment, hosts, clock(), left=True, learned=Step(rounds - 1, stages - 1))
    return every


def _register(
    experiment: Experiment, hosts: Sequence[Host], timestamp: float, left: bool, learned: Step | None = None
) -> None:
    for host in hosts:
        for node in host.nodes:
            peer = Peer(
                run=experiment.run,
                peer_id=node,
                node_role="worker",
                model=host.settings.model_name,
                version=__version__,
                registered_at=timestamp,
                token=SIMULATOR,
                process=this_process(),
                beat=int(left),
                shared=learned,
                learned=learned,
                left=left,
            )
            experiment.write_lease(experiment.peer_key(node), peer)
