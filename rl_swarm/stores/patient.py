"""A store that waits out trouble: a full disk, an unmounted drive, a lost share.

Every operation is tried again until it works; `wait` is told the error and how often it was tried, sleeps, and raises
if waiting has lost its point. Writes are whole or nothing, so trying again is safe, with one exception that callers
know: a `create` that failed half-way through the network may find its own key the second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from rl_swarm.errors import StoreUnavailable
from rl_swarm.protocols import Store

_Result = TypeVar("_Result")


class PatientStore:
    def __init__(self, store: Store, wait: Callable[[StoreUnavailable, int], None]) -> None:
        self._store, self._wait = store, wait

    def get(self, key: str, limit: int | None = None) -> bytes:
        return self._try(lambda: self._store.get(key, limit))

    def put(self, key: str, value: bytes) -> None:
        self._try(lambda: self._store.put(key, value))

    def create(self, key: str, value: bytes) -> None:
        self._try(lambda: self._store.create(key, value))

    def append(self, key: str, line: bytes) -> None:
        self._try(lambda: self._store.append(key, line))

    def keys(self, prefix: str, *, shallow: bool = False) -> Iterable[str]:
        return self._try(lambda: self._store.keys(prefix, shallow=shallow))

    def delete(self, key: str) -> None:
        self._try(lambda: self._store.delete(key))

    def move(self, key: str, target: str) -> None:
        self._try(lambda: self._store.move(key, target))

    def _try(self, operation: Callable[[], _Result]) -> _Result:
        attempt = 0
        while True:
            try:
                return operation()
            except StoreUnavailable as error:
                attempt += 1
                self._wait(error, attempt)
