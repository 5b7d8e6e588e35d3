"""How a run waits, and whom it tells: the wish to end, the pause that heeds it, and the watcher."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from rl_swarm.errors import Stopped
from rl_swarm.types import Step

SHORTEST_POLL, LONGEST_POLL = 0.02, 1.0


class Stop:
    """The wish to end, from a signal or from another thread."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def request(self) -> None:
        self._event.set()

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    def pause(self, seconds: float) -> None:
        """Sleep, but wake up at once when asked to end."""
        self._event.wait(seconds)

    def pause_or_end(self, seconds: float) -> None:
        """Sleep; raise Stopped if asked to end."""
        if self._event.wait(seconds):
            raise Stopped("Stopped while waiting.")

    def polls(self, longest: float = LONGEST_POLL) -> Iterator[None]:
        """Look again and again, at first often, then less, until asked to end."""
        seconds = SHORTEST_POLL
        while not self.requested:
            yield
            self.pause(seconds)
            seconds = min(longest, seconds * 1.3)


class Watcher:
    """What a run tells its user: lines to say, and the metrics rows of each finished step. Override what you need."""

    def say(self, line: str) -> None:
        pass

    def rows(self, step: Step, rows: dict[str, dict[str, Any]]) -> None:
        pass
