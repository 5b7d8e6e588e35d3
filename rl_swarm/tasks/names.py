"""The names a user may put into TASKS, known without loading any task's library."""

from __future__ import annotations

from rl_swarm.tasks import arithmetic
from rl_swarm.tasks.reasoning_gym import PAPER_TASKS, SUPPORTED_TASKS


def parse_tasks(names: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The arithmetic kinds and the reasoning-gym tasks that a comma-separated list stands for."""
    kinds: dict[str, None] = {}
    gym: dict[str, None] = {}
    for name in (part.strip() for part in names.split(",")):
        family, _, kind = name.partition("/")
        if name == arithmetic.FAMILY:
            kinds |= dict.fromkeys(arithmetic.KINDS)
        elif family == arithmetic.FAMILY and kind in arithmetic.KINDS:
            kinds[kind] = None
        elif name == "reasoning_gym":
            gym |= dict.fromkeys(PAPER_TASKS)
        elif name in SUPPORTED_TASKS:
            gym[name] = None
        else:
            allowed = ["arithmetic", *(f"arithmetic/{kind}" for kind in arithmetic.KINDS), "reasoning_gym"]
            raise ValueError(f"{name!r} is no task; allowed: {', '.join([*allowed, *SUPPORTED_TASKS])}")
    return tuple(kinds), tuple(gym)


def check_tasks(names: str) -> None:
    parse_tasks(names)
