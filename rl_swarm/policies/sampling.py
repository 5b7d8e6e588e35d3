"""Choosing tokens, and generation for K stacked nodes: prefill once per question, then one token a step for all.

Each node's draws come from its own seed and are laid out before decoding starts (one uniform number per completion and
position), so its tokens depend neither on its co-hosted neighbours nor on when others stop.

Shape letters: K nodes, Q questions, S = Q * group size sequences, T positions, C new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rl_swarm.policies.decoder import Cache, Shape, Weights, forward, logits


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
        ordered, order = weights.sort(-1, descending=True)
        ordered[ordered.cumsum(-1) - ordered >= top_p] = 0
        weights = torch.zeros_like(weights).scatter(-1, order, ordered)
    cumulative = weights.cumsum(-1)
    threshold = uniform_S[..., None] * cumulative[..., -1:]
    # A token of weight zero adds nothing to the sum, so `>` steps over it; the clamp guards the last rounding.
    ids = (cumulative <= threshold).sum(-1).clamp(max=logits_SV.shape[-1] - 1)
    return ids, logp_SV.gather(-1, ids[..., None])[..., 0]


class Recorder:
    """Collects tokens as they are chosen, and knows who has stopped."""

    def __init__(self, uniform_KSC: Tensor, ends: Sequence[int], temperature: float, top_p: float) -> None:
        K, S, C = uniform_KSC.shape
        device = uniform_KSC.device
        self._uniform_KSC, self._temperature, self._top_p = uniform_KSC, temperature, top_p
        self._ends_E = torch.tensor(ends, device=device)
        self._ids_KSC = torch.zeros(K, S, C, dtype=torch.long, device=device)
        self._logprobs_KSC = torch.zeros(K, S, C, device=device)
        self._done_KS = torch.zeros(K, S, dtype=torch.bool, device=device)
        self._length_KS = torch.full((K, S), C, device=device)

    def choose(self, c: int, scores_KSV: Tensor) -> Tensor | None:
        """The tokens at completion position c, (K, S); None when no further position is needed."""
        ids_KS, logprob_KS = pick(scores_KSV, self._uniform_KSC[:, :, c], self._temperature, self._top_p)
        self._ids_KSC[:, :, c], self._logprobs_KSC[:, :, c] = ids_KS, logprob_KS
        ending_KS = torch.isin(ids_KS, self._ends_E) & ~self._done_KS
        self._length_KS[ending_KS] = c + 1
        self._done_KS |= ending_KS
        finished = c + 1 == self._uniform_KSC.shape[2] or bool(self._done_KS.all())
        return None if finished else ids_KS

    @property
    def sequences(self) -> int:
        return self._done_KS.shape[1]

    @property
    def sampled(self) -> Sampled:
        return Sampled(self._ids_KSC, self._logprobs_KSC, self._length_KS, self._done_KS)


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
    group_size = S // Q
    lengths_KQ = torch.tensor([[len(ids) for ids in node] for node in prompts])
    longest = int(lengths_KQ.max())
    prompts_KQT = torch.zeros(K, Q, longest, dtype=torch.long)
    for k, node in enumerate(prompts):
        for q, ids in enumerate(node):
            prompts_KQT[k, q, : len(ids)] = torch.tensor(ids)
    prompts_KQT, lengths_KQ = prompts_KQT.to(device), lengths_KQ.to(device)

    cache = Cache()
    positions = torch.arange(longest, device=device).expand(K, Q, longest)
    hidden = forward(shape, weights, prompts_KQT, positions, cache)
    last = (lengths_KQ - 1)[..., None, None].expand(K, Q, 1, shape.width)
    scores_KSV = logits(shape, weights, hidden.gather(2, last)[:, :, 0]).repeat_interleave(group_size, 1)
    for layer in range(shape.layers):
        for tensors in (cache.keys, cache.values):
            room = tensors[layer].new_zeros(K * Q, shape.kv_heads, new_tokens, shape.head_width)
            tensors[layer] = torch.cat((tensors[layer], room), 2).repeat_interleave(group_size, 0)

    position_KS = lengths_KQ.repeat_interleave(group_size, 1)
    slots = torch.arange(longest + new_tokens, device=device)
    recorder = Recorder(uniform_KSC.to(device), ends, temperature, top_p)
    for c in range(new_tokens):
        ids_KS = recorder.choose(c, scores_KSV)
        if ids_KS is None:
            break
        mask = (slots <= position_KS.reshape(K * S, 1))[:, None, None]
        hidden = forward(shape, weights, ids_KS[..., None], position_KS[..., None], cache, mask)
        scores_KSV = logits(shape, weights, hidden[:, :, 0])
        position_KS = position_KS + 1
    return recorder.sampled
