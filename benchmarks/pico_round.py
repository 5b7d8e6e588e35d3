"""How long a round of eight pico nodes takes on this machine's CPU, and how much memory: prints JSON.

    python benchmarks/pico_round.py [--nodes 8] [--rounds 20] [--threads N]

The whole round is timed as the demo runs it: sampling (I=4, G=8), publishing to a folder, gathering J=4 of the peers'
groups, the update and the records; median after three rounds of warm-up. No evaluation.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from rl_swarm import __version__, settings
from rl_swarm.experiment import create_experiment
from rl_swarm.host import Host
from rl_swarm.policies import open_policy
from rl_swarm.simulate import simulate
from rl_swarm.stores.folder import FolderStore
from rl_swarm.tasks import open_tasks

WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    given = {"model_name": "pico", "num_train_samples": 4, "num_transplant_trees": 4, "device": "cpu"}
    loaded = settings.load(given)
    assert loaded.tasks is not None
    names = [f"node_{number}" for number in range(args.nodes)]
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        experiment = create_experiment(FolderStore(Path(folder)), "bench", {}, time.time())
        host = Host(experiment, names, open_tasks(loaded.tasks, "default"), open_policy(loaded, names), loaded)
        began = time.perf_counter()
        simulate(experiment, [host], WARM_UP + args.rounds, on_step=lambda step, rows: ends.append(time.perf_counter()))
    rounds = [end - start for start, end in zip([began, *ends], ends, strict=False)][WARM_UP:]
    unit = 1 if sys.platform == "darwin" else 1024
    result = {
        "nodes": args.nodes,
        "seconds_a_round": round(statistics.median(rounds), 3),
        "slowest_round": round(max(rounds), 3),
        "peak_resident_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20),
        "threads": args.threads,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"rl-swarm": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
