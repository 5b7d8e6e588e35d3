"""Everything that waits: joining, coordinating, hosting, in real time, until the work is done or a signal comes.

    work        one or more nodes of this process take part in an experiment
    coordinate  the clock
    host        both in one process

A first Ctrl-C or SIGTERM lets the current round end: what is finished is on disk, a checkpoint is written, the names
are released. A second one ends at once. A store that fails in the middle is waited for.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from rl_swarm import __version__
from rl_swarm.checkpoints import restore, write_checkpoints
from rl_swarm.coordinator import Coordinator
from rl_swarm.errors import ExperimentExists, ExperimentMissing, NameTaken, StoreUnavailable, SwarmError
from rl_swarm.experiment import Experiment, create_experiment, open_experiment
from rl_swarm.host import Host
from rl_swarm.lease import BEATS_PER_LEASE, Lease, Watch, claim
from rl_swarm.policies import open_policy
from rl_swarm.protocols import Store
from rl_swarm.settings import Settings, public
from rl_swarm.stores import open_store
from rl_swarm.stores.patient import PatientStore
from rl_swarm.tasks import open_tasks
from rl_swarm.types import Step

SHORTEST_POLL, LONGEST_POLL = 0.02, 1.0
LONGEST_RETRY = 15.0
REMINDER_SECONDS = 60.0


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


@contextmanager
def ending_on_signals(stop: Stop, say: Callable[[str], None]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM asks to stop, the second ends the process."""

    def handle(number: int, frame: object) -> None:
        if stop.requested:
            os._exit(128 + number)
        stop.request()
        say("stopping after this round; once more to stop at once")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# The verbs


def work(settings: Settings, nodes: Sequence[str], stop: Stop, watcher: Watcher, store: Store | None = None) -> None:
    """Take part with these nodes until the experiment is finished or a stop is requested."""
    plain = store or open_store(settings.gdrive_path, create=True)
    found = _await_experiment(plain, settings, stop, watcher)
    if found is None:
        return
    with ExitStack() as stack:
        leases = [_claim_name(stack, found, node, "worker", settings, stop) for node in nodes]
        heart = stack.enter_context(_Heart(leases, settings.lease_seconds, stop))
        experiment = Experiment(PatientStore(plain, _waiter(stop, watcher)), found.birth)
        say = _logged(watcher, experiment, nodes)
        say(f"{', '.join(nodes)} joined {experiment.name} (rl-swarm {__version__}); loading {settings.model_name}")
        assert settings.tasks is not None, "filled in by settings.load"
        task = open_tasks(settings.tasks, settings.task_difficulty)
        host = Host(experiment, nodes, task, open_policy(settings, nodes), settings)
        done = restore(host, say)
        for lease in leases:
            heart.beat(lease, done, done)
        _Rounds(host, leases, heart, done, stop, say, watcher).run()
        heart.check()


def coordinate(settings: Settings, stop: Stop, watcher: Watcher, store: Store | None = None, poll: float = 0.1) -> None:
    """Keep the clock until the last round is over."""
    plain = store or open_store(settings.gdrive_path, create=True)
    found = _open_or_create(plain, settings, watcher)
    name = settings.node_id
    with ExitStack() as stack:
        seat = _claim_seat(stack, found, settings, stop)
        lease = _claim_name(stack, found, name, "coordinator", settings, stop)
        heart = stack.enter_context(_Heart([seat, lease], settings.lease_seconds, stop))
        experiment = Experiment(PatientStore(plain, _waiter(stop, watcher)), found.birth)
        coordinator = Coordinator(experiment, name, settings, time.time, time.monotonic)
        say = _logged(watcher, experiment, [name])
        say(f"{name} keeps the clock of {experiment.name} at round {coordinator.state.round}")
        before = coordinator.state
        workers = -1
        while not stop.requested and not before.finished:
            state = coordinator.tick()
            if len(coordinator.workers) != workers:
                workers = len(coordinator.workers)
                say(f"round {state.round}: {workers} live worker{'' if workers == 1 else 's'}")
            if state != before:
                say("finished" if state.finished else f"round {state.round} stage {state.stage} begins")
                before = state
            else:
                stop.pause(poll)
        heart.check()


def host(settings: Settings, nodes: Sequence[str], stop: Stop, watcher: Watcher) -> None:
    """K nodes as one program, and the coordinator too unless one is running."""
    store = open_store(settings.gdrive_path, create=True)
    if settings.coordinator_pace == "free":
        work(settings, nodes, stop, watcher, store)
        return
    clock_stop = Stop()
    failure: list[SwarmError] = []

    def keep_clock() -> None:
        own = settings.model_copy(update={"node_id": f"{settings.node_id}_coordinator"})
        try:
            # Its lines would only repeat those of the nodes; they are in its own log.
            coordinate(own, clock_stop, Watcher(), store, poll=SHORTEST_POLL)
        except NameTaken as error:
            watcher.say(f"{error} It is used here too.")
        except SwarmError as error:
            failure.append(error)
            stop.request()

    thread = threading.Thread(target=keep_clock, name="coordinator")
    thread.start()
    try:
        work(settings, nodes, stop, watcher, store)
        if not stop.requested:
            thread.join()
    finally:
        clock_stop.request()
        thread.join()
    if failure:
        raise failure[0]


# The rounds of a worker


class _Rounds:
    """Wait for a step, share, wait for the peers, learn, and again."""

    def __init__(
        self,
        host: Host,
        leases: Sequence[Lease],
        heart: _Heart,
        done: Step | None,
        stop: Stop,
        say: Callable[[str], None],
        watcher: Watcher,
    ) -> None:
        self._host, self._leases, self._heart, self._done = host, leases, heart, done
        self._stop, self._say, self._watcher = stop, say, watcher
        self._settings = host.settings
        self._watch = Watch(host.settings.lease_seconds, time.monotonic)
        self._free = host.settings.coordinator_pace == "free"
        self._saved: int | None = None

    def run(self) -> None:
        while (step := self._next_step()) is not None:
            self._heart.check()
            began = time.monotonic()
            skipped = self._skipped(step)
            shared = self._host.share(step)
            self._beat(shared=step)
            waited = self._await_peers(step, began)
            shared.seconds["wait"] = waited
            rows = self._host.learn(step, shared, self._peer_steps() if self._free else None, skipped)
            self._done = step
            self._beat(learned=step)
            self._watcher.rows(step, rows)
            if step.stage == self._settings.max_stages - 1 and self._is_checkpointed(step.round):
                self._checkpoint()
        if self._done is not None and self._saved != self._done.round:
            self._checkpoint()

    def _next_step(self) -> Step | None:
        """The step to do next, as soon as it is time; None when there is none or a stop was requested."""
        if self._free:
            step = self._following(self._done)
            return None if self._stop.requested or step.round >= self._settings.max_rounds else step
        poll, began, reminded = SHORTEST_POLL, time.monotonic(), 0.0
        while not self._stop.requested:
            state = self._host.experiment.state()
            if state is not None and (self._done is None or state.step > self._done) and not state.finished:
                return state.step if state.round < self._settings.max_rounds else None
            if state is not None and state.finished:
                return None
            waited = time.monotonic() - began
            if waited - reminded > max(REMINDER_SECONDS, self._settings.coordinator_round_interval):
                reminded = waited
                self._say(f"still waiting after {waited:.0f} s: no new round. Is the coordinator running?")
            self._stop.pause(poll)
            poll = min(LONGEST_POLL, poll * 1.3)
        return None

    def _following(self, done: Step | None) -> Step:
        if done is None:
            return Step(0)
        if done.stage + 1 < self._settings.max_stages:
            return Step(done.round, done.stage + 1)
        return Step(done.round + 1)

    def _skipped(self, step: Step) -> int:
        expected = self._following(self._done)
        # A node that joins late has skipped nothing: those rounds were never its own.
        missed = 0 if self._done is None else max(0, step.round - expected.round)
        if missed:
            self._say(f"skipped {missed} round{'' if missed == 1 else 's'}: the swarm is at round {step.round}")
        return missed

    def _await_peers(self, step: Step, began: float) -> float:
        """Let the others publish: until every live worker has, the clock moves on, or half the round is over."""
        settings = self._settings
        if self._free or settings.num_transplant_trees == 0 or settings.rollout_publish_frequency == "round":
            return 0.0
        start, poll = time.monotonic(), SHORTEST_POLL
        while not self._stop.requested and time.monotonic() - began < settings.coordinator_round_interval / 2:
            peers = self._host.experiment.peers().known.values()
            workers = [peer for peer in peers if peer.node_role == "worker" and peer.peer_id not in self._host.nodes]
            if all(
                peer.shared is not None and Step(*peer.shared) >= step for peer in workers if self._watch.live(peer)
            ):
                break
            state = self._host.experiment.state()
            if state is not None and state.step > step:
                break
            self._stop.pause(poll)
            poll = min(LONGEST_POLL, poll * 1.3)
        return time.monotonic() - start

    def _peer_steps(self) -> dict[str, Step]:
        peers = self._host.experiment.peers().known
        return {node: Step(*peer.shared) for node, peer in peers.items() if peer.shared is not None}

    def _beat(self, *, shared: Step | None = None, learned: Step | None = None) -> None:
        for lease in self._leases:
            self._heart.beat(lease, shared, learned)

    def _is_checkpointed(self, round: int) -> bool:
        every = self._settings.checkpoint_interval
        return every > 0 and (round + 1) % every == 0

    def _checkpoint(self) -> None:
        assert self._done is not None
        write_checkpoints(self._host, self._done.round)
        self._saved = self._done.round


# Names and their upkeep


class _Heart:
    """A thread that keeps the beats going while a round takes its time. A lost name stops the run."""

    def __init__(self, leases: Sequence[Lease], lease_seconds: float, stop: Stop) -> None:
        self._leases, self._pause, self._stop = leases, lease_seconds / BEATS_PER_LEASE, stop
        self._ended = threading.Event()
        self._failure: SwarmError | None = None
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)
        self.missed = 0

    def __enter__(self) -> _Heart:
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
            self.missed += 1

    def _run(self) -> None:
        while not self._ended.wait(self._pause):
            try:
                for lease in self._leases:
                    self.beat(lease)
            except SwarmError as error:
                self._failure = error
                self._stop.request()
                return


def _claim_name(
    stack: ExitStack, experiment: Experiment, node: str, role: str, settings: Settings, stop: Stop
) -> Lease:
    return _claim(stack, experiment, experiment.peer_key(node), node, role, settings, stop)


def _claim_seat(stack: ExitStack, experiment: Experiment, settings: Settings, stop: Stop) -> Lease:
    key = experiment.coordinator_key()
    return _claim(stack, experiment, key, settings.node_id, "coordinator", settings, stop)


def _claim(
    stack: ExitStack, experiment: Experiment, key: str, node: str, role: str, settings: Settings, stop: Stop
) -> Lease:
    model = "" if role == "coordinator" else settings.model_name
    lease = claim(experiment, key, node, role, model, time.time(), settings.lease_seconds, time.monotonic, stop.pause)
    stack.callback(_release, lease)
    return lease


def _release(lease: Lease) -> None:
    try:
        lease.release()
    except (StoreUnavailable, ExperimentMissing):
        pass  # nowhere to write it: the lease runs out by itself


# Finding the experiment


def _await_experiment(store: Store, settings: Settings, stop: Stop, watcher: Watcher) -> Experiment | None:
    if settings.coordinator_pace == "free":
        return _open_or_create(store, settings, watcher)
    poll, said = SHORTEST_POLL, False
    while not stop.requested:
        try:
            return open_experiment(store, settings.experiment_name)
        except ExperimentMissing as error:
            if not said:
                watcher.say(f"{error} Waiting for the coordinator to make it; check EXPERIMENT_NAME and GDRIVE_PATH.")
                said = True
        stop.pause(poll)
        poll = min(LONGEST_POLL, poll * 1.3)
    return None


def _open_or_create(store: Store, settings: Settings, watcher: Watcher) -> Experiment:
    try:
        experiment = create_experiment(store, settings.experiment_name, public(settings), time.time(), "coordinate")
        watcher.say(f"made experiment {experiment.name} in {settings.gdrive_path}")
        return experiment
    except ExperimentExists:
        return open_experiment(store, settings.experiment_name)


def _waiter(stop: Stop, watcher: Watcher) -> Callable[[StoreUnavailable, int], None]:
    def wait(error: StoreUnavailable, attempt: int) -> None:
        if stop.requested:
            raise error
        if attempt == 1:
            watcher.say(f"{error} Waiting until it is mended; nothing is lost.")
        stop.pause(min(LONGEST_RETRY, 0.5 * 1.5**attempt))

    return wait


def _logged(watcher: Watcher, experiment: Experiment, nodes: Sequence[str]) -> Callable[[str], None]:
    """Say a line to the user and keep it in each node's log."""

    def say(line: str) -> None:
        watcher.say(line)
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        for node in nodes:
            experiment.append_output(node, f"{stamp} {line}")

    return say
