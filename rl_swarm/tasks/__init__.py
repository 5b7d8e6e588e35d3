"""What nodes practise on. `open_tasks` turns the names in TASKS into one Task."""

from __future__ import annotations

from rl_swarm.protocols import Task
from rl_swarm.tasks.arithmetic import Arithmetic
from rl_swarm.tasks.examples import WithExamples
from rl_swarm.tasks.mixture import Mixture
from rl_swarm.tasks.names import parse_tasks
from rl_swarm.tasks.reasoning_gym import ReasoningGym


def open_tasks(names: str, difficulty: str, examples: int = 0) -> Task:
    task = _open(names, difficulty)
    return WithExamples(task, examples) if examples else task


def _open(names: str, difficulty: str) -> Task:
    kinds, gym = parse_tasks(names)
    if not gym:
        return Arithmetic(kinds)
    if not kinds:
        return ReasoningGym(gym, difficulty)
    return Mixture(Arithmetic(kinds), len(kinds), ReasoningGym(gym, difficulty), len(gym))
