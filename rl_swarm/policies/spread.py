"""Nodes spread over several devices: one Policy over several, each on a device of its own with its share of the nodes.

Nodes meet in the store and nowhere else, so nothing passes between devices: each policy does for its nodes what it
would do if they were all there are, at the same time as the others. Left out: shares by how much a device can take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch

from rl_swarm.protocols import CheckpointNote, Policy
from rl_swarm.types import Question, Rollout, ScoredGroup

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class Share:
    """Some of the nodes and the device they are on. Its thread stays: what CUDA keeps by thread is made once."""

    device: str
    nodes: tuple[str, ...]
    policy: Policy
    thread: ThreadPoolExecutor


def spread(nodes: Sequence[str], devices: Sequence[str], make: Callable[[Sequence[str], str], Policy]) -> Policy:
    """One policy for all nodes: `make` makes each device's, for its share of them. With one device it is that one."""
    if len(devices) == 1:
        (device,) = devices
        if device.startswith("cuda:"):
            # Kernels and graphs of our own go to the current device, which is else the first.
            torch.cuda.set_device(device)
        return make(nodes, device)
    shares = []
    for device, held in zip(devices, divided(nodes, len(devices)), strict=True):
        with _current(device):
            shares.append(Share(device, held, make(held, device), ThreadPoolExecutor(1, device)))
    return Spread(shares)


def divided(nodes: Sequence[str], parts: int) -> list[tuple[str, ...]]:
    """The nodes in order, in parts that differ by one node at most."""
    assert 0 < parts <= len(nodes), "no more devices than nodes"
    bounds = [-(-len(nodes) * part // parts) for part in range(parts + 1)]
    return [tuple(nodes[start:stop]) for start, stop in pairwise(bounds)]


class Spread:
    def __init__(self, shares: Sequence[Share]) -> None:
        self._shares = tuple(shares)
        self._holders = {node: share for share in shares for node in share.nodes}

    def generate(
        self,
        questions: Mapping[str, Sequence[Question]],
        group_size: int,
        seeds: Mapping[str, int],
        *,
        greedy: bool = False,
    ) -> dict[str, list[tuple[Rollout, ...]]]:
        def answer(share: Share) -> dict[str, list[tuple[Rollout, ...]]]:
            asked = _part(questions, share)
            if not any(asked.values()):
                return {node: [] for node in share.nodes}
            return share.policy.generate(asked, group_size, _part(seeds, share), greedy=greedy)

        return self._everywhere(answer)

    def update(self, batches: Mapping[str, Sequence[ScoredGroup]]) -> dict[str, dict[str, float]]:
        return self._everywhere(lambda share: share.policy.update(_part(batches, share)))

    def _everywhere(self, work: Callable[[Share], dict[str, Part]]) -> dict[str, Part]:
        """Work done on all devices at the same time; of several errors the first device's is raised."""

        def at(share: Share) -> dict[str, Part]:
            with _current(share.device):
                return work(share)

        running = [share.thread.submit(at, share) for share in self._shares]
        try:
            return {node: part for one in running for node, part in one.result().items()}
        finally:
            wait(running)  # whatever was raised, there or here: nothing goes on behind the caller's back

    def save(self, node: str, note: CheckpointNote) -> bytes:
        share = self._holders[node]
        with _current(share.device):
            return share.policy.save(node, note)

    def load(self, node: str, saved: bytes, expected: CheckpointNote) -> CheckpointNote:
        share = self._holders[node]
        with _current(share.device):
            return share.policy.load(node, saved, expected)

    def fits(self, question: Question, rollouts: Sequence[Rollout]) -> bool:
        """Any of the policies can tell: they have the same model and the same settings."""
        return self._shares[0].policy.fits(question, rollouts)

    def about(self, own: int, peers: int, group_size: int) -> str:
        told = [f"nodes spread over {len(self._shares)} devices"]
        for share in self._shares:
            with _current(share.device):
                told.append(f"{share.device}: {share.policy.about(own, peers, group_size)}")
        return ". ".join(told)


def _part(whole: Mapping[str, Part], share: Share) -> dict[str, Part]:
    return {node: whole[node] for node in share.nodes}


def _current(device: str) -> AbstractContextManager[object]:
    """The device as the current one of this thread."""
    return torch.cuda.device(device) if device.startswith("cuda") else nullcontext()
