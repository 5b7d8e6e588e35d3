"""The decoder, every weight with a leading node axis: K models of one shape run as one program.

One forward pass for every family, over weights in the layout of `layout`; with K=1 it is one model. The pass knows
tokens only, N of them for each node in any order; how they make up sequences, and so what each may look at, is the
business of an attention, of which there are three: whole sequences, completions that share their prompt (training),
and one more token for sequences with a cache (sampling).

Shape letters: K nodes, Q questions, R completions of a question, S sequences (Q * R of them), T positions, P prompt
positions, C completion positions, N tokens, D width, H heads, G key-value heads, E head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rl_swarm.policies.families.parts import Shape, Weights
from rl_swarm.policies.layout import of_layer

# A layer's weights and its (K, N, H*E + 2*G*E) queries, keys and values; gives (K, N, H*E).
Attend = Callable[[Weights, Tensor], Tensor]
Block = Callable[[Shape, Weights, Tensor, Attend], Tensor]


def linear(weights: Weights, name: str, x_KND: Tensor) -> Tensor:
    weight_KXD, bias_KX = weights[name + ".weight"], weights.get(name + ".bias")
    if bias_KX is None or torch.compiler.is_compiling():
        y_KNX: Tensor = _Product.apply(x_KND, weight_KXD)  # type: ignore[no-untyped-call]
        # To be added by whatever comes next; within the product it would first be written out for every token.
        return y_KNX if bias_KX is None else y_KNX + bias_KX[:, None]
    # Adding the bias within the product rounds once in bfloat16, as transformers does.
    return torch.baddbmm(bias_KX[:, None], x_KND, weight_KXD.transpose(1, 2))


class _Product(torch.autograd.Function):
    """x W^T, whose gradient lies as W does: torch's own would lie the other way round and have to be copied."""

    @staticmethod
    def forward(ctx: Any, x_KND: Tensor, weight_KXD: Tensor) -> Tensor:
        ctx.save_for_backward(x_KND, weight_KXD)
        return torch.bmm(x_KND, weight_KXD.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, gradient_KNX: Tensor) -> Any:
        x_KND, weight_KXD = ctx.saved_tensors
        return torch.bmm(gradient_KNX, weight_KXD), torch.bmm(gradient_KNX.transpose(1, 2), x_KND)


def look_up(table_KVD: Tensor, ids_KN: Tensor) -> Tensor:
    """Each node's rows from its own table, (K, N, D)."""
    K, V, D = table_KVD.shape
    nodes = torch.arange(K, device=ids_KN.device)[:, None]
    if not table_KVD.requires_grad:  # may be one table seen K times, which must not be copied out
        return table_KVD[nodes, ids_KN]
    return F.embedding(ids_KN + nodes * V, table_KVD.reshape(K * V, D))


def norm(weights: Weights, name: str, x_KND: Tensor, epsilon: float) -> Tensor:
    """A layer norm where there is a bias, else an RMS norm; both rounded as in transformers."""
    weight_KD, bias_KD = weights[name + ".weight"], weights.get(name + ".bias")
    if bias_KD is None:
        return _rms_norm(x_KND, weight_KD[:, None], epsilon)
    # All of it in float32 and rounded once, as torch's own layer norm does, which knows no node axis.
    normed = F.layer_norm(x_KND.float(), x_KND.shape[-1:], eps=epsilon)
    return (normed * weight_KD[:, None].float() + bias_KD[:, None].float()).to(x_KND.dtype)


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    # In float32 up to the weight, which multiplies in the compute type.
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (x.float() * scale).to(x.dtype) * weight


def embed(weights: Weights, ids_KN: Tensor, positions_KN: Tensor) -> Tensor:
    x_KND = look_up(weights["embed"], ids_KN)
    if "positions" not in weights:
        return x_KND
    # Padding may stand beyond the last position; what is read for it does not matter.
    table_KTD = weights["positions"]
    return x_KND + look_up(table_KTD, positions_KN.clamp(max=table_KTD.shape[1] - 1))


def block(shape: Shape, weights: Weights, x_KND: Tensor, attend: Attend) -> Tensor:
    """One layer: attention and feed-forward, each added to the stream."""
    return after_attention(shape, weights, x_KND, attend(weights, before_attention(shape, weights, x_KND)))


def before_attention(shape: Shape, weights: Weights, x_KND: Tensor) -> Tensor:
    return linear(weights, "qkv", norm(weights, "norm1", x_KND, shape.norm_epsilon))


def after_attention(shape: Shape, weights: Weights, x_KND: Tensor, attended_KNX: Tensor) -> Tensor:
    x_KND = x_KND + linear(weights, "out", attended_KNX)
    inner = linear(weights, "up", norm(weights, "norm2", x_KND, shape.norm_epsilon))
    if shape.gated:
        gate, up = inner.chunk(2, -1)
        inner = F.silu(gate) * up
    else:
        inner = F.gelu(inner, approximate="tanh")
    return x_KND + linear(weights, "down", inner)


def run(
    shape: Shape,
    weights: Weights,
    ids_KN: Tensor,
    positions_KN: Tensor,
    attention: Callable[[int], Attend],
    *,
    checkpointed: bool = False,
    block: Block = block,
) -> Tensor:
    """Hidden states before the last norm, (K, N, D)."""
    x_KND = embed(weights, ids_KN, positions_KN)
    for layer in range(shape.layers):
        arguments = (shape, of_layer(weights, layer), x_KND, attention(layer))
        x_KND = checkpoint(block, *arguments, use_reentrant=False) if checkpointed else block(*arguments)
    return x_KND


def scores(shape: Shape, weights: Weights, x_KND: Tensor) -> Tensor:
    """Scores over the vocabulary, (K, N, V), of hidden states before the last norm."""
    hidden_KND = norm(weights, "last", x_KND, shape.norm_epsilon)
    table = weights["embed" if shape.tied else "head"]
    # Tables may be longer than the vocabulary; the product is quick because they are.
    found: Tensor = _Product.apply(hidden_KND, table)  # type: ignore[no-untyped-call]
    return found[..., : shape.vocabulary]


def forward(
    shape: Shape, weights: Weights, ids_KST: Tensor, positions_KST: Tensor, *, checkpointed: bool = False
) -> Tensor:
    """Scores over the vocabulary at every position of whole sequences, (K, S, T, V)."""
    K, S, T = ids_KST.shape
    attend = Whole(shape, S, rotary(shape, weights, positions_KST.reshape(K, S * T)))
    x_KND = run(
        shape,
        weights,
        ids_KST.reshape(K, S * T),
        positions_KST.reshape(K, S * T),
        lambda layer: attend,
        checkpointed=checkpointed,
    )
    return scores(shape, weights, x_KND).view(K, S, T, -1)


# Attention

Rotary = tuple[Tensor, Tensor]


def rotary(shape: Shape, weights: Weights, positions_KN: Tensor) -> Rotary | None:
    """Cosines and sines of each token's position, (K, N, 1, E), worked out in float32."""
    if shape.rotary_base is None:
        return None
    exponents = torch.arange(0, shape.head_width, 2, device=positions_KN.device, dtype=torch.float32) / shape.head_width
    # Rounded as in transformers: dividing by base**exponents is as exact, but drifts from it by 1e-3 in 3,000 tokens.
    angles = positions_KN[..., None, None].float() * (1.0 / shape.rotary_base**exponents)
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(weights["embed"].dtype), angles.sin().to(weights["embed"].dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def split_heads(shape: Shape, weights: Weights, qkv_KNX: Tensor, turns: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (K, N, H, E), keys and values (K, N, G, E), normed and turned where the model does so."""
    heads = qkv_KNX.view(*qkv_KNX.shape[:2], -1, shape.head_width)
    queries, keys, values = torch.split(heads, [shape.heads, shape.kv_heads, shape.kv_heads], 2)
    if "q_norm.weight" in weights:
        queries = _rms_norm(queries, weights["q_norm.weight"][:, None, None], shape.norm_epsilon)
        keys = _rms_norm(keys, weights["k_norm.weight"][:, None, None], shape.norm_epsilon)
    if turns is not None:
        queries, keys = _rotate(queries, *turns), _rotate(keys, *turns)
    return queries, keys, values


Split = Callable[[Shape, Weights, Tensor, Rotary | None], tuple[Tensor, Tensor, Tensor]]


def _by_head(x_KNHE: Tensor, sequences: int) -> Tensor:
    """(K * sequences, H, T, E): sequences of all nodes side by side."""
    K, N, H, E = x_KNHE.shape
    return x_KNHE.reshape(K * sequences, N // sequences, H, E).transpose(1, 2)


def attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Causal without a mask; (sequences, T, H*E)."""
    shared = queries.shape[1] // keys.shape[1]
    if shared > 1:
        keys, values = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=mask is None)
    return out.transpose(1, 2).flatten(2)


@dataclass(frozen=True, slots=True)
class Whole:
    """Sequences from their first token on, padded on the right: causality alone keeps padding out of what is real."""

    shape: Shape
    sequences: int
    turns: Rotary | None
    # Where to put keys and values of each layer, (K * S, G, T, E), in order.
    kept: list[tuple[Tensor, Tensor]] | None = None

    def __call__(self, weights: Weights, qkv_KNX: Tensor) -> Tensor:
        parts = split_heads(self.shape, weights, qkv_KNX, self.turns)
        queries, keys, values = (_by_head(part, self.sequences) for part in parts)
        if self.kept is not None:
            self.kept.append((keys, values))
        return attention(queries, keys, values).reshape(*qkv_KNX.shape[:2], -1)


@dataclass(frozen=True, slots=True)
class Grouped:
    """Prompts and, behind all of them, R completions of each: a prompt is passed once, not once per completion.

    A completion looks at its prompt and at itself; `mask` (K * S, 1, C, P + C) is added to the scores and keeps it from
    its prompt's padding and its own future.
    """

    shape: Shape
    turns: Rotary | None
    prompts_KQP: Tensor  # only their shape counts
    mask: Tensor
    split: Split = split_heads

    def __call__(self, weights: Weights, qkv_KNX: Tensor) -> Tensor:
        K, Q, P = self.prompts_KQP.shape
        S, C = self.mask.shape[0] // K, self.mask.shape[2]
        parts = self.split(self.shape, weights, qkv_KNX, self.turns)
        prompt = [_by_head(part[:, : Q * P], Q) for part in parts]
        queries, keys, values = (_by_head(part[:, Q * P :], S) for part in parts)

        def before(shared: Tensor, own: Tensor) -> Tensor:
            _, G, _, E = shared.shape
            each = shared[:, None].expand(K * Q, S // Q, G, P, E).reshape(K * S, G, P, E)
            return torch.cat((each, own), 2)

        looked = attention(queries, before(prompt[1], keys), before(prompt[2], values), self.mask)
        return torch.cat((attention(*prompt).view(K, Q * P, -1), looked.view(K, S * C, -1)), 1)


def grouped_mask(lengths_KQ: Tensor, prompt: int, siblings: int, completion: int, dtype: torch.dtype) -> Tensor:
    """The mask of `Grouped`: zero where a completion may look, (K * S, 1, C, P + C)."""
    device = lengths_KQ.device
    seen = torch.arange(prompt, device=device) < lengths_KQ.reshape(-1, 1, 1)
    seen = seen.repeat_interleave(siblings, 0).expand(-1, completion, -1)
    earlier = torch.ones(completion, completion, dtype=torch.bool, device=device).tril()
    allowed = torch.cat((seen, earlier.expand(len(seen), -1, -1)), 2)
    return torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill_(~allowed, -torch.inf)[:, None]


@dataclass(slots=True)
class Cache:
    """Keys and values, in float32: of the prompts once, (K * Q, G, P, E), of completions so far, (K * S, G, C, E)."""

    prompts: list[tuple[Tensor, Tensor]]
    lengths_KQ: Tensor
    completions: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def make_room(self, siblings: int, new_tokens: int) -> None:
        for keys, _ in self.prompts:
            size = (len(keys) * siblings, keys.shape[1], new_tokens, keys.shape[3])
            self.completions.append((keys.new_zeros(size), keys.new_zeros(size)))

    def leave(self, rows: Tensor, siblings: int) -> None:
        """Go on with these of the K * S sequences, each from now on with a prompt of its own."""
        questions = rows // siblings
        self.prompts = [(keys[questions], values[questions]) for keys, values in self.prompts]
        self.completions = [(keys[rows], values[rows]) for keys, values in self.completions]
        K = len(self.lengths_KQ)
        self.lengths_KQ = self.lengths_KQ.reshape(-1)[questions].view(K, -1)


@dataclass(frozen=True, slots=True)
class Step:
    """One more token for each sequence: its keys and values go into the cache, and it looks at all that is there.

    Scores with a prompt's positions are one product for all of its completions.
    """

    shape: Shape
    turns: Rotary | None
    cache: Cache
    written: int  # completion positions already in the cache
    hidden: Tensor  # what is added to scores with a prompt's padding, (K * Q, 1, 1, P)
    layer: int

    def __call__(self, weights: Weights, qkv_KNX: Tensor) -> Tensor:
        K, S, _ = qkv_KNX.shape
        queries, new_keys, new_values = split_heads(self.shape, weights, qkv_KNX, self.turns)
        keys, values = self.cache.completions[self.layer]
        keys[:, :, self.written], values[:, :, self.written] = new_keys.flatten(0, 1), new_values.flatten(0, 1)
        keys, values = keys[:, :, : self.written + 1], values[:, :, : self.written + 1]
        prompt_keys, prompt_values = self.cache.prompts[self.layer]
        (KQ, G, P, E), each = prompt_keys.shape, self.shape.heads // self.shape.kv_heads
        R = K * S // KQ
        own = queries.float().reshape(K * S, G, each, E) * E**-0.5
        # Completions of one question lie side by side, so their queries are the rows of one product.
        asked = own.view(KQ, R, G, each, E).transpose(1, 2).reshape(KQ, G, R * each, E)
        to_prompt = asked @ prompt_keys.transpose(2, 3) + self.hidden
        to_prompt = to_prompt.view(KQ, G, R, each, P).transpose(1, 2).reshape(K * S, G, each, P)
        shares = torch.cat((to_prompt, own @ keys.transpose(2, 3)), 3).softmax(-1)
        on_prompt = shares[..., :P].reshape(KQ, R, G, each, P).transpose(1, 2).reshape(KQ, G, R * each, P)
        found = (on_prompt @ prompt_values).view(KQ, G, R, each, E).transpose(1, 2).reshape(K * S, G, each, E)
        found = found + shares[..., P:] @ values
        return found.reshape(K, S, -1).to(qkv_KNX.dtype)
