"""The command `rl-swarm`: one function per verb, nothing heavy imported before it is needed."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rl_swarm import __version__, settings
from rl_swarm.errors import (
    ExperimentMissing,
    ExperimentReplaced,
    KeyMissing,
    MalformedRecord,
    SettingsError,
    SwarmError,
)
from rl_swarm.experiment import Experiment, PublishedFile, create_experiment, list_experiments, open_experiment
from rl_swarm.protocols import Store
from rl_swarm.settings import Settings
from rl_swarm.stores import open_store
from rl_swarm.types import Step

DESCRIPTION = """\
Collective reinforcement learning of language models through a shared folder.

  see it work             rl-swarm demo
  one machine, 4 nodes    rl-swarm host --nodes 4 --model-name pico --num-transplant-trees 2
  many machines           rl-swarm coordinate --gdrive-path SHARED --experiment-name first
                          rl-swarm join       --gdrive-path SHARED --experiment-name first --node-id laptop
  look at it              rl-swarm status first --gdrive-path SHARED

Every setting is a flag and an environment variable (--num-generations, NUM_GENERATIONS).
Exit codes: 0 done, 1 failed, 2 bad settings."""

DEMO_NODES, DEMO_ROUNDS = 8, 100


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    verb: Callable[[argparse.Namespace], int] = args.run
    return exit_code(lambda: verb(args))


def exit_code(body: Callable[[], int]) -> int:
    """Run a command; what it raises on purpose becomes a sentence and a code."""
    try:
        return body()
    except SettingsError as error:
        return _fail(str(error), 2)
    except SwarmError as error:
        return _fail(str(error), 1)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has gone; not an error of ours
        return 1
    except KeyboardInterrupt:
        return 130


def _fail(sentence: str, code: int) -> int:
    from rl_swarm.monitor.screen import visible

    # What is wrong may have been written by a peer: its machine's name, for one.
    print(f"rl-swarm: {visible(sentence)}", file=sys.stderr)
    return code


# Running


def _demo(args: argparse.Namespace) -> int:
    from rl_swarm.demo import run_demo
    from rl_swarm.live import DemoScreen
    from rl_swarm.monitor.figures import save_curves, sparkline
    from rl_swarm.monitor.screen import say, table
    from rl_swarm.stores.folder import FolderStore

    chosen = _given(args, ("gdrive_path", "seed", "model_name", "learning_rate"))
    loaded = settings.load(
        chosen | {"max_rounds": args.rounds, "num_train_samples": 4, "num_generations": 8, "rollout_staleness": 1},
        defaults={"model_name": "pico", "eval_questions": 64, "coordinator_pace": "quorum"},
    )
    root = Path(loaded.gdrive_path).expanduser()
    # The demo can be repeated at will, so it does not wait for the disk.
    store = FolderStore(root, create=True, durable=False)
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
    for command in ("status demo_sharing", "rollouts demo_sharing", "metrics demo_sharing --format csv"):
        say(f"  rl-swarm {command}" + (f" --gdrive-path {root}" if "gdrive_path" in chosen else ""))
    return 0


def _join(args: argparse.Namespace) -> int:
    return launch(settings.load(_given(args) | {"node_role": "worker"}))


def _coordinate(args: argparse.Namespace) -> int:
    return launch(settings.load(_given(args) | {"node_role": "coordinator"}))


def _host(args: argparse.Namespace) -> int:
    from rl_swarm import run

    # All nodes of a host start together: nobody to wait for.
    loaded = settings.load(_given(args), defaults={"coordinator_join_grace": 0})
    nodes = [f"{loaded.node_id}_{number}" for number in range(args.nodes)]
    return _run(loaded, lambda stop, watcher: run.host(loaded, nodes, stop, watcher))


def _run(loaded: Settings, body: Callable[[Any, Any], None], bar: bool = True) -> int:
    from rl_swarm.live import RoundLines
    from rl_swarm.run import Stop, ending_on_signals

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


# Looking after experiments


def _init(args: argparse.Namespace) -> int:
    loaded = settings.load(_given(args) | {"experiment_name": args.experiment})
    store = open_store(loaded.gdrive_path, create=True)
    experiment = create_experiment(store, loaded.experiment_name, settings.public(loaded), time.time())
    print(f"Made experiment {experiment.name} in {loaded.gdrive_path}, run {experiment.run}.")
    return 0


def _list(args: argparse.Namespace) -> int:
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


def _status(args: argparse.Namespace) -> int:
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


def _peers(args: argparse.Namespace) -> int:
    from rl_swarm.monitor.screen import table
    from rl_swarm.monitor.status import is_active, last_step

    rows = []
    for node, peer in sorted(_experiment(args).peers().known.items()):
        step = last_step(peer)
        state = "left" if peer.left else "active" if is_active(peer) else "dead"
        rows.append(
            [node, peer.node_role, state, "" if step is None else str(step.round), peer.model, peer.process.host]
        )
    table(["node", "role", "state", "last round", "model", "host"], rows)
    return 0


def _rollouts(args: argparse.Namespace) -> int:
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
                if shown == args.limit or not rollouts:
                    break
                shown += 1
                console.print(f"round {round}  {visible(file.node)}", markup=False, style="bold")
                console.print(visible(rollouts[0].prompt), markup=False)
                for rollout in rollouts:
                    console.print(f"  {rollout.reward:5.2f}  {visible(rollout.response)}", markup=False)
    if not shown:
        say(f"No rollouts match: round {round}" + (f", node {args.node}" if args.node else "") + ".")
    return 0


def _metrics(args: argparse.Namespace) -> int:
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


def _validate(args: argparse.Namespace) -> int:
    from rl_swarm.monitor.validate import report, validate

    checks = validate(_experiment(args), args.rounds, args.nodes, args.transplants)
    print(report(checks))
    return 0 if all(check.passed for check in checks) else 1


def _export(args: argparse.Namespace) -> int:
    from rl_swarm.export import export_model, export_summary

    experiment = _experiment(args)
    if args.node is None:
        for path in export_summary(experiment, args.out):
            print(path)
    else:
        round = export_model(experiment, args.node, args.out)
        print(f"{args.out}: the model of {args.node} after round {round}")
    return 0


def _delete(args: argparse.Namespace) -> int:
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


# Flags


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=110)


class _Parser(argparse.ArgumentParser):
    """Errors in one sentence, like those of settings."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _given(args: argparse.Namespace, names: Sequence[str] | None = None) -> dict[str, Any]:
    """The settings that came as flags."""
    wanted = settings.fields() if names is None else names
    return {name: value for name, value in vars(args).items() if name in wanted and value is not None}


def _add_settings(parser: argparse.ArgumentParser, names: Sequence[str] | None = None) -> None:
    """A flag for each setting, under its group's heading."""
    groups: dict[str, Any] = {}
    for name, field in settings.fields().items():
        if name == "node_role" or (names is not None and name not in names):
            continue
        group = settings.group_of(field)
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        help = f"{field.description} [{settings.default_of(field)}]".replace("%", "%%")
        flag = "--" + name.replace("_", "-")
        if field.annotation is bool:
            groups[group].add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=help)
        else:
            groups[group].add_argument(flag, default=None, metavar=name.upper(), help=help)


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: a whole number of 1 or more")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="rl-swarm", description=DESCRIPTION, formatter_class=_Help)
    parser.add_argument("--version", action="version", version=f"rl-swarm {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True, parser_class=_Parser)

    def verb(name: str, run: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".", formatter_class=_Help)
        added.set_defaults(run=run)
        return added

    def runner(name: str, run: Callable[[argparse.Namespace], int], help: str, example: str) -> argparse.ArgumentParser:
        added = verb(name, run, help)
        # The full list of flags as a usage line would fill the screen before the first sentence.
        added.usage = f"rl-swarm {name} [SETTINGS]"
        added.epilog = f"example:\n  rl-swarm {name} {example}"
        return added

    def reader(name: str, run: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        added = verb(name, run, help)
        added.add_argument("experiment", help="the experiment's name (rl-swarm list shows them)")
        _add_settings(added, ("gdrive_path",))
        return added

    demo = verb("demo", _demo, "train a small swarm on this machine, alone and sharing, and show what was learned")
    demo.add_argument("--nodes", type=_positive, default=DEMO_NODES, help=f"nodes in the swarm [{DEMO_NODES}]")
    demo.add_argument("--rounds", type=_positive, default=DEMO_ROUNDS, help=f"rounds of each run [{DEMO_ROUNDS}]")
    _add_settings(demo, ("gdrive_path", "seed", "model_name", "learning_rate"))

    host = runner(
        "host",
        _host,
        "run several nodes on this device as one program, with the coordinator if none is running",
        "--nodes 4 --model-name pico --num-transplant-trees 4 --max-rounds 50",
    )
    host.add_argument("--nodes", type=_positive, required=True, help="how many; named NODE_ID_0, NODE_ID_1, ...")
    _add_settings(host)
    where = "--gdrive-path /mnt/shared --experiment-name first"
    example = f"{where} --node-id laptop --model-name pico --num-transplant-trees 4"
    _add_settings(runner("join", _join, "take part in an experiment with one node", example))
    example = f"{where} --node-id clock --max-rounds 200"
    _add_settings(runner("coordinate", _coordinate, "keep the clock of an experiment; loads no model", example))

    init = verb("init", _init, "make an experiment without starting anything")
    init.add_argument("experiment", help="its name")
    _add_settings(init, [name for name in settings.fields() if name != "experiment_name"])
    _add_settings(verb("list", _list, "list the experiments under a root"), ("gdrive_path",))
    status = reader("status", _status, "show an experiment at a glance: round, peers, rewards")
    status.add_argument("--json", action="store_true", help="as JSON")
    reader("peers", _peers, "list the nodes of an experiment and how far they have come")
    rollouts = reader("rollouts", _rollouts, "read published questions and answers with their rewards")
    rollouts.add_argument("--round", type=int, help="of this round [the newest]")
    rollouts.add_argument("--node", help="of this node [all]")
    rollouts.add_argument("--limit", type=_positive, default=4, help="how many questions [4]")
    metrics = reader("metrics", _metrics, "print metrics rows")
    metrics.add_argument("--node", help="of this node [all]")
    metrics.add_argument("--format", choices=("table", "csv", "json"), default="table", help="[table]")
    metrics.add_argument("--last", type=_positive, default=20, help="rows of the table [20]")
    check = reader("validate", _validate, "check that a run is complete; exit 1 and the reasons if not")
    check.add_argument("--rounds", type=_positive, required=True, help="rounds every worker must have finished")
    check.add_argument("--nodes", type=_positive, required=True, help="registered nodes, the coordinator included")
    check.add_argument("--transplants", type=int, default=0, help="J: also check that peers' groups were used [0]")
    export = reader("export", _export, "write summary and metrics to a folder, or a node's model with --node")
    export.add_argument("--out", type=Path, required=True, help="the folder to write")
    export.add_argument("--node", help="export this node's model as a Hugging Face folder")
    delete = reader("delete", _delete, "delete an experiment and everything in it")
    delete.add_argument("--yes", action="store_true", help="do not ask")
    return parser


if __name__ == "__main__":
    sys.exit(main())
