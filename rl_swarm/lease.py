"""Holding a name: one process per node name and one coordinator, without locks and without comparing clocks.

A lease is a record whose `beat` grows while its holder lives. Whoever wants a name that is held watches the beat for
`LEASE_SECONDS` of his own time: if it moves, the name is taken; if not, the holder is dead and the name is taken over.
On the holder's own machine the process table answers at once. A holder that finds another's token in its record has
been taken for dead (a laptop that slept) and ends.
"""

from __future__ import annotations

import os
import platform
import secrets
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from rl_swarm import __version__
from rl_swarm.errors import KeyExists, KeyMissing, MalformedRecord, NameTaken
from rl_swarm.experiment import Experiment
from rl_swarm.records import Peer, Process
from rl_swarm.types import Step

BEATS_PER_LEASE = 5


class Lease:
    """A name this process holds. Safe to use from the thread that beats and the thread that works."""

    def __init__(self, experiment: Experiment, key: str, peer: Peer) -> None:
        self._experiment, self._key, self._peer = experiment, key, peer
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return self._peer.peer_id

    def beat(self, *, shared: Step | None = None, learned: Step | None = None) -> None:
        """Show that this process lives, and how far it has come. Raises NameTaken if the name was lost."""
        with self._lock:
            # Remembered first: if the store fails now, the next beat carries the same news.
            self._peer = msgspec.structs.replace(
                self._peer,
                beat=self._peer.beat + 1,
                shared=shared or self._peer.shared,
                learned=learned or self._peer.learned,
            )
            self._check_own()
            self._experiment.write_lease(self._key, self._peer)

    def release(self) -> None:
        with self._lock:
            try:
                self._check_own()
            except NameTaken:
                return  # somebody else's record now: not ours to close
            self._peer = msgspec.structs.replace(self._peer, left=True)
            self._experiment.write_lease(self._key, self._peer)

    def _check_own(self) -> None:
        try:
            found = self._experiment.read_lease(self._key)
        except KeyMissing:
            self._experiment.check_still_here()
            return  # the record was removed but the experiment stands: the next write restores it
        except MalformedRecord:
            return  # somebody damaged it: the next write mends it
        if found.token != self._peer.token:
            raise NameTaken(
                f"The name {self.name} was taken over by {describe(found.process)}: this process gave no sign of life "
                "for too long, or was started twice."
            )


def claim(
    experiment: Experiment,
    key: str,
    node: str,
    role: str,
    model: str,
    timestamp: float,
    lease_seconds: float,
    clock: Callable[[], float],
    pause: Callable[[float], None],
) -> Lease:
    """Take a name, or raise NameTaken with a sentence that says who holds it."""
    peer = Peer(
        run=experiment.run,
        peer_id=node,
        node_role=role,
        model=model,
        version=__version__,
        registered_at=timestamp,
        token=secrets.token_hex(8),
        process=this_process(),
        lease_seconds=lease_seconds,
    )
    try:
        experiment.create_lease(key, peer)
        return Lease(experiment, key, peer)
    except KeyExists:
        _wait_until_dead(experiment, key, node, role, lease_seconds, clock, pause)
    experiment.write_lease(key, peer)
    # Two claimants may both have found the holder dead: the later write stands, and both read back which it was.
    pause(min(0.1, lease_seconds / 10))
    try:
        found = experiment.read_lease(key)
    except (KeyMissing, MalformedRecord):
        raise NameTaken(f"The name {node} could not be taken: its record was changed meanwhile. Try again.") from None
    if found.token != peer.token:
        raise NameTaken(_taken(found, role))
    return Lease(experiment, key, peer)


def _wait_until_dead(
    experiment: Experiment,
    key: str,
    node: str,
    role: str,
    lease_seconds: float,
    clock: Callable[[], float],
    pause: Callable[[float], None],
) -> None:
    try:
        holder = experiment.read_lease(key)
    except (KeyMissing, MalformedRecord):
        return
    if holder.left or holder.run != experiment.run:
        return
    state = process_state(holder.process)
    if state == "alive":
        raise NameTaken(_taken(holder, role))
    if state == "dead":
        return
    patience = max(lease_seconds, holder.lease_seconds)
    deadline = clock() + patience
    while clock() < deadline:
        pause(patience / (2 * BEATS_PER_LEASE))
        try:
            now = experiment.read_lease(key)
        except (KeyMissing, MalformedRecord):
            return
        if now.left:
            return
        if (now.token, now.beat) != (holder.token, holder.beat):
            raise NameTaken(_taken(now, role))


def _taken(holder: Peer, role: str) -> str:
    if role == "coordinator":
        return (
            f"This experiment has a coordinator already: {holder.peer_id}, {describe(holder.process)}. "
            "A second one can take over when that one has ended."
        )
    return (
        f"The node name {holder.peer_id} is taken by {describe(holder.process)}. "
        "Choose another NODE_ID, or end that process first."
    )


class Watch:
    """Which peers live, as this observer sees it: whoever's beat moved within the lease, by the observer's clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[str, int, float]] = {}

    def live(self, peer: Peer) -> bool:
        now = self._clock()
        token, beat, since = self._seen.get(peer.peer_id, ("", -1, now))
        if (token, beat) != (peer.token, peer.beat):
            since = now
            self._seen[peer.peer_id] = (peer.token, peer.beat, now)
        return not peer.left and now - since < peer.lease_seconds and process_state(peer.process) != "dead"


@cache
def _machine() -> tuple[str, str]:
    """Host name, and what distinguishes this boot and this container from others of the same name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    container = Path("/proc/self/ns/pid")
    marks = [boot.read_text().strip() if boot.exists() else "", os.readlink(container) if container.exists() else ""]
    return platform.node(), " ".join(marks).strip()


def _started(pid: int) -> str | None:
    """When a process of this machine began, in the kernel's ticks: tells a process from a later one of the same id."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    # A zombie has ended; only its parent has not noticed yet.
    return None if fields[0] == "Z" else fields[19]


@cache
def _process_of(pid: int) -> Process:
    host, boot = _machine()
    return Process(host=host, boot=boot, pid=pid, started=_started(pid) or "")


def this_process() -> Process:
    return _process_of(os.getpid())


def process_state(process: Process) -> Literal["alive", "dead", "unknown"]:
    """Certain for processes of this machine where it has a process table, unknown for all others."""
    host, boot = _machine()
    if not boot or (process.host, process.boot) != (host, boot):
        return "unknown"
    return "alive" if process.started and _started(process.pid) == process.started else "dead"


def describe(process: Process) -> str:
    return f"process {process.pid} on {process.host}"
