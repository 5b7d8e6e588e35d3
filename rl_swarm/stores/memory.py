"""A store in this process's memory: for tests and simulations."""

from __future__ import annotations

import threading

from rl_swarm.errors import KeyExists, KeyMissing, MalformedRecord
from rl_swarm.stores.keys import check_key, check_prefix, check_removable


class MemoryStore:
    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def get(self, key: str, limit: int | None = None) -> bytes:
        with self._lock:
            try:
                value = self._values[check_key(key)]
            except KeyError:
                raise KeyMissing(f"{key} is not in the store.") from None
        if limit is not None and len(value) > limit:
            raise MalformedRecord("too_large", f"{len(value)} bytes")
        return value

    def put(self, key: str, value: bytes) -> None:
        with self._lock:
            self._values[check_key(key)] = bytes(value)

    def create(self, key: str, value: bytes) -> None:
        with self._lock:
            if check_key(key) in self._values:
                raise KeyExists(f"{key} is already in the store.")
            self._values[key] = bytes(value)

    def append(self, key: str, line: bytes) -> None:
        with self._lock:
            self._values[check_key(key)] = self._values.get(key, b"") + line + b"\n"

    def keys(self, prefix: str, *, shallow: bool = False) -> list[str]:
        check_prefix(prefix)
        with self._lock:
            found = [key for key in self._values if key.startswith(prefix)]
        if not shallow:
            return sorted(found)
        start = prefix.rfind("/") + 1
        return sorted({key[:start] + _first_segment(key[start:]) for key in found})

    def delete(self, key: str) -> None:
        with self._lock:
            self._values.pop(check_removable(key), None)

    def move(self, key: str, target: str) -> None:
        with self._lock:
            check_key(target)
            if check_key(key) not in self._values:
                raise KeyMissing(f"{key} is not in the store.")
            self._values[target] = self._values.pop(key)


def _first_segment(rest: str) -> str:
    head, slash, _ = rest.partition("/")
    return head + slash
