"""Small swarms for tests: the toy policy, stores in memory or a folder, and clocks that stand still until told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_swarm import settings
from rl_swarm.checkpoints import CheckpointWriter
from rl_swarm.experiment import Experiment, create_experiment
from rl_swarm.host import Host
from rl_swarm.policies import open_policy
from rl_swarm.protocols import Store
from rl_swarm.records import Peer, Process
from rl_swarm.settings import Settings
from rl_swarm.simulate import simulate
from rl_swarm.tasks import open_tasks
from rl_swarm.types import Question, QuestionName, Step

NODES = ("ada", "bob", "cleo")
# A process of a machine that nobody here can look into: only its beat tells whether it lives.
ELSEWHERE = Process(host="elsewhere", boot="another machine", pid=4711, started="1")


class FakeClock:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def ask(*prompts: str) -> list[Question]:
    """Questions of which only the prompt matters."""
    return [Question(QuestionName("none", "", 0, number), prompt, "") for number, prompt in enumerate(prompts)]


def toy_settings(**given: Any) -> Settings:
    """The toy policy, I=4, G=4, J=2 over 3 rounds where nothing else is asked for."""
    defaults = {"model_name": "toy", "gdrive_path": "unused", "node_id": "nobody", "max_rounds": 3}
    counts = {"num_train_samples": 4, "num_generations": 4, "num_transplant_trees": 2}
    return settings.load(given, defaults={**defaults, **counts})


def toy_experiment(store: Store, chosen: Settings, name: str = "trial") -> Experiment:
    return create_experiment(store, name, settings.public(chosen), 0.0)


def toy_host(experiment: Experiment, nodes: Sequence[str], chosen: Settings) -> Host:
    assert chosen.tasks is not None
    task = open_tasks(chosen.tasks, chosen.task_difficulty)
    return Host(experiment, nodes, task, open_policy(chosen, nodes), chosen, FakeClock(), FakeClock())


def write_checkpoints(host: Host, step: Step) -> None:
    """Save every node of the host, and be done with it."""
    with CheckpointWriter(host) as writer:
        writer.write(step)
        writer.finish()


def toy_run(
    store: Store, nodes: Sequence[str] = NODES, name: str = "trial", **given: Any
) -> tuple[Experiment, list[dict[str, Any]]]:
    """A finished experiment and its metrics rows; every node has a host of its own."""
    chosen = toy_settings(**given)
    experiment = toy_experiment(store, chosen, name)
    hosts = [toy_host(experiment, [node], chosen) for node in nodes]
    return experiment, simulate(experiment, hosts, chosen.max_rounds, chosen.max_stages)


def a_peer(experiment: Experiment, node: str, **given: Any) -> Peer:
    """A worker on some other machine, alive as long as its beat moves."""
    facts: dict[str, Any] = {
        "run": experiment.run,
        "peer_id": node,
        "node_role": "worker",
        "model": "toy",
        "version": "0",
        "registered_at": 0.0,
        "token": f"token of {node}",
        "process": ELSEWHERE,
    }
    return Peer(**{**facts, **given})


def accounted(row: dict[str, Any]) -> bool:
    """Whether a metrics row says what became of each of its J groups."""
    return bool(row["external_used"] + sum(row["external_missing"].values()) == row["external_wanted"])
