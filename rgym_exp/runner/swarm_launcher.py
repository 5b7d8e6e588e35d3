"""python -m rgym_exp.runner.swarm_launcher: a coordinator or a worker, by NODE_ROLE and the other variables."""

from __future__ import annotations

import sys

from rl_swarm import settings
from rl_swarm.cli import exit_code
from rl_swarm.verbs import launch


def main() -> int:
    if len(sys.argv) > 1:
        wanted_help = sys.argv[1] in ("-h", "--help")
        sys.stderr.write(f"{__doc__}\nIt takes no arguments; docs/settings.md lists the variables.\n")
        return 0 if wanted_help else 2
    return exit_code(lambda: launch(settings.load()))


if __name__ == "__main__":
    sys.exit(main())
