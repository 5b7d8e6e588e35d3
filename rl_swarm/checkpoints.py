"""Saving nodes and bringing them back exactly: the newest whole checkpoint, then a replay of the steps since.

A checkpoint holds weights and optimiser. Generators and the position in the question stream need no place in it: both
are functions of the step. Steps a node finished after its checkpoint are done again from what lies in the store, its
own plan included, so a node killed at any moment ends with the weights of one that was not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from rl_swarm.errors import CheckpointError, KeyMissing, Stopped
from rl_swarm.host import Host
from rl_swarm.types import Step

# Copies on their way to the store, all nodes' together.
MOST_WAITING_BYTES = 2 * 2**30


class CheckpointWriter:
    """Writes checkpoints while training goes on: nodes are copied at once, the store takes them at its own speed.

    A node killed before its checkpoint is written has the one before and replays more. Copies that wait take memory, so
    not many do: beyond a limit training waits for the store.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._waiting: deque[tuple[int, Future[None]]] = deque()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(wait=True)

    def write(self, step: Step) -> None:
        """Save every node of the host as it is after `step`; what went wrong with earlier ones is raised here."""
        for node in self._host.nodes:
            note = {**_identity(self._host, node), "round": step.round, "stage": step.stage}
            data = self._host.policy.save(node, note)
            self._settle(MOST_WAITING_BYTES - len(data))
            self._waiting.append((len(data), self._thread.submit(self._store, node, step.round, data)))

    def finish(self) -> None:
        """Wait until all is written."""
        self._settle(-1)

    def _settle(self, room: int) -> None:
        while self._waiting and (sum(size for size, _ in self._waiting) > room or self._waiting[0][1].done()):
            self._waiting.popleft()[1].result()

    def _store(self, node: str, round: int, data: bytes) -> None:
        """One node's checkpoint; then its oldest beyond CHECKPOINT_KEEP go."""
        self._host.experiment.write_checkpoint(node, round, data)
        for old in self._host.experiment.checkpoint_rounds(node)[: -self._host.settings.checkpoint_keep]:
            self._host.experiment.delete_checkpoint(node, old)


def restore(host: Host, say: Callable[[str], None], stopped: Callable[[], bool]) -> Step | None:
    """Bring every node to where it was; returns the last step all of them have done, None if none did any.

    Nodes of one host may have different histories: killed between one node's record and the next one's, or joined by
    a node that is new. A new node has nothing to go back to and does not hold the others up.
    """
    saved = {node: _load_newest(host, node, say) for node in host.nodes}
    steps = {node: host.recorded_steps(node) for node in host.nodes}
    missed = {
        node: {step for step in steps[node] if (last := saved[node]) is None or step > last} for node in host.nodes
    }
    replayed = sorted(set().union(*missed.values()))
    if replayed:
        say(f"doing rounds {replayed[0].round} to {replayed[-1].round} again to be exactly where this node was")
    gone = 0
    for step in replayed:
        if stopped():
            raise Stopped("Stopped while rounds were done again; nothing was changed.")
        gone += host.replay(step, [node for node in host.nodes if step in missed[node]])
    if gone:
        say(f"{gone} of the peers' groups learned from in those rounds are gone: the weights are near what they were")
    host.forget_old_plans()
    return min((max(done) for done in steps.values() if done), default=None)


def _load_newest(host: Host, node: str, say: Callable[[str], None]) -> Step | None:
    """Load the node's newest whole checkpoint; returns the step it was taken after."""
    for round in reversed(host.experiment.checkpoint_rounds(node)):
        try:
            data = host.experiment.read_checkpoint(node, round)
            note = host.policy.load(node, data, {**_identity(host, node), "round": round})
        except (CheckpointError, KeyMissing) as error:
            say(f"passing over the checkpoint of round {round} of {node}: {error}")
            continue
        say(f"{node} resumed from the checkpoint of round {round}")
        return Step(round, int(note["stage"]))
    return None


def _identity(host: Host, node: str) -> dict[str, str | int]:
    return {"run": host.experiment.run, "node": node, "seed": host.settings.seed}
