"""python rgym_exp/test/validate_test_run.py --gdrive-path P --experiment E --rounds 3 --nodes 5 [--transplants J]"""

from __future__ import annotations

import argparse
import sys

from rl_swarm.cli import main as rl_swarm


def main() -> int:
    parser = argparse.ArgumentParser(description="Check that a test run is complete: exit 0, or 1 and the reasons.")
    parser.add_argument("--gdrive-path", required=True)
    parser.add_argument("--experiment", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=5, help="registered nodes, the coordinator included")
    parser.add_argument("--transplants", type=int, default=0, help="J: also check that peers' groups were used")
    args = parser.parse_args()
    numbers = ("rounds", "nodes", "transplants")
    flags = [f"--{name}={getattr(args, name)}" for name in numbers]
    return rl_swarm(["validate", f"--gdrive-path={args.gdrive_path}", *flags, "--", args.experiment])


if __name__ == "__main__":
    sys.exit(main())
