"""The command `rl-swarm`: its flags, its help, its exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rl_swarm import __version__, settings, verbs
from rl_swarm.errors import (
    SettingsError,
    Stopped,
    SwarmError,
)

DESCRIPTION = """\
Collective reinforcement learning of language models through a shared folder.

  see it work             rl-swarm demo
  one machine, 4 nodes    rl-swarm host --nodes 4 --model-name pico --num-transplant-trees 2
  many machines           rl-swarm coordinate --gdrive-path SHARED --experiment-name first
                          rl-swarm join       --gdrive-path SHARED --experiment-name first --node-id laptop
  look at it              rl-swarm status first --gdrive-path SHARED
  publish a model         rl-swarm push first --gdrive-path SHARED --node laptop --repo ME/NAME
  measure this machine    rl-swarm bench --nodes 8

Every setting is a flag and an environment variable (--num-generations, NUM_GENERATIONS).
Exit codes: 0 done, 1 failed, 2 bad settings."""

DEMO_NODES, DEMO_ROUNDS = 8, 100
BENCH_NODES, BENCH_WARM_UP, BENCH_ROUNDS = 1, 2, 5


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
    except Stopped:
        return 0
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


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=110)


class _Parser(argparse.ArgumentParser):
    """Errors in one sentence, like those of settings."""

    def __init__(self, **given: Any) -> None:
        # No abbreviations: what works today by chance would mean something else when a setting is added.
        super().__init__(**given, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _add_settings(
    parser: argparse.ArgumentParser, names: Sequence[str] | None = None, defaults: Mapping[str, Any] | None = None
) -> None:
    """A flag for each setting, under its group's heading; `defaults` are the command's own."""
    groups: dict[str, Any] = {}
    for name, field in settings.fields().items():
        if name == "node_role" or (names is not None and name not in names):
            continue
        group = settings.group_of(field)
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        default = (defaults or {}).get(name, settings.default_of(field))
        help = f"{field.description} [{default}]".replace("%", "%%")
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
    commands = parser.add_subparsers(title="verbs", metavar="VERB", required=True, parser_class=_Parser)

    def verb(name: str, run: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name, help=help, description=help[0].upper() + help[1:] + ".", formatter_class=_Help
        )
        added.set_defaults(run=run)
        return added

    def runner(name: str, run: Callable[[argparse.Namespace], int], help: str, example: str) -> argparse.ArgumentParser:
        added = verb(name, run, help)
        # The full list of flags as a usage line would fill the screen before the first sentence.
        added.usage = f"rl-swarm {name} [SETTINGS]"
        added.epilog = f"example:\n  rl-swarm {name} {example}"
        return added

    def reader(name: str, run: Callable[[argparse.Namespace], int], help: str, *also: str) -> argparse.ArgumentParser:
        added = verb(name, run, help)
        added.add_argument("experiment", help="the experiment's name (rl-swarm list shows them)")
        _add_settings(added, ("gdrive_path", *also))
        return added

    demo = verb(
        "demo", verbs.show_demo, "train a small swarm on this machine, alone and sharing, and show what was learned"
    )
    demo.add_argument("--nodes", type=_positive, default=DEMO_NODES, help=f"nodes in the swarm [{DEMO_NODES}]")
    demo.add_argument("--rounds", type=_positive, default=DEMO_ROUNDS, help=f"rounds of each run [{DEMO_ROUNDS}]")
    _add_settings(demo, ("gdrive_path", "seed", "model_name", "learning_rate"), {"model_name": verbs.SMALL_MODEL})

    host = runner(
        "host",
        verbs.host_nodes,
        "run several nodes on this machine as one program, with the coordinator if none is running",
        "--nodes 4 --model-name pico --num-transplant-trees 4 --max-rounds 50",
    )
    host.add_argument("--nodes", type=_positive, required=True, help="how many; named NODE_ID_0, NODE_ID_1, ...")
    _add_settings(host)
    where = "--gdrive-path /mnt/shared --experiment-name first"
    example = f"{where} --node-id laptop --model-name pico --num-transplant-trees 4"
    _add_settings(runner("join", verbs.join, "take part in an experiment with one node", example))
    example = f"{where} --node-id clock --max-rounds 200"
    _add_settings(runner("coordinate", verbs.coordinate, "keep the clock of an experiment; loads no model", example))

    init = verb("init", verbs.init_experiment, "make an experiment without starting anything")
    init.add_argument("experiment", help="its name")
    _add_settings(init, [name for name in settings.fields() if name != "experiment_name"])
    _add_settings(verb("list", verbs.list_all, "list the experiments under a root"), ("gdrive_path",))
    status = reader("status", verbs.status, "show an experiment at a glance: round, peers, rewards")
    status.add_argument("--json", action="store_true", help="as JSON")
    reader("peers", verbs.peers, "list the nodes of an experiment and how far they have come")
    rollouts = reader("rollouts", verbs.rollouts, "read published questions and answers with their rewards")
    rollouts.add_argument("--round", type=int, help="of this round [the newest]")
    rollouts.add_argument("--node", help="of this node [all]")
    rollouts.add_argument("--limit", type=_positive, default=4, help="how many questions [4]")
    metrics = reader("metrics", verbs.metrics, "print metrics rows")
    metrics.add_argument("--node", help="of this node [all]")
    metrics.add_argument("--format", choices=("table", "csv", "json"), default="table", help="[table]")
    metrics.add_argument("--last", type=_positive, default=20, help="rows of the table [20]")
    check = reader("validate", verbs.check, "check that a run is complete; exit 1 and the reasons if not")
    check.add_argument("--rounds", type=_positive, required=True, help="rounds every worker must have finished")
    check.add_argument("--nodes", type=_positive, required=True, help="registered nodes, the coordinator included")
    check.add_argument("--transplants", type=int, default=0, help="J: also check that peers' groups were used [0]")
    export = reader(
        "export", verbs.export_results, "write summary and metrics to a folder, or a node's model with --node"
    )
    export.add_argument("--out", type=Path, required=True, help="the folder to write")
    export.add_argument("--node", help="export this node's model as a Hugging Face folder")
    export.add_argument("--round", type=int, help="with --node: as it was after this round [the newest checkpoint]")
    push = reader(
        "push",
        verbs.push,
        "upload a trained node to the Hugging Face Hub, with tokenizer and model card",
        "huggingface_access_token",
    )
    push.add_argument("--node", required=True, help="the node whose model it is")
    push.add_argument("--repo", required=True, metavar="OWNER/NAME", help="where to; made if it is not there")
    push.add_argument("--private", action="store_true", help="make it a private repository")
    push.add_argument("--round", type=int, help="as it was after this round [the newest checkpoint]")
    push.add_argument("--dry-run", action="store_true", help="say what would be uploaded, and upload nothing")
    bench = runner(
        "bench",
        verbs.bench,
        "measure the engine on this machine: rounds of sampling and learning, as JSON",
        "--nodes 8 --model-name HuggingFaceTB/SmolLM2-135M-Instruct --max-new-tokens 128 > numbers.json",
    )
    bench.add_argument("--nodes", type=_positive, default=BENCH_NODES, help=f"nodes as one program [{BENCH_NODES}]")
    bench.add_argument(
        "--warm-up", type=_positive, default=BENCH_WARM_UP, help=f"rounds before the timed ones [{BENCH_WARM_UP}]"
    )
    bench.add_argument(
        "--rounds", type=_positive, default=BENCH_ROUNDS, help=f"timed rounds, whose medians count [{BENCH_ROUNDS}]"
    )
    _add_settings(bench, verbs.BENCH_SETTINGS, {"model_name": verbs.SMALL_MODEL})
    delete = reader("delete", verbs.delete_experiment, "delete an experiment and everything in it")
    delete.add_argument("--yes", action="store_true", help="do not ask")
    return parser


if __name__ == "__main__":
    sys.exit(main())
