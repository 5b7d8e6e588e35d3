"""The parts of a training pass that `torch.compile` makes quicker: everything around attention, and the scores.

Compiled is what a layer does before and after attention, with one open dimension, the number of tokens: so one
compilation serves every batch. Attention itself, with its many sizes, would be compiled again for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rl_swarm.policies import decoder
from rl_swarm.policies.decoder import Attend, Block, Split
from rl_swarm.policies.engine import kernels_run_on
from rl_swarm.policies.families.parts import Shape, Weights
from rl_swarm.policies.logprobs import token_logprobs

HeadLogprobs = Callable[[Shape, Weights, Tensor, Tensor, float], tuple[Tensor, Tensor]]

# Below this many trained numbers, of all nodes, a compilation takes longer than it will ever save.
WORTH_COMPILING = 50_000_000
MOST_COMPILATIONS = 64


def is_worth_it(wanted: str, trained: int, device: torch.device) -> bool:
    """Whether COMPILE asks for it on this device: `auto` does for large models on a GPU whose kernels can be built."""
    return wanted == "on" or (wanted == "auto" and trained >= WORTH_COMPILING and kernels_run_on(device))


def compiled_block() -> Block:
    before, after = _compiled(decoder.before_attention), _compiled(decoder.after_attention)

    def block(shape: Shape, weights: Weights, x_KND: Tensor, attend: Attend) -> Tensor:
        attended_KNX = attend(weights, before(shape, weights, _any_length(x_KND)))
        out_KND: Tensor = after(shape, weights, _any_length(x_KND), _any_length(attended_KNX))
        return out_KND

    return block


def compiled_split() -> Split:
    split = _compiled(decoder.split_heads)

    def split_heads(
        shape: Shape, weights: Weights, qkv_KNX: Tensor, turns: decoder.Rotary | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if turns is None and "q_norm.weight" not in weights:
            return decoder.split_heads(shape, weights, qkv_KNX, turns)  # nothing to compute
        if turns is not None:
            turns = (_any_length(turns[0]), _any_length(turns[1]))
        found: tuple[Tensor, Tensor, Tensor] = split(shape, weights, _any_length(qkv_KNX), turns)
        return found

    return split_heads


def compiled_logprobs() -> HeadLogprobs:
    score = _compiled(head_logprobs)

    def logprobs(
        shape: Shape, weights: Weights, x_KND: Tensor, targets_KN: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = score(shape, weights, _any_length(x_KND), _any_length(targets_KN), temperature)
        return found

    return logprobs


def head_logprobs(
    shape: Shape, weights: Weights, x_KND: Tensor, targets_KN: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probs of targets and entropies, (K, N), from hidden states before the last norm."""
    return token_logprobs(decoder.scores(shape, weights, x_KND), targets_KN, temperature)


def _any_length(x: Tensor) -> Tensor:
    """Tell the compiler that the second dimension, tokens, will differ from call to call."""
    torch._dynamo.maybe_mark_dynamic(x, 1)
    return x


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # With and without gradients, for a reference, for the first chunk and the last, on every GPU: each but once.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_COMPILATIONS)
    return torch.compile(function, fullgraph=True)
