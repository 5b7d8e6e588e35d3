"""From scored groups to tensors: token sequences, minibatches (an update each), micro-batches (a pass each), padding.

Shape letters: K nodes, S sequences, T positions, C completion positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NOT_KNOWN = float("nan")


@dataclass(slots=True)
class TrainingSequence:
    """One completion ready for training: the tokens that were sampled, and how much they count."""

    prompt: Sequence[int]
    completion: Sequence[int]
    advantage: float
    foreign: bool = False
    group: int = 0
    # Log-probs of the tokens when this node sampled them; of a peer's text only the sum, as the peer says.
    sampled_logprobs: Sequence[float] | None = None
    said_logprob: float | None = None
    # Log-probs under the weights the round began with, where there are several updates a round.
    old_logprobs: Sequence[float] | None = None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.completion)


@dataclass(slots=True)
class Batch:
    """What one node makes one update from. Counts include completions without advantage, which need no pass."""

    sequences: list[TrainingSequence] = field(default_factory=list)
    tokens: int = 0
    completions: int = 0
    # The node's own model gave log-probs that are no numbers: nothing can be learned with it any more.
    broken: bool = False

    def sort(self) -> None:
        """Neighbours of like length waste the least padding; the sort is stable, so runs repeat exactly."""
        self.sequences.sort(key=lambda sequence: sequence.length)


@dataclass(frozen=True, slots=True)
class Padded:
    """Sequences as tensors, padded on the right: causal attention alone then keeps padding out of what is real."""

    ids_KST: Tensor
    # The hidden state at position t scores token t + 1, so a completion is scored from its prompt's last position on.
    source_KSC: Tensor
    targets_KSC: Tensor
    real_KSC: Tensor
    advantage_KS1: Tensor
    foreign_KS: Tensor
    sampled_KSC: Tensor
    old_KSC: Tensor


def pad(slices: Sequence[Sequence[TrainingSequence]], device: torch.device) -> Padded:
    """Sequences of K nodes side by side. A node with fewer has empty rows, which are nowhere real."""
    S = max(len(sequences) for sequences in slices)
    T = max(sequence.length for sequences in slices for sequence in sequences)
    C = max(len(sequence.completion) for sequences in slices for sequence in sequences)
    nothing = TrainingSequence((), (), 0.0)
    rows = [[*sequences, *[nothing] * (S - len(sequences))] for sequences in slices]

    # Built as lists first: one tensor of a million numbers is made faster than a thousand small ones are filled in.
    def table(make: Callable[[TrainingSequence], Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor([[make(row) for row in node] for node in rows], dtype=dtype).to(device)

    def fill(values: Sequence[Any] | None, length: int, empty: Any) -> list[Any]:
        return [*(values or ()), *[empty] * (length - len(values or ()))]

    def sources(row: TrainingSequence) -> list[int]:
        return fill(range(len(row.prompt) - 1, row.length - 1) if row.completion else (), C, 0)

    return Padded(
        ids_KST=table(lambda row: fill((*row.prompt, *row.completion), T, 0), torch.long),
        source_KSC=table(sources, torch.long),
        targets_KSC=table(lambda row: fill(row.completion, C, 0), torch.long),
        real_KSC=table(lambda row: fill([1.0] * len(row.completion), C, 0.0), torch.float32),
        advantage_KS1=table(lambda row: [row.advantage], torch.float32),
        foreign_KS=table(lambda row: row.foreign, torch.bool),
        sampled_KSC=table(lambda row: fill(row.sampled_logprobs, C, NOT_KNOWN), torch.float32),
        old_KSC=table(lambda row: fill(row.old_logprobs, C, NOT_KNOWN), torch.float32),
    )


def longest(batches: Sequence[Batch], stop: int) -> int:
    """The length of the longest sequence before `stop`, of any node; the lists are sorted by length."""
    return max(batch.sequences[min(stop, len(batch.sequences)) - 1].length for batch in batches if batch.sequences)


def micro_batches(batches: Sequence[Batch], most_tokens: int) -> list[tuple[int, int]]:
    """Slices of the nodes' sequence lists, each within the token budget (or one sequence per node)."""
    count = max(len(batch.sequences) for batch in batches)
    slices: list[tuple[int, int]] = []
    start = 0
    while start < count:
        stop = start + 1
        while stop < count and len(batches) * (stop + 1 - start) * longest(batches, stop + 1) <= most_tokens:
            stop += 1
        slices.append((start, stop))
        start = stop
    return slices
