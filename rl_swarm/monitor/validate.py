"""The checks of a test run: did every node do every round, is everything on disk and whole, was anything shared?"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from rl_swarm.errors import KeyMissing, MalformedRecord
from rl_swarm.experiment import Experiment, PublishedFile
from rl_swarm.types import Step

SHOWN = 5


class Check(NamedTuple):
    name: str
    problems: list[str]

    @property
    def passed(self) -> bool:
        return not self.problems


def validate(experiment: Experiment, rounds: int, nodes: int, transplants: int = 0) -> list[Check]:
    """`nodes` counts the coordinator too, as it is a registered peer; `transplants` is J."""
    peers = experiment.peers().known
    workers = sorted(node for node, peer in peers.items() if peer.node_role == "worker")
    stages = int(experiment.birth.settings.get("max_stages", 1))
    steps = [Step(round, stage) for round in range(rounds) for stage in range(stages)]
    checks = [
        _peers(sorted(peers), nodes),
        _clock(experiment, rounds),
        _rollouts(experiment, workers, steps),
        _rewards(experiment, workers, steps),
        _metrics(experiment, workers, steps),
    ]
    if transplants:
        checks.append(_sharing(experiment, workers, steps, transplants))
    return checks


def _peers(found: list[str], nodes: int) -> Check:
    wrong = len(found) != nodes
    return Check("peers", [f"{nodes} nodes expected, {len(found)} registered: {', '.join(found)}"] if wrong else [])


def _clock(experiment: Experiment, rounds: int) -> Check:
    state = experiment.state()
    if state is None:
        return Check("clock", ["no coordinator ever wrote the state"])
    if state.round < rounds - 1:
        return Check("clock", [f"the clock stands at round {state.round}, {rounds} rounds expected"])
    return Check("clock", [] if state.finished else ["the experiment is not finished"])


def _rollouts(experiment: Experiment, workers: list[str], steps: list[Step]) -> Check:
    problems: list[str] = []
    for step in steps:
        files: dict[str, list[PublishedFile]] = {}
        for file in experiment.published(step):
            if isinstance(file, PublishedFile):
                files.setdefault(file.node, []).append(file)
            else:
                problems.append(f"round {step.round}: a rollout file with a bad name, {file}")
        for node in workers:
            if node not in files:
                problems.append(f"round {step.round} stage {step.stage}: no rollout file of {node}")
            for file in files.get(node, []):
                try:
                    wire = experiment.read_rollouts(file)
                except (MalformedRecord, KeyMissing) as error:
                    problems.append(f"{file.key}: {error}")
                else:
                    if not wire.rollouts or any(not group for group in wire.rollouts.values()):
                        problems.append(f"{file.key}: no completions in it")
    return Check("rollouts", problems)


def _rewards(experiment: Experiment, workers: list[str], steps: list[Step]) -> Check:
    missing = [(node, step) for step in steps for node in workers if not experiment.has_reward(node, step)]
    return Check("rewards", [f"round {step.round} stage {step.stage}: no reward of {node}" for node, step in missing])


def _metrics(experiment: Experiment, workers: list[str], steps: list[Step]) -> Check:
    problems: list[str] = []
    for node in workers:
        log = experiment.metrics(node)
        if log.unreadable:
            problems.append(f"{node}: {log.unreadable} unreadable lines in its metrics")
        counts = Counter(Step(row["round"], row["stage"]) for row in log.rows)
        for step in steps:
            if counts[step] != 1:
                problems.append(
                    f"round {step.round} stage {step.stage}: {counts[step]} metrics rows of {node}, 1 expected"
                )
        for row in log.rows:
            if not 0.0 <= row["my_reward"] <= 1.0:
                problems.append(f"round {row['round']}: {node} reports a reward of {row['my_reward']}")
    return Check("metrics", problems)


def _sharing(experiment: Experiment, workers: list[str], steps: list[Step], transplants: int) -> Check:
    problems: list[str] = []
    used = 0
    for node in workers:
        for row in experiment.metrics(node).rows:
            if Step(row["round"], row["stage"]) not in steps:
                continue
            used += row["external_used"]
            place = f"round {row['round']}: {node}"
            if row["external_wanted"] != transplants:
                problems.append(f"{place} wanted {row['external_wanted']} groups of its peers, {transplants} expected")
            if row["external_used"] + sum(row["external_missing"].values()) != row["external_wanted"]:
                problems.append(f"{place} does not account for all of its {row['external_wanted']} groups")
    if used == 0:
        problems.append("no node used a single group of a peer: nothing was shared")
    return Check("sharing", problems)


def report(checks: list[Check]) -> str:
    """One line a check, and the first few problems of each."""
    lines: list[str] = []
    for check in checks:
        lines.append(f"{'ok    ' if check.passed else 'FAILED'} {check.name}")
        lines += [f"         {problem}" for problem in check.problems[:SHOWN]]
        if len(check.problems) > SHOWN:
            lines.append(f"         and {len(check.problems) - SHOWN} more")
    return "\n".join(lines)
