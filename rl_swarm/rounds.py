"""The rounds of a worker in real time: wait for a step, share, wait for the peers, learn, and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rl_swarm.checkpoints import CheckpointWriter
from rl_swarm.errors import KeyMissing, MalformedRecord
from rl_swarm.heart import Heart
from rl_swarm.host import Host
from rl_swarm.lease import Lease, Watch
from rl_swarm.records import Peer
from rl_swarm.types import Step
from rl_swarm.waiting import Stop, Watcher

FIRST_WORD_SECONDS, REMINDER_SECONDS = 3.0, 60.0


class Rounds:
    """Wait for a step, share, wait for the peers, learn, and again."""

    def __init__(
        self,
        host: Host,
        leases: Sequence[Lease],
        heart: Heart,
        done: Step | None,
        stop: Stop,
        say: Callable[[str], None],
        watcher: Watcher,
        writer: CheckpointWriter,
    ) -> None:
        self._host, self._leases, self._heart, self._done = host, leases, heart, done
        self._stop, self._say, self._watcher, self._writer = stop, say, watcher, writer
        self._settings = host.settings
        self._watch = Watch(time.monotonic)
        self._free = host.settings.coordinator_pace == "free"
        self._saved: Step | None = None

    def run(self) -> None:
        while (step := self._next_step()) is not None:
            self._heart.check()
            began = time.monotonic()
            skipped = self._skipped(step)
            shared = self._host.share(step)
            self._beat(shared=step)
            waited = self._await_peers(step, began)
            shared.seconds["wait"] = waited
            rows = self._host.learn(step, shared, self._peer_steps(step) if self._free else None, skipped)
            self._done = step
            self._beat(learned=step)
            if rows:
                self._watcher.rows(step, rows)
            if step.stage == self._settings.max_stages - 1 and self._is_checkpointed(step.round):
                self._checkpoint()
        if self._done is not None and self._saved != self._done:
            self._checkpoint()
        self._writer.finish()
        if self._done is not None and self._stop.requested:
            self._say(f"saved after round {self._done.round}; the same command goes on from here")

    def _next_step(self) -> Step | None:
        """The step to do next, as soon as it is time; None when there is none or a stop was requested."""
        expected = self._expected()
        if expected.round >= self._settings.max_rounds:
            self._say(f"round {self._settings.max_rounds - 1} was the last")
            return None
        if self._free:
            return None if self._stop.requested else expected
        began, reminded = time.monotonic(), 0.0
        for _ in self._stop.polls():
            state = self._host.experiment.state()
            if state is not None and state.finished:
                self._say(f"the experiment is finished, its last round was {state.round}")
                return None
            if state is not None and (self._done is None or state.step > self._done):
                return state.step if state.round < self._settings.max_rounds else None
            waited = time.monotonic() - began
            if waited > FIRST_WORD_SECONDS and not reminded and not self._has_coordinator():
                reminded = waited
                self._say("waiting: this experiment has no coordinator right now; rl-swarm coordinate starts one")
            if waited - reminded > max(REMINDER_SECONDS, self._settings.coordinator_round_interval):
                reminded = waited
                self._say(f"still waiting after {waited:.0f} s: no new round. Is the coordinator running?")
        return None

    def _has_coordinator(self) -> bool:
        try:
            seat = self._host.experiment.read_lease(self._host.experiment.coordinator_key())
        except (KeyMissing, MalformedRecord):
            return False
        return self._watch.live(seat)

    def _expected(self) -> Step:
        return Step(0) if self._done is None else self._done.following(self._settings.max_stages)

    def _skipped(self, step: Step) -> int:
        # A node that joins late has skipped nothing: those rounds were never its own.
        missed = 0 if self._done is None else max(0, step.round - self._expected().round)
        if missed:
            self._say(f"skipped {missed} round{'' if missed == 1 else 's'}: the swarm is at round {step.round}")
        return missed

    def _await_peers(self, step: Step, began: float) -> float:
        """Let the others publish: until every live worker has, the clock moves on, or half the round is over."""
        settings = self._settings
        if self._free or not settings.shares or settings.rollout_publish_frequency == "round":
            return 0.0
        start = time.monotonic()
        for _ in self._stop.polls():
            if time.monotonic() - began >= settings.coordinator_round_interval / 2:
                break
            if all(peer.shared_step is not None and peer.shared_step >= step for peer in self._live_peers()):
                break
            state = self._host.experiment.state()
            if state is not None and state.step > step:
                break
        return time.monotonic() - start

    def _live_peers(self) -> list[Peer]:
        peers = self._host.experiment.peers().known.values()
        others = [peer for peer in peers if peer.node_role == "worker" and peer.peer_id not in self._host.nodes]
        return [peer for peer in others if self._watch.live(peer)]

    def _peer_steps(self, step: Step) -> dict[str, Step]:
        """How far everyone has come who is there, this host's own nodes included: they learn from each other too."""
        steps = {peer.peer_id: peer.shared_step for peer in self._live_peers() if peer.shared_step is not None}
        return steps | dict.fromkeys(self._host.nodes, step)

    def _beat(self, *, shared: Step | None = None, learned: Step | None = None) -> None:
        for lease in self._leases:
            self._heart.beat(lease, shared, learned)
        self._stop.tell()

    def _is_checkpointed(self, round: int) -> bool:
        every = self._settings.checkpoint_interval
        return every > 0 and (round + 1) % every == 0

    def _checkpoint(self) -> None:
        assert self._done is not None
        self._writer.write(self._done)
        self._saved = self._done
