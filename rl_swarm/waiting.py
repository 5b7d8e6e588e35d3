"""How a run waits, and whom it tells: the wish to end, the pause that heeds it, and the watcher."""

from __future__ import annotations

import threading
from typing import Any

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


class Watcher:
    """What a run tells its user: lines to say, and the metrics rows of each finished step. Override what you need."""

    def say(self, line: str) -> None:
        pass

    def rows(self, step: Step, rows: dict[str, dict[str, Any]]) -> None:
        pass
