"""Attention over shared prompts for a GPU: queries, keys and values brought into place by one kernel each way.

What `decoder.Grouped` does in two dozen copies (split heads, turn them, take prompts and completions apart, put each
prompt's keys before those of all its completions, repeat shared heads) is here one read and one write of every number;
on the way back the gradients of all completions are summed up for the prompt, always in the same order.

Shape letters: K nodes, N tokens (prompts, then completions), Q prompts, P positions of one, S completions, C positions
of one, H heads, G key-value heads, E head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_swarm.policies.decoder import Rotary, attention
from rl_swarm.policies.families.parts import Shape, Weights


@triton.jit
def _turned(at, turned_at, there, cos, sin, ROTARY: tl.constexpr):
    x = tl.load(at, mask=there, other=0.0).to(tl.float32)
    if ROTARY:
        x = x * cos + tl.load(turned_at, mask=there, other=0.0).to(tl.float32) * sin
    return x


@triton.jit
def _turn(cos_KNF, sin_KNF, token, e, E: tl.constexpr, ROTARY: tl.constexpr):
    """Cosine and sine for each number of a head, the sine with its sign: x cos + partner sin turns it."""
    cos, sin = 1.0, 0.0
    if ROTARY:
        half: tl.constexpr = E // 2
        at = token * half + tl.where(e < half, e, e - half)
        cos = tl.load(cos_KNF + at, mask=e < E, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(sin_KNF + at, mask=e < E, other=0.0).to(tl.float32)
        sin = tl.where(e < half, -sin, sin)[None, :]
    return cos, sin


@triton.jit
def _arrange(
    qkv_KNX, cos_KNF, sin_KNF, prompt_q, prompt_k, prompt_v, queries, keys, values, N, Q, P, S, C,
    H: tl.constexpr, G: tl.constexpr, E: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    n, k = tl.program_id(0), tl.program_id(1)
    token = k.to(tl.int64) * N + n
    h, e = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)
    half: tl.constexpr = E // 2
    turned = tl.where(e < half, e + half, e - half)[None, :]
    cos, sin = _turn(cos_KNF, sin_KNF, token, e, E, ROTARY)
    e = e[None, :]
    there = (h < H) & (e < E)
    row = qkv_KNX + token * (H + 2 * G) * E
    like = qkv_KNX.dtype.element_ty
    query = _turned(row + h * E + e, row + h * E + turned, there, cos, sin, ROTARY).to(like)
    shared = row + (H + h // (H // G)) * E
    key = _turned(shared + e, shared + turned, there, cos, sin, ROTARY).to(like)
    value = tl.load(shared + G * E + e, mask=there, other=0.0)
    spread = h * E + e
    if n < Q * P:
        at = (k.to(tl.int64) * Q * P + n) * H * E + spread
        tl.store(prompt_q + at, query, mask=there)
        tl.store(prompt_k + at, key, mask=there)
        tl.store(prompt_v + at, value, mask=there)
        first = k.to(tl.int64) * S + (n // P) * (S // Q)
        for sibling in range(S // Q):
            at = ((first + sibling) * (P + C) + n % P) * H * E + spread
            tl.store(keys + at, key, mask=there)
            tl.store(values + at, value, mask=there)
    else:
        own = n - Q * P
        sequence = k.to(tl.int64) * S + own // C
        tl.store(queries + (sequence * C + own % C) * H * E + spread, query, mask=there)
        at = (sequence * (P + C) + P + own % C) * H * E + spread
        tl.store(keys + at, key, mask=there)
        tl.store(values + at, value, mask=there)


@triton.jit
def _arrange_back(
    d_qkv_KNX, cos_KNF, sin_KNF, prompt_q, prompt_k, prompt_v, queries, keys, values, N, Q, P, S, C,
    H: tl.constexpr, G: tl.constexpr, E: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
):  # fmt: skip
    n, k = tl.program_id(0), tl.program_id(1)
    token = k.to(tl.int64) * N + n
    h, g, e = tl.arange(0, HEADS)[:, None], tl.arange(0, GROUPS)[:, None], tl.arange(0, WIDTH)
    half: tl.constexpr = E // 2
    each: tl.constexpr = H // G
    turned = tl.where(e < half, e + half, e - half)[None, :]
    cos, sin = _turn(cos_KNF, sin_KNF, token, e, E, ROTARY)
    sin = -sin
    e = e[None, :]
    all_heads, all_groups = (h < H) & (e < E), (g < G) & (e < E)
    d_key = tl.zeros((GROUPS, WIDTH), tl.float32)
    d_value = tl.zeros((GROUPS, WIDTH), tl.float32)
    if n < Q * P:
        at = (k.to(tl.int64) * Q * P + n) * H * E
        d_query = _turned(prompt_q + at + h * E + e, prompt_q + at + h * E + turned, all_heads, cos, sin, ROTARY)
        for head in range(each):
            here = at + (g * each + head) * E
            d_key += _turned(prompt_k + here + e, prompt_k + here + turned, all_groups, cos, sin, ROTARY)
            d_value += tl.load(prompt_v + here + e, mask=all_groups, other=0.0).to(tl.float32)
        first = k.to(tl.int64) * S + (n // P) * (S // Q)
        for sibling in range(S // Q):
            at = ((first + sibling) * (P + C) + n % P) * H * E
            for head in range(each):
                here = at + (g * each + head) * E
                d_key += _turned(keys + here + e, keys + here + turned, all_groups, cos, sin, ROTARY)
                d_value += tl.load(values + here + e, mask=all_groups, other=0.0).to(tl.float32)
    else:
        own = n - Q * P
        sequence = k.to(tl.int64) * S + own // C
        at = (sequence * C + own % C) * H * E
        d_query = _turned(queries + at + h * E + e, queries + at + h * E + turned, all_heads, cos, sin, ROTARY)
        at = (sequence * (P + C) + P + own % C) * H * E
        for head in range(each):
            here = at + (g * each + head) * E
            d_key += _turned(keys + here + e, keys + here + turned, all_groups, cos, sin, ROTARY)
            d_value += tl.load(values + here + e, mask=all_groups, other=0.0).to(tl.float32)
    row = d_qkv_KNX + token * (H + 2 * G) * E
    like = d_qkv_KNX.dtype.element_ty
    tl.store(row + h * E + e, d_query.to(like), mask=all_heads)
    tl.store(row + (H + g) * E + e, d_key.to(like), mask=all_groups)
    tl.store(row + (H + G + g) * E + e, d_value.to(like), mask=all_groups)


class _Arrange(torch.autograd.Function):
    """Queries, keys and values of prompts, (K*Q, P, H, E), and of completions, (K*S, C or P + C, H, E)."""

    @staticmethod
    def forward(ctx: Any, qkv_KNX: Tensor, turns: Rotary | None, shape: Shape, Q: int, P: int, S: int, C: int) -> Any:
        K, N, _ = qkv_KNX.shape
        H, E = shape.heads, shape.head_width
        prompt = [qkv_KNX.new_empty(K * Q, P, H, E) for _ in range(3)]
        completion = [qkv_KNX.new_empty(K * S, length, H, E) for length in (C, P + C, P + C)]
        cos, sin = turns or (qkv_KNX, qkv_KNX)
        _arrange[(N, K)](
            qkv_KNX, cos, sin, *prompt, *completion, N, Q, P, S, C, H=H, G=shape.kv_heads, E=E,
            HEADS=triton.next_power_of_2(H), WIDTH=triton.next_power_of_2(E), ROTARY=turns is not None, num_warps=4,
        )  # fmt: skip
        ctx.turns, ctx.shape, ctx.sizes = turns, shape, (Q, P, S, C)
        return (*prompt, *completion)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (Q, P, S, C), shape = ctx.sizes, ctx.shape
        K, N = len(gradients[0]) // Q, Q * P + S * C
        H, G, E = shape.heads, shape.kv_heads, shape.head_width
        d_qkv_KNX = gradients[0].new_empty(K, N, (H + 2 * G) * E)
        cos, sin = ctx.turns or (d_qkv_KNX, d_qkv_KNX)
        _arrange_back[(N, K)](
            d_qkv_KNX, cos, sin, *(gradient.contiguous() for gradient in gradients), N, Q, P, S, C, H=H, G=G, E=E,
            HEADS=triton.next_power_of_2(H), GROUPS=triton.next_power_of_2(G), WIDTH=triton.next_power_of_2(E),
            ROTARY=ctx.turns is not None, num_warps=4,
        )  # fmt: skip
        return d_qkv_KNX, None, None, None, None, None, None


@dataclass(frozen=True, slots=True)
class Arranged:
    """As `decoder.Grouped`, for models that do not norm queries and keys."""

    shape: Shape
    turns: Rotary | None  # cosines and sines, (K, N, E / 2)
    prompts_KQP: Tensor
    mask: Tensor

    def __call__(self, weights: Weights, qkv_KNX: Tensor) -> Tensor:
        K, Q, P = self.prompts_KQP.shape
        S, C = self.mask.shape[0] // K, self.mask.shape[2]
        parts = _Arrange.apply(qkv_KNX, self.turns, self.shape, Q, P, S, C)  # type: ignore[no-untyped-call]
        q, k, v, queries, keys, values = (part.transpose(1, 2) for part in parts)
        looked = attention(q, k, v), attention(queries, keys, values, self.mask)
        return torch.cat([one.reshape(K, -1, self.shape.heads * self.shape.head_width) for one in looked], 1)


def arranged(shape: Shape, turns: Rotary | None, prompts_KQP: Tensor, mask: Tensor) -> Arranged:
    """`turns` as `decoder.rotary` gives them, each number twice."""
    half = shape.head_width // 2
    once = None if turns is None else (turns[0][:, :, 0, :half].contiguous(), turns[1][:, :, 0, :half].contiguous())
    return Arranged(shape, once, prompts_KQP, mask)
