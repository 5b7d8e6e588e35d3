"""The coordinator: a clock, not a boss. It decides when a step is over and writes that down; it loads no model.

A pace is one function (seconds this step has lasted, live workers) -> is it over? The coordinator remembers nothing
that is not in the store, so a restarted one goes on at the round it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rl_swarm.experiment import Experiment
from rl_swarm.lease import Watch
from rl_swarm.records import Peer, State
from rl_swarm.settings import Settings
from rl_swarm.types import Step

Pace = Callable[[Step, float, Sequence[Peer]], bool]


def interval(seconds: float) -> Pace:
    """By the timer alone."""
    return lambda step, elapsed, workers: elapsed >= seconds


def quorum(seconds: float) -> Pace:
    """When every live worker has learned this step, or the time is up."""

    def over(step: Step, elapsed: float, workers: Sequence[Peer]) -> bool:
        done = all((last := worker.learned_step) is not None and last >= step for worker in workers)
        return done or elapsed >= seconds

    return over


def free() -> Pace:
    """No common clock: the coordinator only follows the swarm, a step is over when anyone has learned it."""
    return lambda step, elapsed, workers: any(
        (last := worker.learned_step) is not None and last >= step for worker in workers
    )


def pace_of(settings: Settings) -> Pace:
    seconds = settings.coordinator_round_interval
    return {"interval": interval(seconds), "quorum": quorum(seconds), "free": free()}[settings.coordinator_pace]


class Coordinator:
    def __init__(
        self,
        experiment: Experiment,
        name: str,
        settings: Settings,
        clock: Callable[[], float],
        timer: Callable[[], float],
    ) -> None:
        self._experiment, self._name, self._settings = experiment, name, settings
        self._clock, self._timer = clock, timer
        self._pace = pace_of(settings)
        self._watch = Watch(timer)
        self._began: float | None = None
        self._last_joined, self._joined = timer(), 0
        self._last = Step(settings.max_rounds - 1, settings.max_stages - 1)
        self.state = self._pick_up()
        self.workers: list[Peer] = []

    def _pick_up(self) -> State:
        """Go on where the clock stands; a clock that is lost or damaged is set by what the workers have done."""
        state = self._experiment.state()
        if state is None:
            done = [peer.learned_step for peer in self._experiment.peers().known.values() if peer.learned_step]
            # A record that claims the impossible sets the clock to its last step at most.
            return self._write(min(max(done).following(self._settings.max_stages), self._last) if done else Step(0))
        if state.finished and state.step < self._last:
            # More rounds are asked for than when it was finished.
            return self._write(state.step.following(self._settings.max_stages))
        return state

    def tick(self) -> State:
        """Look once; move on if the step is over. Time runs only while there is a worker."""
        if self.state.finished:
            return self.state
        known = [peer for peer in self._experiment.peers().known.values() if peer.node_role == "worker"]
        self.workers = [peer for peer in known if self._watch.live(peer)]
        now = self._timer()
        if len(self.workers) > self._joined:
            self._last_joined = now
        self._joined = len(self.workers)
        # Without a common clock there is only history to follow, and those who left have made it too.
        followed = known if self._settings.coordinator_pace == "free" else self.workers
        step = self.state.step
        if not followed:
            self._began = None
            # Workers end by themselves after the last step; the clock then has nobody left to wait for.
            if step >= self._last and any(peer.learned_step and peer.learned_step >= self._last for peer in known):
                self._advance(step)
            return self.state
        if self._began is None:
            self._began = now
        if self._pace(step, now - self._began, followed) and not self._still_gathering(step, now):
            self._advance(step)
            self._began = now
        return self.state

    def _still_gathering(self, step: Step, now: float) -> bool:
        """Under quorum the first step waits for latecomers: the first worker alone would run away from the others."""
        if self._settings.coordinator_pace != "quorum" or step != Step(0):
            return False
        return now - self._last_joined < self._settings.coordinator_join_grace

    def _advance(self, step: Step) -> None:
        finished = step >= self._last
        self.state = self._write(step if finished else step.following(self._settings.max_stages), finished=finished)

    def _write(self, step: Step, finished: bool = False) -> State:
        state = State(
            run=self._experiment.run,
            round=step.round,
            stage=step.stage,
            updated_at=self._clock(),
            updated_by=self._name,
            finished=finished,
        )
        self._experiment.write_state(state)
        return state
