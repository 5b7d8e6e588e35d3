"""How threads sleep: until asked to end, until it is time to look again, or until there is news."""

from __future__ import annotations

import threading
import time

import pytest

from rl_swarm import waiting
from rl_swarm.errors import Stopped
from rl_swarm.waiting import Stop


def test_a_wish_to_end_wakes_every_sleeper() -> None:
    stop = Stop()
    threading.Timer(0.05, stop.request).start()
    began = time.monotonic()
    stop.pause(60.0)
    assert stop.requested and time.monotonic() - began < 30
    assert list(stop.polls()) == []
    with pytest.raises(Stopped):
        stop.pause_or_end(60.0)


def test_news_from_the_partner_ends_a_wait_between_two_looks_but_not_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "SHORTEST_POLL", 60.0)
    sleeper, worker = Stop(), Stop()
    worker.pair(sleeper)
    polls = sleeper.polls(60.0)
    next(polls)
    threading.Timer(0.05, worker.tell).start()
    began = time.monotonic()
    next(polls)
    assert time.monotonic() - began < 30
    threading.Timer(0.01, worker.tell).start()
    began = time.monotonic()
    sleeper.pause(0.2)
    assert time.monotonic() - began >= 0.19


def test_news_that_came_while_looking_is_not_slept_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "SHORTEST_POLL", 60.0)
    sleeper, worker = Stop(), Stop()
    sleeper.pair(worker)
    polls = sleeper.polls(60.0)
    began = time.monotonic()
    for _ in range(3):
        next(polls)
        worker.tell()  # after the look began, before the sleep
    assert time.monotonic() - began < 30


def test_a_stop_without_a_partner_tells_nobody() -> None:
    stop = Stop()
    stop.tell()
    assert not stop.requested


def test_a_request_may_come_from_within_a_sleep_as_a_signal_handler_does() -> None:
    stop = Stop()
    with stop._changed:
        stop.request()
    assert stop.requested
