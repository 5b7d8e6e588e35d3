"""Generation for K stacked nodes: prefill once per question, then one token a step for all completions.

Each node's draws come from its own seed and are laid out before decoding starts (one uniform number per completion and
position), so its tokens depend neither on its co-hosted neighbours nor on when others stop.

Shape letters: K nodes, Q questions, S = Q * group size sequences, T positions, C new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def pick(logits_KSV: Tensor, uniform_KS: Tensor, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """Sample by inverting the cumulative distribution; temperature 0 takes the likeliest token.

    The log-prob is that of the full distribution at this temperature: what training recomputes. With top_p below 1 the
    tokens come from its head alone, a bias shared with the rest of the field.
    """
    if temperature == 0:
        ids = logits_KSV.argmax(-1)
        return ids, torch.log_softmax(logits_KSV, -1).gather(-1, ids[..., None])[..., 0]
    logp_KSV = torch.log_softmax(logits_KSV / temperature, -1)
    weights = logp_KSV.exp()
    if top_p < 1:
        ordered, order = weights.sort(-1, descending=True)
        ordered[ordered.cumsum(-1) - ordered >= top_p] = 0
        weights = torch.zeros_like(weights).scatter(-1, order, ordered)
    cumulative = weights.cumsum(-1)
    threshold = uniform_KS[..., None] * cumulative[..., -1:]
    # A token of weight zero adds nothing to the sum, so `>` steps over it; the clamp guards the last rounding.
    ids = (cumulative <= threshold).sum(-1).clamp(max=logits_KSV.shape[-1] - 1)
    return ids, logp_KSV.gather(-1, ids[..., None])[..., 0]


@torch.no_grad()
def sample(
    shape: Shape,
    weights: Weights,
    prompts: Sequence[Sequence[Sequence[int]]],
    group_size: int,
    seeds: Sequence[int],
    *,
    ends: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
) -> Sampled:
    """`group_size` completions for each of Q prompts of each of K nodes, siblings side by side."""
    device = weights["model.norm.weight"].device
    K, Q = len(prompts), len(prompts[0])
    lengths_KQ = torch.tensor([[len(ids) for ids in node] for node in prompts])
    longest = int(lengths_KQ.max())
    prompts_KQT = torch.zeros(K, Q, longest, dtype=torch.long)
    for k, node in enumerate(prompts):
        for q, ids in enumerate(node):
            prompts_KQT[k, q, : len(ids)] = torch.tensor(ids)
    uniform_KSC = torch.stack(
        [torch.rand(Q * group_size, max_new_tokens, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    ).to(device)
    prompts_KQT, lengths_KQ = prompts_KQT.to(device), lengths_KQ.to(device)

    cache = Cache()
    positions = torch.arange(longest, device=device).expand(K, Q, longest)
    hidden = forward(shape, weights, prompts_KQT, positions, cache)
    last = (lengths_KQ - 1)[..., None, None].expand(K, Q, 1, shape.width)
    scores_KSV = logits(shape, weights, hidden.gather(2, last)[:, :, 0]).repeat_interleave(group_size, 1)
    total = longest + max_new_tokens
    for layer in range(shape.layers):
        for tensors in (cache.keys, cache.values):
            room = tensors[layer].new_zeros(K * Q, shape.kv_heads, max_new_tokens, shape.head_width)
            tensors[layer] = torch.cat((tensors[layer], room), 2).repeat_interleave(group_size, 0)

    S = Q * group_size
    ids_KSC = torch.zeros(K, S, max_new_tokens, dtype=torch.long, device=device)
    logprobs_KSC = torch.zeros(K, S, max_new_tokens, device=device)
    done_KS = torch.zeros(K, S, dtype=torch.bool, device=device)
    length_KS = torch.full((K, S), max_new_tokens, device=device)
    position_KS = lengths_KQ.repeat_interleave(group_size, 1)
    slots = torch.arange(total, device=device)
    ends_E = torch.tensor(ends, device=device)
    for c in range(max_new_tokens):
        ids_KS, logprob_KS = pick(scores_KSV, uniform_KSC[:, :, c], temperature, top_p)
        ids_KSC[:, :, c], logprobs_KSC[:, :, c] = ids_KS, logprob_KS
        ending_KS = torch.isin(ids_KS, ends_E) & ~done_KS
        length_KS[ending_KS] = c + 1
        done_KS |= ending_KS
        if c + 1 == max_new_tokens or bool(done_KS.all()):
            break
        mask = (slots <= position_KS.reshape(K * S, 1))[:, None, None]
        hidden = forward(shape, weights, ids_KS[..., None], position_KS[..., None], cache, mask)
        scores_KSV = logits(shape, weights, hidden[:, :, 0])
        position_KS = position_KS + 1
    return Sampled(ids_KSC, logprobs_KSC, length_KS, done_KS)
