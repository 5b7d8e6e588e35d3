"""How a run waits, and whom it tells: the wish to end, the pause that heeds it, and the watcher."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from rl_swarm.errors import Stopped
from rl_swarm.types import Step

SHORTEST_POLL, LONGEST_POLL = 0.02, 1.0


class Stop:
    """The wish to end, from a signal or from another thread; and how a thread sleeps until then.

    Two threads of one process that wait for each other's files can be paired: each then wakes the other when it has
    written something. That saves time and decides nothing; what happened is in the store.
    """

    def __init__(self) -> None:
        # Signal handlers call `request` in a thread that may be sleeping here: the lock must let it in.
        self._changed = threading.Condition(threading.RLock())
        self._requested, self._news = False, 0
        self._partner: Stop | None = None

    def request(self) -> None:
        with self._changed:
            self._requested = True
            self._changed.notify_all()

    @property
    def requested(self) -> bool:
        return self._requested

    def pause(self, seconds: float) -> None:
        """Sleep, but wake up at once when asked to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._requested, seconds)

    def pause_or_end(self, seconds: float) -> None:
        """Sleep; raise Stopped if asked to end."""
        self.pause(seconds)
        if self.requested:
            raise Stopped("Stopped while waiting.")

    def polls(self, longest: float = LONGEST_POLL) -> Iterator[None]:
        """Look again and again, at first often, then less, and at once on news, until asked to end."""
        seconds = SHORTEST_POLL
        while not self.requested:
            seen = self._news
            yield
            seconds = SHORTEST_POLL if self._heard(seen, seconds) else min(longest, seconds * 1.3)

    def _heard(self, seen: int, seconds: float) -> bool:
        """Sleep until there is news beyond what was `seen`, or the wish to end; whether it was news."""
        with self._changed:
            self._changed.wait_for(lambda: self._requested or self._news != seen, seconds)
            return self._news != seen

    def pair(self, other: Stop) -> None:
        self._partner, other._partner = other, self

    def tell(self) -> None:
        """Something was written that the partner, if there is one, may be waiting for."""
        if self._partner is not None:
            with self._partner._changed:
                self._partner._news += 1
                self._partner._changed.notify_all()


class Watcher:
    """What a run tells its user: lines to say, and the metrics rows of each finished step. Override what you need."""

    def say(self, line: str) -> None:
        pass

    def rows(self, step: Step, rows: dict[str, dict[str, Any]]) -> None:
        pass
