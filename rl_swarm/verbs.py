"""One function per verb of `rl-swarm`; nothing heavy is imported before it is needed."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rl_swarm import settings
from rl_swarm.errors import (
    ExperimentMissing,
    ExperimentReplaced,
    KeyMissing,
    MalformedRecord,
    SettingsError,
    SwarmError,
)
from rl_swarm.experiment import Experiment, PublishedFile, create_experiment, list_experiments, open_experiment
from rl_swarm.models.pools import AUTO, choose_model
from rl_swarm.protocols import Store
from rl_swarm.settings import Settings
from rl_swarm.stores import open_store
from rl_swarm.types import Step

# What commands take that are to be quick on any machine.
SMALL_MODEL = "pico"

# Running


def show_demo(args: argparse.Namespace) -> int:
    from rl_swarm.demo import ARMS, run_demo
    from rl_swarm.live import DemoScreen
    from rl_swarm.monitor.figures import save_curves, sparkline
    from rl_swarm.monitor.screen import say, table
    from rl_swarm.policies import gpu_memory
    from rl_swarm.stores.folder import FolderStore

    chosen = _given(args, ("gdrive_path", "seed", "model_name", "learning_rate"))
    loaded = settings.load(
        chosen | {"max_rounds": args.rounds, "num_train_samples": 4, "num_generations": 8, "rollout_staleness": 1},
        defaults={"model_name": SMALL_MODEL, "eval_questions": 64, "coordinator_pace": "quorum"},
    )
    if loaded.model_name == AUTO:
        choice = choose_model(gpu_memory(loaded.device, args.nodes), loaded.seed, "demo")
        say(choice.reason)
        loaded = loaded.model_copy(update={"model_name": choice.model})
    root = Path(loaded.gdrive_path).expanduser()
    # The demo can be repeated at will, so it does not wait for the disk.
    store = FolderStore(root, create=True, durable=False)
    if set(ARMS) & set(list_experiments(store)):
        say(f"The demo that is in {root} makes room for this one.")
    say(f"Training {args.nodes} nodes of {loaded.model_name} twice, {args.rounds} rounds each: alone, then sharing.")
    began = time.perf_counter()
    screen = DemoScreen(args.nodes)
    with screen.shown():
        arms = run_demo(store, loaded, args.nodes, screen.update)
    say("")
    for arm in arms:
        curve = sparkline([arm.held_out[round] for round in sorted(arm.held_out)])
        say(f"{arm.experiment:13} held-out reward {arm.start:.3f} → {arm.end:.3f}  {curve}")
    say("")
    say("Peers' groups each node learned from:")
    table(["experiment", *arms[0].external_used], [[arm.experiment, *arm.external_used.values()] for arm in arms])
    plot = root / "demo.png"
    title = (
        f"{args.nodes} nodes of {loaded.model_name}, {loaded.num_train_samples} own groups a round, seed {loaded.seed}"
    )
    curves = {
        f"{arm.experiment} (J={arm.transplants})": {r + 1: v for r, v in sorted(arm.held_out.items())} for arm in arms
    }
    save_curves(plot, curves, title, "held-out reward")
    say("")
    say(f"Done in {time.perf_counter() - began:.0f} s. The curves are in {plot}. To look further:")
    program = "rl-swarm" if shutil.which("rl-swarm") else sys.argv[0]
    for command in ("status demo_sharing", "rollouts demo_sharing", "metrics demo_sharing --format csv"):
        say(f"  {program} {command}" + (f" --gdrive-path {root}" if "gdrive_path" in chosen else ""))
    return 0


def join(args: argparse.Namespace) -> int:
    return launch(settings.load(_given(args) | {"node_role": "worker"}))


def coordinate(args: argparse.Namespace) -> int:
    return launch(settings.load(_given(args) | {"node_role": "coordinator"}))


def host_nodes(args: argparse.Namespace) -> int:
    from rl_swarm import run

    # All nodes of a host start together: nobody to wait for.
    loaded = settings.load(_given(args), defaults={"coordinator_join_grace": 0})
    nodes = [f"{loaded.node_id}_{number}" for number in range(args.nodes)]
    for name in (*nodes, run.coordinator_name(loaded.node_id)):
        settings.require_name("NODE_ID", name)
    return _run(loaded, lambda stop, watcher: run.host(loaded, nodes, stop, watcher))


def _run(loaded: Settings, body: Callable[[Any, Any], None], bar: bool = True) -> int:
    from rl_swarm.live import RoundLines
    from rl_swarm.run import ending_on_signals
    from rl_swarm.waiting import Stop

    stop, watcher = Stop(), RoundLines(loaded.max_rounds if bar else 0)
    with ending_on_signals(stop, watcher.say), watcher.shown():
        body(stop, watcher)
    return 0


def launch(loaded: Settings) -> int:
    """What the older launcher does: one coordinator or one worker, by NODE_ROLE."""
    from rl_swarm import run

    if loaded.node_role == "coordinator":
        return _run(loaded, lambda stop, watcher: run.coordinate(loaded, stop, watcher), bar=False)
    return _run(loaded, lambda stop, watcher: run.work(loaded, [loaded.node_id], stop, watcher))


# The settings that a round of a node's own groups heeds; peers' groups, rewards and evaluation are not timed.
_NOT_TIMED = {"eval_every", "eval_questions", "truncated_completions", "off_policy", "peer_negative_weight"}
_LEARNING = [name for name, field in settings.fields().items() if settings.group_of(field) == "learning"]
BENCH_SETTINGS = (
    *("model_name", "device", "huggingface_access_token", "seed", "num_train_samples", "num_generations"),
    *(name for name in _LEARNING if name not in _NOT_TIMED),
)


def bench(args: argparse.Namespace) -> int:
    from rl_swarm.bench import measure
    from rl_swarm.monitor.screen import visible

    def say(line: str) -> None:
        print(visible(line), file=sys.stderr, flush=True)

    loaded = settings.load(_given(args, BENCH_SETTINGS), defaults={"model_name": SMALL_MODEL})
    print(json.dumps(measure(loaded, args.nodes, args.warm_up, args.rounds, say), indent=2))
    return 0


# Looking after experiments


def init_experiment(args: argparse.Namespace) -> int:
    loaded = settings.load(_given(args) | {"experiment_name": args.experiment})
    store = open_store(loaded.gdrive_path, create=True)
    experiment = create_experiment(store, loaded.experiment_name, settings.public(loaded), time.time())
    print(f"Made experiment {experiment.name} in {loaded.gdrive_path}, run {experiment.run}.")
    return 0


def list_all(args: argparse.Namespace) -> int:
    from rl_swarm.monitor.screen import say, table
    from rl_swarm.monitor.status import is_active

    store = _store(args)
    rows: list[list[object]] = []
    for name in list_experiments(store):
        try:
            experiment = open_experiment(store, name)
            state, peers = experiment.state(), experiment.peers().known
        except (MalformedRecord, ExperimentMissing, ExperimentReplaced):
            rows.append([name, "unreadable", "", "", "", ""])
            continue
        stage = "not started" if state is None else "finished" if state.finished else "running"
        made = time.strftime("%Y-%m-%d %H:%M", time.gmtime(experiment.birth.created))
        rows.append([name, stage, state.round if state else 0, sum(map(is_active, peers.values())), len(peers), made])
    if rows:
        table(["experiment", "state", "round", "active", "peers", "made (UTC)"], rows)
    else:
        say("There is no experiment here yet: rl-swarm demo makes two, rl-swarm init NAME one.")
    return 0


def status(args: argparse.Namespace) -> int:
    from rl_swarm.monitor.figures import sparkline
    from rl_swarm.monitor.screen import say, table
    from rl_swarm.monitor.status import experiment_status, metric_rows, reward_curve

    experiment = _experiment(args)
    status = experiment_status(experiment)
    if args.json:
        print(json.dumps(status, indent=2))
        return 0
    rows = metric_rows(experiment)
    curve = list(reward_curve(rows).values())
    state = "finished" if status["finished"] else f"stage {status['current_stage']}"
    say(f"{experiment.name}: round {status['current_round']}, {state}, {status['num_active_peers']} active peers")
    say(f"rows {status['total_metric_entries']}, latest checkpoint {status['latest_checkpoint'] or 'none'}")
    if curve:
        say(f"own reward by round   {curve[0]:.3f} → {curve[-1]:.3f}  {sparkline(curve)}")
    held_out = list(reward_curve(rows, "eval_reward").values())
    if held_out:
        say(f"held-out reward       {held_out[0]:.3f} → {held_out[-1]:.3f}  {sparkline(held_out)}")
    if status["malformed_peers"]:
        say(f"unreadable peer records: {', '.join(status['malformed_peers'])}")
    totals = status["cumulative_rewards"]
    table(["node", "cumulative reward"], [[node, totals[node]] for node in sorted(totals)])
    return 0


def peers(args: argparse.Namespace) -> int:
    from rl_swarm.monitor.screen import table
    from rl_swarm.monitor.status import is_active

    rows = []
    for node, peer in sorted(_experiment(args).peers().known.items()):
        step = peer.learned_step
        state = "left" if peer.left else "active" if is_active(peer) else "dead"
        rows.append(
            [node, peer.node_role, state, "" if step is None else str(step.round), peer.model, peer.process.host]
        )
    table(["node", "role", "state", "last round", "model", "host"], rows)
    return 0


def rollouts(args: argparse.Namespace) -> int:
    from rl_swarm.monitor.screen import console, say, visible

    experiment = _experiment(args)
    rounds = experiment.rollout_rounds()
    if not rounds:
        say(f"Nothing was published in {experiment.name} yet.")
        return 0
    round = rounds[-1] if args.round is None else args.round
    shown = 0
    for stage in experiment.rollout_stages(round):
        for file in experiment.published(Step(round, stage)):
            if not isinstance(file, PublishedFile) or args.node not in (None, file.node):
                continue
            try:
                wire = experiment.read_rollouts(file)
            except (MalformedRecord, KeyMissing) as error:
                say(f"{visible(file.node)}: {visible(str(error))}")
                continue
            for rollouts in wire.rollouts.values():
                if shown == args.limit:
                    break
                if not rollouts:
                    continue
                shown += 1
                console.print(f"round {round}  {visible(file.node)}", markup=False, style="bold")
                console.print(visible(rollouts[0].prompt), markup=False)
                for rollout in rollouts:
                    console.print(f"  {rollout.reward:5.2f}  {visible(rollout.response)}", markup=False)
    if not shown:
        say(f"No rollouts match: round {round}" + (f", node {args.node}" if args.node else "") + ".")
    return 0


def metrics(args: argparse.Namespace) -> int:
    from rl_swarm.export import metrics_csv
    from rl_swarm.monitor.screen import table
    from rl_swarm.monitor.status import metric_rows

    rows = metric_rows(_experiment(args), args.node)
    if args.format == "csv":
        print(metrics_csv(rows), end="")
    elif args.format == "json":
        for row in rows:
            print(json.dumps(row))
    else:
        shown = {
            "round": "round",
            "node_id": "node",
            "my_reward": "reward",
            "eval_reward": "held out",
            "external_used": "used",
            "external_wanted": "wanted",
            "loss": "loss",
            "entropy": "entropy",
        }
        table(list(shown.values()), [[row.get(column, "") for column in shown] for row in rows[-args.last :]])
    return 0


def check(args: argparse.Namespace) -> int:
    from rl_swarm.monitor.validate import report, validate

    checks = validate(_experiment(args), args.rounds, args.nodes, args.transplants)
    print(report(checks))
    return 0 if all(check.passed for check in checks) else 1


def export_results(args: argparse.Namespace) -> int:
    from rl_swarm.export import export_model, export_summary, find_checkpoint

    experiment = _experiment(args)
    try:
        if args.node is None:
            for path in export_summary(experiment, args.out):
                print(path)
        else:
            checkpoint = find_checkpoint(experiment, args.node, args.round)
            export_model(experiment, checkpoint, args.out)
            print(f"{args.out}: the model of {args.node} after round {checkpoint.round}")
    except OSError as error:
        raise SwarmError(f"Cannot write to the folder {args.out}: {error.strerror or error}.") from None
    return 0


def push(args: argparse.Namespace) -> int:
    from rl_swarm.monitor.screen import say
    from rl_swarm.push import Destination, push_model

    token = settings.load(_given(args, ("huggingface_access_token",))).huggingface_access_token
    destination = Destination(args.repo, args.private)
    push_model(_experiment(args), args.node, args.round, destination, token, say, dry_run=args.dry_run)
    return 0


def delete_experiment(args: argparse.Namespace) -> int:
    experiment = _experiment(args)
    if not args.yes:
        if not sys.stdin.isatty():
            raise SettingsError("Deleting needs --yes where nobody can be asked.")
        if input(f"Delete experiment {experiment.name} with everything in it? [y/N] ").strip().lower() != "y":
            print("Nothing was deleted.")
            return 1
    print(f"Deleted {experiment.name}: {experiment.delete()} files.")
    return 0


def _store(args: argparse.Namespace) -> Store:
    return open_store(settings.load(_given(args, ("gdrive_path",))).gdrive_path)


def _experiment(args: argparse.Namespace) -> Experiment:
    return open_experiment(_store(args), args.experiment)


def _given(args: argparse.Namespace, names: Sequence[str] | None = None) -> dict[str, Any]:
    """The settings that came as flags."""
    wanted = settings.fields() if names is None else names
    return {name: value for name, value in vars(args).items() if name in wanted and value is not None}
