"""Choosing tokens, and generation for K stacked nodes: prefill once per question, then one token a step for all.

Each node's draws come from its own seed and are laid out before decoding starts (one uniform number per completion and
position), so its tokens depend neither on its co-hosted neighbours nor on when others stop.

Shape letters: K nodes, Q questions, S sequences (siblings side by side), M of them still running, P prompt positions,
C new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from rl_swarm.policies.decoder import Block, Cache, Step, Whole, block, rotary, run, scores
from rl_swarm.policies.families.parts import Shape, Weights


@dataclass(frozen=True, slots=True)
class Sampled:
    """Completions with the log-prob of every token; `lengths` counts the end-of-text token where there is one."""

    ids_KSC: Tensor
    logprobs_KSC: Tensor
    lengths_KS: Tensor
    stopped_KS: Tensor

    def cpu(self) -> Sampled:
        """Brought over in one go, before anyone looks at single numbers."""
        return Sampled(*(getattr(self, one.name).cpu() for one in fields(self)))


def joined(parts: Sequence[Sampled], axis: int) -> Sampled:
    """Parts of one answer put together: along nodes (0) or sequences (1)."""
    return Sampled(*(torch.cat([getattr(part, one.name) for part in parts], axis) for one in fields(Sampled)))


def draws(seeds: Sequence[int], sequences: int, new_tokens: int) -> Tensor:
    """Uniform numbers for each node, sequence and position, (K, S, C), each node's from its own seed alone."""
    return torch.stack(
        [torch.rand(sequences, new_tokens, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    )


def pick(logits_SV: Tensor, uniform_S: Tensor, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """Sample by inverting the cumulative distribution; temperature 0 takes the likeliest token.

    Any number of leading axes. The log-prob is that of the full distribution at this temperature: what training
    recomputes. With top_p below 1 the tokens come from its head alone, a bias shared with the rest of the field.
    """
    if temperature == 0:
        ids = logits_SV.argmax(-1)
        return ids, torch.log_softmax(logits_SV, -1).gather(-1, ids[..., None])[..., 0]
    logp_SV = torch.log_softmax(logits_SV / temperature, -1)
    weights = logp_SV.exp()
    if top_p < 1:
        weights = nucleus(weights, top_p)
    cumulative = weights.cumsum(-1)
    threshold = uniform_S[..., None] * cumulative[..., -1:]
    # A token of weight zero adds nothing to the sum, so `>` steps over it; the clamp guards the last rounding.
    ids = (cumulative <= threshold).sum(-1).clamp(max=logits_SV.shape[-1] - 1)
    return ids, logp_SV.gather(-1, ids[..., None])[..., 0]


def nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Probabilities with all but the likeliest tokens, those that make up `top_p`, set to zero."""
    ordered, order = weights.sort(-1, descending=True)
    ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0.0)
    return torch.zeros_like(weights).scatter(-1, order, ordered)


class Recorder:
    """Collects tokens as they are chosen, and knows who has stopped."""

    def __init__(self, uniform_KSC: Tensor, ends: Sequence[int], temperature: float, top_p: float) -> None:
        K, S, C = uniform_KSC.shape
        device = uniform_KSC.device
        self._uniform_KSC, self._temperature, self._top_p = uniform_KSC, temperature, top_p
        self._ends_E = torch.tensor(ends, device=device)
        self._ids_KSC = torch.zeros(K, S, C, dtype=torch.long, device=device)
        self._logprobs_KSC = torch.zeros(K, S, C, device=device)
        self._length_KS = torch.full((K, S), C, device=device)
        self._done_KS = torch.zeros(K, S, dtype=torch.bool, device=device)
        # The sequences that still run, or keep others company, (K, M).
        self.rows_KM = torch.arange(S, device=device).expand(K, S)

    def choose(self, c: int, scores_KMV: Tensor) -> Tensor | None:
        """The tokens at completion position c, (K, M); None when no further position is needed."""
        rows_KM = self.rows_KM
        uniform_KM = self._uniform_KSC[:, :, c].gather(1, rows_KM)
        ids_KM, logprob_KM = pick(scores_KMV.float(), uniform_KM, self._temperature, self._top_p)
        self._ids_KSC[:, :, c] = self._ids_KSC[:, :, c].scatter(1, rows_KM, ids_KM)
        self._logprobs_KSC[:, :, c] = self._logprobs_KSC[:, :, c].scatter(1, rows_KM, logprob_KM)
        ending_KM = torch.isin(ids_KM, self._ends_E) & ~self._done_KS.gather(1, rows_KM)
        ending_KS = torch.zeros_like(self._done_KS).scatter(1, rows_KM, ending_KM)
        self._length_KS[ending_KS] = c + 1
        self._done_KS |= ending_KS
        finished = c + 1 == self._uniform_KSC.shape[2] or bool(self._done_KS.all())
        return None if finished else ids_KM

    def leave(self) -> Tensor | None:
        """Let stopped sequences go once no node has more than half of its rows running.

        Returns which of the present rows stay, (K, M), if any left. A node with fewer running than another keeps some
        stopped ones for company.
        """
        stopped_KM = self._done_KS.gather(1, self.rows_KM)
        M, running = stopped_KM.shape[1], int((~stopped_KM).sum(1).max())
        if running > M // 2:
            return None
        stay_KM = stopped_KM.to(torch.int8).argsort(dim=1, stable=True)[:, : max(1, running)]
        self.rows_KM = self.rows_KM.gather(1, stay_KM)
        return stay_KM

    @property
    def sequences(self) -> int:
        return self._done_KS.shape[1]

    @property
    def sampled(self) -> Sampled:
        return Sampled(self._ids_KSC, self._logprobs_KSC, self._length_KS, self._done_KS)


def padded_prompts(prompts: Sequence[Sequence[Sequence[int]]], longest: int = 0) -> tuple[Tensor, Tensor]:
    """Prompts of K nodes padded on the right, (K, Q, P), at least to `longest`; and their lengths, (K, Q)."""
    lengths_KQ = torch.tensor([[len(ids) for ids in node] for node in prompts])
    longest = max(longest, int(lengths_KQ.max()))
    return torch.tensor([[[*ids, *[0] * (longest - len(ids))] for ids in node] for node in prompts]), lengths_KQ


@torch.no_grad()
def prefill(
    shape: Shape, weights: Weights, prompts_KQP: Tensor, lengths_KQ: Tensor, block: Block = block
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Keys and values of every layer, (K * Q, G, P, E), and the state at each prompt's end, (K, Q, D)."""
    K, Q, P = prompts_KQP.shape
    positions_KN = torch.arange(P, device=prompts_KQP.device).repeat(K, Q)
    kept: list[tuple[Tensor, Tensor]] = []
    attend = Whole(shape, Q, rotary(shape, weights, positions_KN), kept)
    x_KND = run(shape, weights, prompts_KQP.flatten(1), positions_KN, lambda layer: attend, block=block)
    last = (lengths_KQ - 1)[..., None, None].expand(K, Q, 1, shape.width)
    return kept, x_KND.view(K, Q, P, -1).gather(2, last)[:, :, 0]


@torch.no_grad()
def sample(
    shape: Shape,
    weights: Weights,
    prompts: Sequence[Sequence[Sequence[int]]],
    uniform_KSC: Tensor,
    *,
    ends: Sequence[int],
    temperature: float,
    top_p: float,
) -> Sampled:
    """Completions for each of Q prompts of each of K nodes, siblings side by side, one per row of uniform numbers."""
    device = next(iter(weights.values())).device
    K, Q = len(prompts), len(prompts[0])
    _, S, new_tokens = uniform_KSC.shape
    siblings = S // Q
    prompts_KQP, lengths_KQ = (tensor.to(device) for tensor in padded_prompts(prompts))
    kept, last_KQD = prefill(shape, weights, prompts_KQP, lengths_KQ)
    cache = Cache([(keys.float(), values.float()) for keys, values in kept], lengths_KQ)
    cache.make_room(siblings, new_tokens)
    hidden = _hidden_padding(cache)
    position_KM = lengths_KQ.repeat_interleave(siblings, 1)
    recorder = Recorder(uniform_KSC.to(device), ends, temperature, top_p)
    scores_KMV = scores(shape, weights, last_KQD).repeat_interleave(siblings, 1)
    for c in range(new_tokens):
        ids_KM = recorder.choose(c, scores_KMV)
        if ids_KM is None:
            break
        if (stay_KM := recorder.leave()) is not None:
            rows = (stay_KM + torch.arange(K, device=device)[:, None] * ids_KM.shape[1]).flatten()
            cache.leave(rows, siblings)
            hidden, siblings = _hidden_padding(cache), 1
            ids_KM, position_KM = ids_KM.gather(1, stay_KM), position_KM.gather(1, stay_KM)
        step = partial(Step, shape, rotary(shape, weights, position_KM), cache, c, hidden)
        scores_KMV = scores(shape, weights, run(shape, weights, ids_KM, position_KM, step))
        position_KM = position_KM + 1
    return recorder.sampled


def _hidden_padding(cache: Cache) -> Tensor:
    """What keeps prompts' padding out of attention, (K * Q, 1, 1, P)."""
    P = cache.prompts[0][0].shape[2]
    beyond = torch.arange(P, device=cache.lengths_KQ.device) >= cache.lengths_KQ.reshape(-1, 1, 1, 1)
    return torch.zeros(beyond.shape, device=beyond.device).masked_fill_(beyond, -torch.inf)
