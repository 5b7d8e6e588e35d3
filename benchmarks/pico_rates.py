"""Which learning rate and which rule for peers' text suits pico: held-out reward by round for each, as JSON lines.

    python benchmarks/pico_rates.py [--rounds 150] [--seeds 42 43] [--jobs 12] > rates.jsonl

Eight nodes, I=4, G=8, evaluation on 128 held-out questions every 10 rounds. Runs are independent processes, as many at
a time as --jobs says: on one GPU a dozen share it well, on a CPU use as many as it has cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean
from typing import Any

RATES = (3e-5, 1e-4, 2e-4, 3e-4)
ARMS = (("none", 0), ("none", 4), ("damp", 4), ("positive", 4))
NODES = [f"n{number}" for number in range(8)]


def run_one(given: dict[str, Any]) -> dict[str, Any]:
    import torch

    from rl_swarm import settings
    from rl_swarm.experiment import create_experiment
    from rl_swarm.host import Host
    from rl_swarm.policies import open_policy
    from rl_swarm.simulate import simulate
    from rl_swarm.stores.memory import MemoryStore
    from rl_swarm.tasks import open_tasks

    torch.set_num_threads(1)
    fixed = {"model_name": "pico", "num_train_samples": 4, "eval_every": 10, "eval_questions": 128, "dtype": "float32"}
    loaded = settings.load(fixed | given)
    assert loaded.tasks is not None
    experiment = create_experiment(MemoryStore(), "rates", {}, 0.0)
    host = Host(experiment, NODES, open_tasks(loaded.tasks, "default"), open_policy(loaded, NODES), loaded)
    start = fmean(host.evaluate().values())
    rows = simulate(experiment, [host], loaded.max_rounds)
    evaluated = [row for row in rows if "eval_reward" in row]
    rounds = sorted({row["round"] for row in evaluated})
    curve = [fmean(row["eval_reward"] for row in evaluated if row["round"] == round_) for round_ in rounds]
    return given | {"held_out": [round(value, 4) for value in [start, *curve]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43])
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(run_one(args.one)))
        return
    runs = [
        {"learning_rate": rate, "off_policy": rule, "num_transplant_trees": j, "seed": seed, "max_rounds": args.rounds}
        for seed in args.seeds
        for rate in RATES
        for rule, j in ARMS
    ]

    def start(given: dict[str, Any]) -> str:
        command = [sys.executable, __file__, "--one", json.dumps(given)]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout

    with ThreadPoolExecutor(args.jobs) as pool:
        for line in pool.map(start, runs):
            print(line, end="", flush=True)


if __name__ == "__main__":
    main()
