"""Joining, coordinating, hosting: a swarm in real time, until the work is done or a signal comes.

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

from rl_swarm import __version__
from rl_swarm.checkpoints import CheckpointWriter, restore
from rl_swarm.coordinator import Coordinator
from rl_swarm.errors import ExperimentExists, ExperimentMissing, NameTaken, SettingsError, Stopped, StoreUnavailable
from rl_swarm.experiment import Experiment, create_experiment, open_experiment
from rl_swarm.heart import Heart, claim_names, claim_seat
from rl_swarm.host import Host
from rl_swarm.models.pools import AUTO, Choice, choose_model, is_pooled
from rl_swarm.policies import gpu_memory, model_is_findable, open_policy
from rl_swarm.protocols import Store
from rl_swarm.rounds import Rounds
from rl_swarm.settings import Settings, fields, group_of, public
from rl_swarm.stores import open_store
from rl_swarm.stores.patient import PatientStore
from rl_swarm.tasks import open_tasks
from rl_swarm.types import Step
from rl_swarm.waiting import Stop, Watcher

LONGEST_RETRY = 15.0
# The clock looks more often than the nodes: everybody waits for it.
LONGEST_CLOCK_POLL = 0.25


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


def work(settings: Settings, nodes: Sequence[str], stop: Stop, watcher: Watcher, store: Store | None = None) -> None:
    """Take part with these nodes until the experiment is finished or a stop is requested."""
    plain = store or open_store(settings.gdrive_path, create=True)
    found = _await_experiment(plain, settings, stop, watcher)
    if found is None:
        return
    settings, why = _settle_model(found, nodes, settings)
    _check_models(found, nodes, settings)
    if why:
        watcher.say(why)
    # What cannot be loaded does not become a member.
    watcher.say(f"loading {settings.model_name}")
    assert settings.tasks is not None, "filled in by settings.load"
    task = open_tasks(settings.tasks, settings.task_difficulty, settings.prompt_examples)
    policy = open_policy(settings, nodes)
    with ExitStack() as stack:
        leases = claim_names(stack, found, nodes, "worker", settings, stop)
        heart = stack.enter_context(Heart(leases, settings.lease_seconds, stop))
        experiment = Experiment(PatientStore(plain, _waiter(stop, watcher)), found.birth)
        say = _logged(watcher, experiment, nodes)
        say(f"{', '.join(nodes)} joined {experiment.name} (rl-swarm {__version__}) with {settings.model_name}")
        for node in nodes:
            _tell_changes(experiment, node, settings, say)
            experiment.append_start(node, public(settings), time.time())
        host = Host(experiment, nodes, task, policy, settings)
        say(host.policy.about(settings.num_train_samples, settings.num_transplant_trees, settings.num_generations))
        _tell_differences(found, settings, say)
        done = restore(host, say, lambda: stop.requested)
        for lease in leases:
            heart.beat(lease, done, done)
        with CheckpointWriter(host) as writer:
            Rounds(host, leases, heart, done, stop, say, watcher, writer).run()
        heart.check()


def coordinate(settings: Settings, stop: Stop, watcher: Watcher, store: Store | None = None) -> None:
    """Keep the clock until the last round is over."""
    plain = store or open_store(settings.gdrive_path, create=True)
    found = _open_or_create(plain, settings, watcher)
    name = settings.node_id
    with ExitStack() as stack:
        seat = claim_seat(stack, found, settings, stop)
        leases = [seat, *claim_names(stack, found, [name], "coordinator", settings, stop)]
        heart = stack.enter_context(Heart(leases, settings.lease_seconds, stop))
        experiment = Experiment(PatientStore(plain, _waiter(stop, watcher)), found.birth)
        coordinator = Coordinator(experiment, name, settings, time.time, time.monotonic)
        say = _logged(watcher, experiment, [name])
        say(f"{name} keeps the clock of {experiment.name} at round {coordinator.state.round}")
        if (
            settings.coordinator_pace == "quorum"
            and coordinator.state.step == Step(0)
            and settings.coordinator_join_grace
        ):
            say(f"round 0 stays open until nobody has joined for {settings.coordinator_join_grace:g} s")
        before = coordinator.state
        workers = -1
        polls = stop.polls(LONGEST_CLOCK_POLL)
        while not before.finished and next(polls, stop) is not stop:
            state = coordinator.tick()
            if len(coordinator.workers) != workers:
                workers = len(coordinator.workers)
                say(f"round {state.round}: {workers} live worker{'' if workers == 1 else 's'}")
            if state != before:
                before, polls = state, stop.polls(LONGEST_CLOCK_POLL)
                stop.tell()
                if not state.finished:
                    say(f"round {state.round} stage {state.stage} begins")
        if before.finished:
            say(f"the experiment is finished, its last round was {before.round}; a larger MAX_ROUNDS takes it further")
        heart.check()


def host(settings: Settings, nodes: Sequence[str], stop: Stop, watcher: Watcher) -> None:
    """K nodes as one program, and the coordinator too unless, and as long as, somebody else is it."""
    store = open_store(settings.gdrive_path, create=True)
    _open_or_create(store, settings, watcher)
    clock_stop = Stop()
    clock_stop.pair(stop)
    failures: list[Exception] = []

    def keep_clock() -> None:
        own = settings.model_copy(update={"node_id": coordinator_name(settings.node_id)})
        said = False
        try:
            while not clock_stop.requested:
                try:
                    # Its lines would only repeat those of the nodes; they are in its own log.
                    coordinate(own, clock_stop, Watcher(), store)
                    return
                except NameTaken as error:
                    if not said:
                        watcher.say(f"{error} It is used here too.")
                        said = True
                    clock_stop.pause(settings.lease_seconds)
        except Stopped:
            pass
        except Exception as error:  # noqa: BLE001 kept, and raised by the working thread below
            failures.append(error)
            stop.request()

    thread = threading.Thread(target=keep_clock, name="coordinator")
    thread.start()
    try:
        work(settings, nodes, stop, watcher, store)
        if not stop.requested:
            _let_the_clock_finish(thread, store, settings)
    finally:
        clock_stop.request()
        thread.join()
    if failures:
        raise failures[0]


def coordinator_name(node_id: str) -> str:
    return f"{node_id}_coordinator"


def _let_the_clock_finish(clock: threading.Thread, store: Store, settings: Settings) -> None:
    """The nodes are done; if the clock is kept here, others may still be in the last round."""
    state = open_experiment(store, settings.experiment_name).state()
    if state is None or state.updated_by == coordinator_name(settings.node_id):
        clock.join(timeout=settings.coordinator_round_interval + settings.lease_seconds)


def _await_experiment(store: Store, settings: Settings, stop: Stop, watcher: Watcher) -> Experiment | None:
    if settings.coordinator_pace == "free":
        return _open_or_create(store, settings, watcher)
    said = False
    for _ in stop.polls():
        try:
            return open_experiment(store, settings.experiment_name)
        except ExperimentMissing as error:
            if not said:
                watcher.say(f"{error} Waiting for the coordinator to make it; check EXPERIMENT_NAME and GDRIVE_PATH.")
                said = True
    return None


def _open_or_create(store: Store, settings: Settings, watcher: Watcher) -> Experiment:
    try:
        experiment = create_experiment(store, settings.experiment_name, public(settings), time.time(), "coordinate")
        watcher.say(f"made experiment {experiment.name} in {settings.gdrive_path}")
        return experiment
    except ExperimentExists:
        return open_experiment(store, settings.experiment_name)


def _settle_model(experiment: Experiment, nodes: Sequence[str], settings: Settings) -> tuple[Settings, str]:
    """Settings that name a model where they said auto, and the reason for the choice.

    What a node once began with it keeps: on another machine, another model would begin from nothing.
    """
    if settings.model_name != AUTO:
        return settings, ""
    known = experiment.peers().known
    kept = {node: known[node].model for node in nodes if node in known and is_pooled(known[node].model)}
    if kept:
        node, model = next(iter(kept.items()))
        choice = Choice(model, f"auto: {node} began with {model} in {experiment.name} and keeps it")
    else:
        choice = choose_model(gpu_memory(settings.device, len(nodes)), settings.seed, settings.node_id)
    return settings.model_copy(update={"model_name": choice.model}), choice.reason


def _check_models(experiment: Experiment, nodes: Sequence[str], settings: Settings) -> None:
    """A name that another model was trained under keeps that model: its checkpoints would be overwritten."""
    if settings.model_name not in ("toy", "pico"):
        model_is_findable(settings.model_name)
    known = experiment.peers().known
    for node in nodes:
        if node in known and known[node].model not in ("", settings.model_name) and experiment.checkpoint_rounds(node):
            raise SettingsError(
                f"MODEL_NAME={settings.model_name!r} is not allowed for {node}: it was trained as "
                f"{known[node].model!r} in {experiment.name}; give that, or another NODE_ID."
            )
        before = experiment.last_start(node).get("lora_rank", settings.lora_rank)
        if before != settings.lora_rank and experiment.checkpoint_rounds(node):
            raise SettingsError(
                f"LORA_RANK={settings.lora_rank} is not allowed for {node}: its checkpoints in {experiment.name} were "
                f"made with {before}; give that, or another NODE_ID."
            )


def _tell_differences(experiment: Experiment, settings: Settings, say: Callable[[str], None]) -> None:
    """Nodes may differ in much; in these settings a difference is rarely meant."""
    for name in ("num_generations", "max_stages", "rollout_publish_frequency", "coordinator_pace", "seed"):
        theirs, ours = experiment.birth.settings.get(name), getattr(settings, name)
        if theirs is not None and theirs != ours:
            say(f"note: {name.upper()} is {ours} here; the experiment was made with {theirs}")


# Of the learner's settings, those that change how and not what is learned.
_MERE_MEANS = {"eval_every", "eval_questions", "micro_batch_tokens", "gradient_checkpointing", "compile", "cuda_graphs"}


def _tell_changes(experiment: Experiment, node: str, settings: Settings, say: Callable[[str], None]) -> None:
    """A restarted node may have other settings; what it replays is then not quite what it did."""
    before = experiment.last_start(node)
    names = [name for name, field in fields().items() if group_of(field) == "learning" and name not in _MERE_MEANS]
    changed = [
        f"{name.upper()} was {before[name]} and is {getattr(settings, name)}"
        for name in (*names, "seed", "num_train_samples", "num_transplant_trees", "num_generations")
        if name in before and before[name] != getattr(settings, name)
    ]
    if changed:
        say(f"note: {node} was last started otherwise: {'; '.join(changed)}. Rounds done again have the new values.")


def _waiter(stop: Stop, watcher: Watcher) -> Callable[[StoreUnavailable, int], None]:
    def wait(error: StoreUnavailable, attempt: int) -> None:
        if stop.requested:
            raise error
        if attempt == 1:
            watcher.say(f"{error} Waiting until it is mended; nothing is lost.")
        stop.pause(min(LONGEST_RETRY, 0.5 * 1.5 ** min(attempt, 10)))

    return wait


def _logged(watcher: Watcher, experiment: Experiment, nodes: Sequence[str]) -> Callable[[str], None]:
    """Say a line to the user and keep it in each node's log."""

    def say(line: str) -> None:
        watcher.say(line)
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        for node in nodes:
            experiment.append_output(node, f"{stamp} {line}")

    return say
