"""From scored groups to tensors: token sequences, minibatches (an update each), micro-batches (a pass each), padding.

Completions of one question share their prompt, in the tensors too: it is passed once for all of them.

Shape letters: K nodes, Q prompts, R completions of a prompt, S = Q * R sequences, P prompt positions, C completion
positions, N = Q * P + S * C tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
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


# Completions of one prompt, and a pass's worth of them for each of K nodes.
Siblings = Sequence[TrainingSequence]
MicroBatch = Sequence[Sequence[Siblings]]


@dataclass(slots=True)
class Batch:
    """What one node makes one update from. Counts include completions without advantage, which need no pass."""

    sequences: list[TrainingSequence] = field(default_factory=list)
    tokens: int = 0
    completions: int = 0
    # The node's own model gave log-probs that are no numbers: nothing can be learned with it any more.
    broken: bool = False

    def siblings(self) -> list[Siblings]:
        """Completions by group, groups of like size next to each other, where they waste the least padding.

        The sort is stable, so runs repeat exactly.
        """
        groups: dict[int, list[TrainingSequence]] = {}
        for sequence in self.sequences:
            groups.setdefault(sequence.group, []).append(sequence)
        return sorted(groups.values(), key=lambda group: (len(group), _longest(group), len(group[0].prompt)))


def _longest(siblings: Siblings) -> int:
    return max(len(sequence.completion) for sequence in siblings)


def tokens_of(micro_batch: MicroBatch) -> int:
    """How many tokens a pass over these takes, padding included."""
    Q, R, P, C = _sizes(micro_batch)
    return len(micro_batch) * Q * (P + R * C)


def _sizes(micro_batch: MicroBatch) -> tuple[int, int, int, int]:
    groups = [siblings for node in micro_batch for siblings in node]
    return (
        max(len(node) for node in micro_batch),
        max(len(siblings) for siblings in groups),
        max(len(siblings[0].prompt) for siblings in groups),
        max(map(_longest, groups)),
    )


def micro_batches(batches: Sequence[Batch], most_tokens: int) -> list[MicroBatch]:
    """All nodes' sequences in passes within the token budget, or of one completion for each node."""
    queues = [batch.siblings() for batch in batches]
    found: list[MicroBatch] = []
    start, count = 0, max(len(queue) for queue in queues)
    while start < count:
        stop = start + 1
        while stop < count and tokens_of([queue[start : stop + 1] for queue in queues]) <= most_tokens:
            stop += 1
        found += _cut([queue[start:stop] for queue in queues], most_tokens)
        start = stop
    return found


def _cut(micro_batch: MicroBatch, most_tokens: int) -> list[MicroBatch]:
    """In halves across siblings, until it is within the budget or cannot be cut."""
    R = _sizes(micro_batch)[1]
    if R == 1 or tokens_of(micro_batch) <= most_tokens:
        return [micro_batch]
    halves = [
        [[siblings[part] for siblings in node if siblings[part]] for node in micro_batch]
        for part in (slice(None, (R + 1) // 2), slice((R + 1) // 2, None))
    ]
    return [piece for half in halves for piece in _cut(half, most_tokens)]


@dataclass(frozen=True, slots=True)
class Padded:
    """Sequences as tensors, prompts and completions apart, each padded on the right; siblings lie side by side."""

    prompts_KQP: Tensor
    lengths_KQ: Tensor
    targets_KSC: Tensor  # the completions' tokens
    # Which of the N tokens' hidden states scores a completion's token: the one before it, at first its prompt's last.
    source_KSC: Tensor
    real_KSC: Tensor
    advantage_KS1: Tensor
    foreign_KS: Tensor
    sampled_KSC: Tensor
    old_KSC: Tensor

    @property
    def siblings(self) -> int:
        return self.targets_KSC.shape[1] // self.prompts_KQP.shape[1]

    @property
    def tokens(self) -> Tensor:
        """All tokens, (K, N): the prompts, then the completions."""
        return torch.cat((self.prompts_KQP.flatten(1), self.targets_KSC.flatten(1)), 1)

    @property
    def positions(self) -> Tensor:
        """Where each of them stands in its sequence, (K, N)."""
        (K, Q, P), C, device = self.prompts_KQP.shape, self.targets_KSC.shape[2], self.prompts_KQP.device
        prompts = torch.arange(P, device=device).expand(K, Q, P)
        starts_KS1 = self.lengths_KQ.repeat_interleave(self.siblings, 1)[..., None]
        completions = starts_KS1 + torch.arange(C, device=device)
        return torch.cat((prompts.flatten(1), completions.flatten(1)), 1)

    def whole(self, k: int) -> tuple[Tensor, Tensor]:
        """One node's sequences each with its prompt, (1, S, T), and where among their tokens the sources are.

        T is the length of the longest: a model may have no position beyond it.
        """
        prompts_SP = self.prompts_KQP[k].repeat_interleave(self.siblings, 0)
        lengths_S1 = self.lengths_KQ[k].repeat_interleave(self.siblings)[:, None]
        S, C = self.targets_KSC.shape[1:]
        steps = torch.arange(C, device=prompts_SP.device)
        # Beyond a prompt's end its padding makes room for the completion.
        ids_ST = torch.cat((prompts_SP, prompts_SP.new_zeros(S, C)), 1)
        ids_ST = ids_ST.scatter(1, lengths_S1 + steps, self.targets_KSC[k])
        T = max(1, int((lengths_S1[:, 0] + self.real_KSC[k].sum(1)).max()))
        offsets_S1 = torch.arange(S, device=prompts_SP.device)[:, None] * T
        return ids_ST[None, :, :T], ((lengths_S1 - 1 + steps).clamp(0, T - 1) + offsets_S1)[None]


def pad(micro_batch: MicroBatch, device: torch.device, multiple: int = 1) -> Padded:
    """Sequences of K nodes side by side. A node with fewer has empty rows, which are nowhere real.

    Positions are filled up to a multiple of `multiple`, which some devices' kernels like.
    """
    Q, R, P, C = _sizes(micro_batch)
    P, C = (-(-length // multiple) * multiple for length in (P, C))
    nothing = TrainingSequence((), (), 0.0)
    prompts: list[list[Sequence[int]]] = []
    rows: list[list[TrainingSequence]] = []
    for node in micro_batch:
        groups = [*node, *[()] * (Q - len(node))]
        prompts.append([group[0].prompt if group else () for group in groups])
        rows.append([one for group in groups for one in (*group, *[nothing] * (R - len(group)))])

    def table(lists: Sequence[Sequence[Sequence[Any] | None]], length: int, empty: Any, dtype: Any) -> Tensor:
        filled = np.full((len(rows), len(lists[0]), length), empty, dtype)
        for k, node in enumerate(lists):
            for s, values in enumerate(node):
                if values:
                    filled[k, s, : len(values)] = values
        return torch.from_numpy(filled).to(device)

    def of_rows(make: Callable[[TrainingSequence], Any], length: int, empty: Any, dtype: Any = np.float32) -> Tensor:
        return table([[make(row) for row in node] for node in rows], length, empty, dtype)

    lengths_KQ = torch.tensor([[len(prompt) for prompt in node] for node in prompts])
    ends_KS = (lengths_KQ - 1 + torch.arange(Q) * P).clamp(min=0).repeat_interleave(R, 1)
    earlier = (Q * P + torch.arange(Q * R * C).view(1, Q * R, C)[..., :-1]).expand(len(rows), -1, -1)
    return Padded(
        prompts_KQP=table(prompts, P, 0, np.int64),
        lengths_KQ=lengths_KQ.to(device),
        targets_KSC=of_rows(lambda row: row.completion, C, 0, np.int64),
        source_KSC=torch.cat((ends_KS[..., None], earlier), 2).to(device),
        real_KSC=of_rows(lambda row: [1.0] * len(row.completion), C, 0.0),
        advantage_KS1=of_rows(lambda row: [row.advantage], 1, 0.0),
        foreign_KS=of_rows(lambda row: [row.foreign], 1, False, np.bool_)[..., 0],
        sampled_KSC=of_rows(lambda row: row.sampled_logprobs, C, NOT_KNOWN),
        old_KSC=of_rows(lambda row: row.old_logprobs, C, NOT_KNOWN),
    )
