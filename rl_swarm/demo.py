"""The demonstration: one swarm trained twice from one seed, without sharing and with it, everything else alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from rl_swarm.errors import ExperimentExists, ExperimentMissing
from rl_swarm.experiment import Experiment, create_experiment, open_experiment
from rl_swarm.host import Host
from rl_swarm.policies import open_policy
from rl_swarm.protocols import Store
from rl_swarm.settings import Settings, public
from rl_swarm.simulate import simulate
from rl_swarm.tasks import open_tasks
from rl_swarm.types import Step

MADE_BY = "demo"
EVALUATIONS = 12
ARMS = {"demo_alone": 0, "demo_sharing": 4}


@dataclass(slots=True)
class Arm:
    """One of the two runs, as far as it has come. Curves are means over nodes by round; -1 is before the first."""

    experiment: str
    transplants: int
    rounds: int
    held_out: dict[int, float] = field(default_factory=dict)
    own: list[float] = field(default_factory=list)
    external_used: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def finished(self) -> bool:
        return len(self.own) == self.rounds

    @property
    def start(self) -> float:
        return self.held_out[-1]

    @property
    def end(self) -> float:
        return self.held_out[max(self.held_out)]


def run_demo(store: Store, settings: Settings, nodes: int, on_change: Callable[[list[Arm]], None]) -> list[Arm]:
    """Train both arms, one after the other; `on_change` sees them after every round."""
    arms = [Arm(name, transplants, settings.max_rounds) for name, transplants in ARMS.items()]
    for arm in arms:
        on_change(arms)
        _run_arm(store, settings, nodes, arm, lambda: on_change(arms))
    return arms


def _run_arm(store: Store, settings: Settings, nodes: int, arm: Arm, changed: Callable[[], None]) -> None:
    every = max(1, settings.max_rounds // EVALUATIONS)
    settings = settings.model_copy(
        update={"num_transplant_trees": arm.transplants, "experiment_name": arm.experiment, "eval_every": every}
    )
    experiment = _fresh(store, arm.experiment, settings)
    names = [f"node_{number}" for number in range(nodes)]
    assert settings.tasks is not None, "filled in by settings.load"
    task = open_tasks(settings.tasks, settings.task_difficulty, settings.prompt_examples)
    host = Host(experiment, names, task, open_policy(settings, names), settings)
    arm.external_used = dict.fromkeys(names, 0)
    arm.held_out[-1] = _mean_held_out(host)
    began = time.perf_counter()

    def on_step(step: Step, rows: dict[str, dict[str, Any]]) -> None:
        arm.own.append(fmean(row["my_reward"] for row in rows.values()))
        evaluated = [row["eval_reward"] for row in rows.values() if "eval_reward" in row]
        if evaluated:
            arm.held_out[step.round] = fmean(evaluated)
        for node, row in rows.items():
            arm.external_used[node] += row["external_used"]
        arm.seconds = time.perf_counter() - began
        changed()

    simulate(experiment, [host], settings.max_rounds, clock=time.time, on_step=on_step)
    if settings.max_rounds % every:
        arm.held_out[settings.max_rounds - 1] = _mean_held_out(host)
    changed()


def _mean_held_out(host: Host) -> float:
    return fmean(evaluation.figures()["eval_reward"] for evaluation in host.evaluate().values())


def _fresh(store: Store, name: str, settings: Settings) -> Experiment:
    """A new experiment under this name. An older demonstration makes room; anything else of that name does not."""
    try:
        old = open_experiment(store, name)
    except ExperimentMissing:
        pass
    else:
        if old.birth.made_by != MADE_BY:
            raise ExperimentExists(
                f"Experiment {name} was not made by the demo; delete or rename it, or use another root."
            )
        old.delete()
    return create_experiment(store, name, public(settings), time.time(), MADE_BY)
