"""Reading what peers published: fetch, check, rebuild the question, score; whatever fails is counted, never fatal.

A peer is believed in nothing but the text of its completions (and in what only concerns that text: whether it was cut
off, how likely it was). Its file must be what its place in the store says; each
question is rebuilt here from its name, and a prompt that differs from the rebuilt one drops the group.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rl_swarm.codec import MAX_GROUPS, ReceivedGroup, groups_of
from rl_swarm.errors import KeyMissing, MalformedRecord
from rl_swarm.experiment import Experiment, PublishedFile
from rl_swarm.protocols import Policy, Task
from rl_swarm.settings import Settings
from rl_swarm.types import GroupName, RolloutGroup, ScoredGroup, Step

# Files are forgotten beyond this many groups, the least used first.
CACHED_GROUPS = 1024


@dataclass(slots=True)
class Gathered:
    """What came in: scored groups in canonical order, and what was turned away, by reason."""

    groups: list[ScoredGroup] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)


class PeerReader:
    """Reads rollout files. Files never change, so one reading serves all nodes of a host."""

    def __init__(self, experiment: Experiment, task: Task, policy: Policy, settings: Settings) -> None:
        self._experiment, self._task, self._policy = experiment, task, policy
        self._group_size, self._truncated = settings.num_generations, settings.truncated_completions
        self._cached: OrderedDict[str, Gathered] = OrderedDict()
        self._room = CACHED_GROUPS if settings.cache_rollouts else 0

    def read(self, files: Iterable[PublishedFile], expired: Callable[[], bool] = lambda: False) -> Gathered:
        """The groups of one peer's files of one step, as far as time and the limits allow."""
        total = Gathered()
        seen: set[str] = set()
        ordered = sorted(files)
        if len(ordered) > MAX_GROUPS:
            # A file per question is the most an honest peer publishes.
            total.rejected["too_many_files"] = len(ordered) - MAX_GROUPS
        for file in ordered[:MAX_GROUPS]:
            if expired():
                total.rejected["timeout"] += 1
                break
            gathered = self._read_file(file, expired)
            total.rejected += gathered.rejected
            for scored in gathered.groups:
                # The same question twice from one peer is one question with a thumb on the scale.
                # By its prompt: small tasks have many names for one question.
                if scored.group.question.prompt in seen:
                    total.rejected["duplicate"] += 1
                elif len(total.groups) == MAX_GROUPS:
                    total.rejected["too_many_groups"] += 1
                else:
                    seen.add(scored.group.question.prompt)
                    total.groups.append(scored)
        return total

    def find(self, names: Sequence[GroupName]) -> Gathered:
        """Groups by their names, in that order: how a restarted node trains on what it had chosen before."""
        total = Gathered()
        folders: dict[tuple[str, Step], dict[GroupName, ScoredGroup]] = {}
        for name in names:
            place = (name.node, name.step)
            if place not in folders:
                files = [f for f in self._experiment.published(name.step) if isinstance(f, PublishedFile)]
                found = self.read(file for file in files if file.node == name.node)
                folders[place] = {scored.group.name: scored for scored in found.groups}
            if name in folders[place]:
                total.groups.append(folders[place][name])
            else:
                total.rejected["gone"] += 1
        return total

    def _read_file(self, file: PublishedFile, expired: Callable[[], bool]) -> Gathered:
        if file.key in self._cached:
            self._cached.move_to_end(file.key)
            return self._cached[file.key]
        gathered = Gathered()
        try:
            wire = self._experiment.read_rollouts(file)
        except MalformedRecord as error:
            gathered.rejected[error.reason] += 1
        except KeyMissing:
            # Listed but not there (yet): not remembered, it may be there the next time.
            return Gathered(rejected=Counter({"not_visible": 1}))
        else:
            for received in groups_of(wire, self._group_size):
                if expired():
                    gathered.rejected["timeout"] += 1
                    return gathered
                try:
                    gathered.groups.append(self._check(received, file))
                except MalformedRecord as error:
                    gathered.rejected[error.reason] += 1
        self._cached[file.key] = gathered
        while sum(1 + len(kept.groups) for kept in self._cached.values()) > self._room:
            self._cached.popitem(last=False)
        return gathered

    def _check(self, received: ReceivedGroup | MalformedRecord, file: PublishedFile) -> ScoredGroup:
        if isinstance(received, MalformedRecord):
            raise received
        question = self._task.rebuild(received.name)
        if received.prompt != question.prompt:
            raise MalformedRecord("altered_prompt", file.key)
        if not self._policy.fits(question, received.rollouts):
            raise MalformedRecord("unfit_text", file.key)
        group = RolloutGroup(file.node, file.step, received.id, question, received.rollouts)
        return score(self._task, group, self._truncated)


def score(task: Task, group: RolloutGroup, truncated: str = "score") -> ScoredGroup:
    """The group with rewards by this node's own verifier; `truncated` is the rule for completions that were cut off."""
    rewards = [task.score(group.question, rollout.text) for rollout in group.rollouts]
    cut = [index for index, rollout in enumerate(group.rollouts) if rollout.truncated]
    if truncated == "zero":
        for index in cut:
            rewards[index] = 0.0
    return ScoredGroup(group, tuple(rewards), frozenset(cut if truncated == "leave_out" else ()))
