"""Names and their upkeep: claiming them, keeping their beats going, giving them back."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from rl_swarm.errors import ExperimentMissing, StoreUnavailable
from rl_swarm.experiment import Experiment
from rl_swarm.lease import BEATS_PER_LEASE, Lease, claim
from rl_swarm.settings import Settings
from rl_swarm.types import Step
from rl_swarm.waiting import Stop


class Heart:
    """A thread that keeps the beats going while a round takes its time. A lost name stops the run."""

    def __init__(self, leases: Sequence[Lease], lease_seconds: float, stop: Stop) -> None:
        self._leases, self._pause, self._stop = leases, lease_seconds / BEATS_PER_LEASE, stop
        self._ended = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)

    def __enter__(self) -> Heart:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def check(self) -> None:
        """Raise in the working thread what went wrong in this one."""
        if self._failure is not None:
            raise self._failure

    def beat(self, lease: Lease, shared: Step | None = None, learned: Step | None = None) -> None:
        """One beat. Where the store does not take it, the next one carries the same news."""
        try:
            lease.beat(shared=shared, learned=learned)
        except StoreUnavailable:
            pass  # the working thread meets the same trouble, waits and says so

    def _run(self) -> None:
        while not self._ended.wait(self._pause):
            try:
                for lease in self._leases:
                    self.beat(lease)
            except Exception as error:  # noqa: BLE001 kept, and raised in the working thread by `check`
                self._failure = error
                self._stop.request()
                return


def claim_names(
    stack: ExitStack, experiment: Experiment, nodes: Sequence[str], role: str, settings: Settings, stop: Stop
) -> list[Lease]:
    """Claim names, all at once: where a holder must be watched for a while, it is one while and not several."""
    keys = {experiment.peer_key(node): node for node in nodes}
    with ThreadPoolExecutor(len(keys)) as pool:
        claims = [pool.submit(_claim, experiment, key, node, role, settings, stop) for key, node in keys.items()]
    for done in claims:
        if done.exception() is None:
            stack.callback(_release, done.result())
    return [done.result() for done in claims]


def claim_seat(stack: ExitStack, experiment: Experiment, settings: Settings, stop: Stop) -> Lease:
    """The coordinator's seat, of which there is one."""
    lease = _claim(experiment, experiment.coordinator_key(), settings.node_id, "coordinator", settings, stop)
    stack.callback(_release, lease)
    return lease


def _claim(experiment: Experiment, key: str, node: str, role: str, settings: Settings, stop: Stop) -> Lease:
    model = "" if role == "coordinator" else settings.model_name
    seconds = settings.lease_seconds
    return claim(experiment, key, node, role, model, time.time(), seconds, time.monotonic, stop.pause_or_end)


def _release(lease: Lease) -> None:
    try:
        lease.release()
    except (StoreUnavailable, ExperimentMissing):
        pass  # nowhere to write it: the lease runs out by itself
