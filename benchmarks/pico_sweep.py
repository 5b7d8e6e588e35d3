"""Held-out reward of pico swarms over many rounds, one run for each combination of settings: JSON lines.

    python benchmarks/pico_sweep.py --rounds 1000 --seeds 42 43 44 --set num_transplant_trees=0,4 > runs.jsonl
    python benchmarks/pico_sweep.py --rounds 150 --set learning_rate=3e-5,1e-4 --set off_policy=none,damp > rates.jsonl
    python benchmarks/pico_sweep.py --table runs.jsonl
    python benchmarks/pico_sweep.py --figure stability.png --table runs.jsonl

Eight nodes, G=8; evaluation of all nodes on the same 512 held-out questions every 20 rounds, one sampled answer each
and by task. What is not set is the package's default. Runs that differ only in what a node decides for itself (seed, I,
J, learning rate, weights of negative advantages) are stacked into one program, at most --stack of them, and --jobs such
programs run at a time. On a data-centre GPU `--stack 10 --jobs 4` is quick; on a CPU leave both at 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from rl_swarm import settings
from rl_swarm.experiment import create_experiment
from rl_swarm.host import Host
from rl_swarm.models import PICO_FOLDER
from rl_swarm.policies import learning_of
from rl_swarm.policies.batches import Batch
from rl_swarm.policies.engine import pick_devices
from rl_swarm.policies.learner import Learner
from rl_swarm.policies.stacked import StackedModels
from rl_swarm.policies.tokens import Tokens
from rl_swarm.simulate import simulate
from rl_swarm.stores.memory import MemoryStore
from rl_swarm.tasks import open_tasks
from rl_swarm.types import Question, Rollout, ScoredGroup, Step

NODES = [f"n{number}" for number in range(8)]
FIXED = {"model_name": "pico", "eval_every": 20, "eval_questions": 512, "dtype": "float32"}
# What runs may differ in and still be nodes of one program.
STACKABLE = {"seed", "num_train_samples", "num_transplant_trees", "select", "truncated_completions"}
STACKABLE |= {"learning_rate", "negative_weight", "off_policy", "peer_negative_weight", "advantage"}
FIGURES = {"held_out", "greedy", "tasks", "own", "entropy", "seconds", "device", "max_rounds"}


class StackedRuns(Learner):
    """One policy for several runs, each a thread of its own: a call waits until every run makes it, and is then one."""

    def __init__(self, runs: Sequence[settings.Settings]) -> None:
        (device,) = pick_devices("auto", 1)
        learning = learning_of(runs[0], device)
        places = [f"{number}/{node}" for number in range(len(runs)) for node in NODES]
        models = StackedModels(len(places), PICO_FOLDER, learning, device)
        super().__init__(places, models, Tokens(PICO_FOLDER), learning)
        self._of_run = [learning_of(run, device) for run in runs]
        rates_K = torch.tensor([one.learning_rate for one in self._of_run for _ in NODES], dtype=torch.float64)
        step = models.step
        models.step = lambda active_K, learning_rate, max_norm: step(active_K, rates_K, max_norm)  # type: ignore
        self._waiting: list[tuple[str, tuple[Any, ...]]] = []
        self._answer: dict[str, Any] = {}
        self._lock, self.barrier = threading.Lock(), threading.Barrier(len(runs), self._call)

    def meet(self, method: str, *asked: Any) -> dict[str, Any]:
        with self._lock:
            self._waiting.append((method, asked))
        self.barrier.wait()
        return self._answer

    def _call(self) -> None:
        waiting, self._waiting = self._waiting, []
        method, first = waiting[0]
        joined: list[Any] = [
            {place: value for _, asked in waiting for place, value in asked[index].items()}
            if isinstance(one, dict)
            else one
            for index, one in enumerate(first)
        ]
        if method == "generate":
            self._answer = self.generate(joined[0], joined[1], joined[2], greedy=joined[3])
        else:
            self._answer = self.update(joined[0])

    def _add(self, batch: Batch, node: str, group: int, scored: ScoredGroup) -> None:
        number, _, name = node.partition("/")
        whole, self._learning = self._learning, self._of_run[int(number)]
        super()._add(batch, name, group, scored)
        self._learning = whole


class Seat:
    """One run's place at the shared policy: to its host it is a Policy of its own."""

    def __init__(self, policy: StackedRuns, number: int) -> None:
        self._policy, self._number = policy, number
        self.fits = policy.fits

    def leave(self) -> None:
        """End all runs at this policy."""
        self._policy.barrier.abort()

    def _placed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {f"{self._number}/{node}": value for node, value in values.items()}

    def _own(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        return {node: answer[f"{self._number}/{node}"] for node in NODES}

    def generate(
        self,
        questions: Mapping[str, Sequence[Question]],
        group_size: int,
        seeds: Mapping[str, int],
        *,
        greedy: bool = False,
    ) -> dict[str, list[tuple[Rollout, ...]]]:
        placed = (self._placed(questions), group_size, self._placed(seeds), greedy)
        return self._own(self._policy.meet("generate", *placed))

    def update(self, batches: Mapping[str, Sequence[ScoredGroup]]) -> dict[str, dict[str, float]]:
        return self._own(self._policy.meet("update", self._placed(batches)))


def run_stack(arms: list[dict[str, Any]], seconds: float) -> None:
    deadline = time.perf_counter() + seconds
    torch.set_num_threads(1)
    runs = [settings.load(FIXED | {"rollout_cleanup_enabled": True} | arm) for arm in arms]
    policy = StackedRuns(runs)

    def run(number: int) -> dict[str, Any]:
        try:
            return run_one(Seat(policy, number), runs[number], deadline)
        finally:
            if sys.exc_info()[0] is not None:
                policy.barrier.abort()

    with ThreadPoolExecutor(len(runs)) as pool:
        done = [pool.submit(run, number) for number in range(len(runs))]
    for arm, result in zip(arms, done, strict=True):
        print(json.dumps(arm | result.result()), flush=True)


def run_one(policy: Seat, loaded: settings.Settings, deadline: float) -> dict[str, Any]:
    assert loaded.tasks is not None
    experiment = create_experiment(MemoryStore(), "sweep", {}, 0.0)
    host = Host(experiment, NODES, open_tasks(loaded.tasks, "default"), policy, loaded)  # type: ignore[arg-type]

    def mean_over_nodes(figures: list[dict[str, Any]]) -> tuple[float, float, dict[str, float]]:
        tasks = figures[0]["eval_by_task"]
        return (
            fmean(one["eval_reward"] for one in figures),
            fmean(one["eval_reward_greedy"] for one in figures),
            {task: fmean(one["eval_by_task"][task] for one in figures) for task in tasks},
        )

    began = time.perf_counter()
    curve = [mean_over_nodes([one.figures() for one in host.evaluate().values()])]
    extra: list[dict[str, float]] = []

    def on_step(step: Step, rows: dict[str, dict[str, Any]]) -> None:
        if all("eval_reward" in row for row in rows.values()):
            curve.append(mean_over_nodes(list(rows.values())))
            extra.append({name: fmean(r.get(name, 0.0) for r in rows.values()) for name in ("my_reward", "entropy")})

        if time.perf_counter() > deadline:
            policy.leave()

    try:
        simulate(experiment, [host], loaded.max_rounds, on_step=on_step)
    except threading.BrokenBarrierError:
        pass  # out of time: what there is, is the result
    return {
        "held_out": [round(value, 4) for value, _, _ in curve],
        "greedy": [round(value, 4) for _, value, _ in curve],
        "tasks": {task: [round(by_task[task], 3) for _, _, by_task in curve] for task in curve[0][2]},
        "own": [round(one["my_reward"], 4) for one in extra],
        "entropy": [round(one["entropy"], 4) for one in extra],
        "seconds": round(time.perf_counter() - began, 1),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def kept(curve: list[float]) -> float:
    """The lowest value ever, as a share of the best one seen before it."""
    return min(value / max(curve[: index + 1]) for index, value in enumerate(curve))


def name_of(run: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in run.items() if name not in FIGURES)


def table(runs: list[dict[str, Any]]) -> None:
    """Start, a quarter, half, end, best, the lowest share of the running best, and the task that lost most."""
    for run in runs:
        curve, quarter = run["held_out"], len(run["held_out"]) // 4
        worst = min(run["tasks"], key=lambda task: run["tasks"][task][-1] - run["tasks"][task][0])
        lost = run["tasks"][worst][-1] - run["tasks"][worst][0]
        print(
            f"{curve[0]:.3f} {curve[quarter]:.3f} {curve[2 * quarter]:.3f} {curve[-1]:.3f} best {max(curve):.3f} "
            f"kept {kept(curve):.3f} greedy {run['greedy'][-1]:.3f} worst {worst.rpartition('/')[2]} {lost:+.2f} "
            f"{run['seconds']:.0f} s  {name_of(run)}"
        )


def figure(runs: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    pyplot.figure(figsize=(8, 4.5))
    for run in runs:
        rounds = [20 * index for index in range(len(run["held_out"]))]
        pyplot.plot(rounds, run["held_out"], linewidth=1, label=name_of(run))
    pyplot.xlabel("round")
    pyplot.ylabel("held-out reward, mean of 8 nodes")
    pyplot.ylim(bottom=0)
    pyplot.grid(alpha=0.3)
    pyplot.legend(fontsize=7, loc="lower right")
    pyplot.tight_layout()
    pyplot.savefig(path, dpi=120)


def stacks(runs: list[dict[str, Any]], most: int) -> list[list[dict[str, Any]]]:
    """Runs that may share a program, together."""
    alike: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        rest = json.dumps({name: value for name, value in run.items() if name not in STACKABLE}, sort_keys=True)
        alike.setdefault(rest, []).append(run)
    return [group[start : start + most] for group in alike.values() for start in range(0, len(group), most)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43])
    parser.add_argument("--set", action="append", default=[], metavar="NAME=A,B", help="a setting and its values")
    parser.add_argument("--arms", type=Path, help="a file with one JSON object of settings a line, instead of --set")
    parser.add_argument("--stack", type=int, default=1, help="runs in one program [1]")
    parser.add_argument("--jobs", type=int, default=1, help="programs at a time [1]")
    parser.add_argument("--seconds", type=float, default=1e9, help="end early after so long [never]")
    parser.add_argument("--table", type=Path, help="print a table of these runs and do nothing else")
    parser.add_argument("--figure", type=Path, help="with --table: also draw them")
    parser.add_argument("--these", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.table is not None:
        runs = [json.loads(line) for line in args.table.read_text().splitlines()]
        table(runs)
        if args.figure is not None:
            figure(runs, args.figure)
        return
    if args.these is not None:
        run_stack(args.these, args.seconds)
        return
    if args.arms is not None:
        arms = [json.loads(line) for line in args.arms.read_text().splitlines() if line.strip()]
    else:
        choices = [[(name, value) for value in values.split(",")] for name, values in (s.split("=") for s in args.set)]
        arms = [dict(combination) for combination in itertools.product(*choices)]
    runs = [arm | {"seed": seed, "max_rounds": args.rounds} for arm in arms for seed in args.seeds]

    def start(stack: list[dict[str, Any]]) -> None:
        command = [sys.executable, __file__, "--seconds", str(args.seconds), "--these", json.dumps(stack)]
        print(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout, end="", flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(start, stacks(runs, args.stack)))


if __name__ == "__main__":
    main()
