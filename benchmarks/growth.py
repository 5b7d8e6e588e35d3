"""How time and memory of a round grow with the number of nodes and with the size of the model: prints JSON lines.

    python benchmarks/growth.py > growth.jsonl                                   # measures
    python benchmarks/growth.py --table growth.jsonl --figure growth.png         # draws
    python benchmarks/growth.py --model tiny --nodes 1 2 --ladder tiny 1m --ladder-nodes 2 --questions 1 \\
        --prompt-tokens 8 --new-tokens 8 --rounds 2                              # on a CPU

First one model with ever more nodes, then ever larger models with one number of nodes. The work of each node is that
of swarm_round.py: four questions of 64 tokens, eight completions of 128 each, one update. A row is printed as soon as
it is measured, with medians after warm-up. What does not fit is reported as such and left out of the figure; where
memory ran out on the way and the learner took smaller pieces instead, `memory_backoffs` counts how often.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from shapes import (
    LADDER,
    MODELS,
    add_sizes,
    count_parameters,
    free_device,
    machine,
    model_folder,
    parse,
    resident_peak_gb,
    say,
    sizes,
    versions,
)
from swarm_round import our_rounds

from rl_swarm.errors import ModelError
from rl_swarm.policies.memory import is_out_of_memory


def measure(series: str, model: str, nodes: int, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    asked = argparse.Namespace(**vars(args) | {"model": model, "nodes": nodes})
    row: dict[str, Any] = {
        "series": series,
        "model": model,
        "nodes": nodes,
        "parameters": count_parameters(folder).total,
    }
    try:
        row |= our_rounds(folder, asked)
    except (ModelError, RuntimeError) as error:
        if not isinstance(error, ModelError) and not is_out_of_memory(error):
            raise
        row["failed"] = str(error).splitlines()[0]
        say(f"{model}, {nodes} nodes: {row['failed']}")
    free_device(args.device)
    described = {"device": machine(args.device), "sizes": sizes(asked), "versions": versions()}
    return {**row, "resident_peak_gb": resident_peak_gb(), **described}


def draw(table: Path, figure: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = [json.loads(line) for line in table.read_text().splitlines()]
    panels, axes = plt.subplots(2, 2, figsize=(10, 7), sharex="col")
    for column, (series, axis, label) in enumerate(
        [("nodes", "nodes", "nodes"), ("ladder", "parameters", "parameters of a node's model")]
    ):
        found = [row for row in rows if row["series"] == series and "failed" not in row]
        if not found:
            continue
        top, bottom = axes[0][column], axes[1][column]
        at = [row[axis] for row in found]
        for key, name in (
            ("seconds_a_round", "round"),
            ("seconds_generate", "sampling"),
            ("seconds_update", "update"),
        ):
            top.plot(at, [row[key] for row in found], marker="o", label=name)
        fixed = found[0]["model"] if series == "nodes" else f"{found[0]['nodes']} nodes"
        top.set(title=f"{fixed}, {found[0]['device']}", ylabel="seconds", xscale="log", yscale="log")
        top.legend()
        on_device = found[0]["device_peak_gib"] is not None
        memory = [row["device_peak_gib"] if on_device else row["resident_peak_gb"] for row in found]
        bottom.plot(at, memory, marker="o", color="black")
        bottom.set(xlabel=label, ylabel="peak of device memory, GiB" if on_device else "peak of the process, GB")
        bottom.set_ylim(bottom=0)
        if series == "nodes":
            bottom.set_xticks(at, [str(one) for one in at], minor=False)
            bottom.minorticks_off()
        for one in (top, bottom):
            one.grid(alpha=0.3)
    panels.tight_layout()
    panels.savefig(figure, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", nargs="*", type=int, default=[1, 2, 4, 8, 16], help="numbers of nodes of --model")
    parser.add_argument("--ladder", nargs="*", choices=MODELS, default=LADDER, help=f"({' '.join(LADDER)})")
    parser.add_argument("--ladder-nodes", type=int, default=8, help="nodes of each model of the ladder (8)")
    add_sizes(parser)
    parser.add_argument("--table", type=Path, help="rows measured before, to be drawn")
    parser.add_argument("--figure", type=Path, help="where to draw --table; measures nothing")
    args = parse(parser)
    if (args.table is None) != (args.figure is None):
        parser.error("--table and --figure go together: what to draw, and where to")
    if args.figure is not None:
        draw(args.table, args.figure)
        return
    work = [("nodes", args.model, nodes) for nodes in args.nodes]
    work += [("ladder", model, args.ladder_nodes) for model in args.ladder]
    measured: dict[tuple[str, int], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for series, model, nodes in work:
            if (model, nodes) not in measured:
                say(f"{model}, {nodes} nodes")
                folder = model_folder(model, Path(scratch))
                measured[model, nodes] = measure(series, model, nodes, folder, args)
            print(json.dumps(measured[model, nodes] | {"series": series}), flush=True)


if __name__ == "__main__":
    main()
