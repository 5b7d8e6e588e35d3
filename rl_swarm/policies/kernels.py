"""The decode step of the stacked decoder in seven kernels a layer, written in Triton: norm, linear, attention, choice.

A step reads every weight once for a handful of rows, so it is as quick as memory allows or as slow as its gaps. What
follows a product (bias, activation, the residual stream) is done before the product leaves the chip. And no row's
result depends on which other rows are there: products are summed in an order fixed by the shapes of the weights, and
attention by a sequence's own positions. So a node's tokens do not change with the company it keeps, bit for bit.

Products are summed in float32, and rounded once.

Shape letters: K nodes, M rows (sequences that still run), S sequences, Q questions, D width, N outputs, H heads,
G key-value heads, E head width, P prompt positions, C completion positions, V vocabulary, B blocks of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# How much of the vocabulary one program of the choice looks at.
VOCABULARY_BLOCK = 1024
# Positions of the cache that attention looks at in one go, and warps for it: with a key-value head for every head, and
# with one for several.
POSITIONS, WARPS = (32, 64), (1, 4)

# Programs that keep a large GPU's memory busy, and the shared memory each may take so that two run side by side.
BUSY, SHARED_MEMORY = 256, 100_000
# End tokens a model may have.
MOST_ENDS = 64

NO_ACTIVATION, GELU, GATED_SILU = 0, 1, 2


@triton.jit
def _gelu(x):
    # The approximation by tanh, written with exp, which every version of Triton has.
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-2.0 * inner))


@triton.jit
def _linear(
    x_KMD, w_KND, bias_KN, onto_KMN, out_KMN,
    M, N, D: tl.constexpr,
    x_node, x_row, w_node, w_row, bias_node, onto_node, onto_row, out_node, out_row,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    BIASED: tl.constexpr, ONTO: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Node and rows last: programs that read the same weights run at about the same time.
    tile, rows, k = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    m = (rows * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    n = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    d = tl.arange(0, INPUTS)
    x_at = x_KMD + k * x_node + m[:, None] * x_row + d[None, :]
    w_at = w_KND + k * w_node + n[None, :].to(tl.int64) * w_row + d[:, None]
    there, wanted = m[:, None] < M, n[None, :] < N
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    if ACTIVATION == 2:
        sums_up = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, D, INPUTS):
        inside = start + d < D
        x = tl.load(x_at + start, mask=there & inside[None, :], other=0.0)
        w = tl.load(w_at + start, mask=wanted & inside[:, None], other=0.0)
        sums = tl.dot(x, w, sums, input_precision=PRECISION)
        if ACTIVATION == 2:
            up = tl.load(w_at + start + N * w_row, mask=wanted & inside[:, None], other=0.0)
            sums_up = tl.dot(x, up, sums_up, input_precision=PRECISION)
    if BIASED:
        sums += tl.load(bias_KN + k * bias_node + n, mask=n < N, other=0.0)[None, :].to(tl.float32)
        if ACTIVATION == 2:
            sums_up += tl.load(bias_KN + k * bias_node + N + n, mask=n < N, other=0.0)[None, :].to(tl.float32)
    if ACTIVATION == 1:
        sums = _gelu(sums)
    if ACTIVATION == 2:
        sums = sums / (1.0 + tl.exp(-sums)) * sums_up
    if ONTO:
        at = onto_KMN + k * onto_node + m[:, None] * onto_row + n[None, :]
        sums += tl.load(at, mask=there & wanted, other=0.0).to(tl.float32)
    at = out_KMN + k * out_node + m[:, None].to(tl.int64) * out_row + n[None, :]
    tl.store(at, sums.to(out_KMN.dtype.element_ty), mask=there & wanted)


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is cut up."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


def tiles_for(nodes: int, rows: int, outputs: int, inputs: int, item: int, matrices: int) -> Tiles:
    """Tiles that give every part of a large GPU something to read, measured on an H200.

    The block of inputs, which decides in what order a sum is made, follows from the weights alone.
    """
    block = 128 if inputs >= 1536 or outputs >= 8192 else 64 if inputs > 32 else max(16, triton.next_power_of_2(inputs))
    tall = 16 if rows <= 16 else 32 if rows <= 32 else 64
    wide = 64
    while wide > 16 and nodes * triton.cdiv(outputs, wide) < BUSY:
        wide //= 2
    stages = 4
    while stages > 1 and stages * block * (tall + matrices * wide) * item > SHARED_MEMORY:
        stages -= 1
    return Tiles(tall, wide, block, 2 if wide == 16 else 4, stages)


def linear(
    x_KMD: Tensor,
    weight_KND: Tensor,
    bias_KN: Tensor | None = None,
    *,
    onto: Tensor | None = None,
    activation: int = NO_ACTIVATION,
    out_dtype: torch.dtype | None = None,
    rows: int = 0,
    tiles: Tiles | None = None,
) -> Tensor:
    """activation(x W^T + bias) + onto, (K, M, N). Gated: W holds the gate's rows and then as many others.

    `rows`: how many there may be at another time, when the same row must come out the same.
    """
    K, M, D = x_KMD.shape
    N = weight_KND.shape[1] // (2 if activation == GATED_SILU else 1)
    out_KMN = x_KMD.new_empty(K, M, N, dtype=out_dtype or x_KMD.dtype)
    matrices = 2 if activation == GATED_SILU else 1
    cut = tiles or tiles_for(K, max(M, rows), N, D, x_KMD.element_size(), matrices)
    bias = weight_KND if bias_KN is None else bias_KN
    residual = out_KMN if onto is None else onto
    _linear[(triton.cdiv(N, cut.outputs), triton.cdiv(M, cut.rows), K)](
        x_KMD, weight_KND, bias, residual, out_KMN, M, N, D,
        x_KMD.stride(0), x_KMD.stride(1), weight_KND.stride(0), weight_KND.stride(1), bias.stride(0),
        residual.stride(0), residual.stride(1), out_KMN.stride(0), out_KMN.stride(1),
        ROWS=cut.rows, OUTPUTS=cut.outputs, INPUTS=cut.inputs,
        BIASED=bias_KN is not None, ONTO=onto is not None, ACTIVATION=activation,
        PRECISION="ieee" if x_KMD.dtype == torch.float32 else "tf32",
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    return out_KMN


@triton.jit
def _norm(
    x_KMD, weight_KD, bias_KD, out_KMD, D, epsilon, x_node, x_row, out_node, out_row,
    WIDTH: tl.constexpr, LAYER: tl.constexpr,
):  # fmt: skip
    m, k = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, WIDTH)
    inside = d < D
    raw = tl.load(x_KMD + k * x_node + m * x_row + d, mask=inside, other=0.0)
    x = raw.to(tl.float32)
    weight = tl.load(weight_KD + k * D + d, mask=inside, other=0.0)
    if LAYER:
        x = tl.where(inside, x - tl.sum(x, 0) / D, 0.0)
        normed = x * tl.rsqrt(tl.sum(x * x, 0) / D + epsilon)
        bias = tl.load(bias_KD + k * D + d, mask=inside, other=0.0)
        out = normed * weight.to(tl.float32) + bias.to(tl.float32)
    else:
        # The weight multiplies in the compute type, as everywhere.
        out = (x * tl.rsqrt(tl.sum(x * x, 0) / D + epsilon)).to(raw.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(out_KMD + k * out_node + m * out_row + d, out.to(raw.dtype), mask=inside)


def norm(x_KMD: Tensor, weight_KD: Tensor, bias_KD: Tensor | None, epsilon: float) -> Tensor:
    """A layer norm where there is a bias, else an RMS norm."""
    K, M, D = x_KMD.shape
    out_KMD = torch.empty_like(x_KMD)
    _norm[(M, K)](
        x_KMD, weight_KD, weight_KD if bias_KD is None else bias_KD, out_KMD, D, epsilon,
        x_KMD.stride(0), x_KMD.stride(1), out_KMD.stride(0), out_KMD.stride(1),
        WIDTH=triton.next_power_of_2(D), LAYER=bias_KD is not None, num_warps=4,
    )  # fmt: skip
    return out_KMD


@triton.jit
def _heads(at, turned_at, there, weight, weight_at, turned_weight_at, cos, sin, E, epsilon, inside,
           ROTARY: tl.constexpr, NORMED: tl.constexpr):  # fmt: skip
    """Some heads' queries or keys, normed and turned; rounded where the plain code rounds. At float32."""
    raw = tl.load(at, mask=there, other=0.0)
    x = raw.to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(x * x, 1) / E + epsilon)[:, None]
        w = tl.load(weight + weight_at, mask=inside, other=0.0).to(tl.float32)[None, :]
        x = ((x * scale).to(raw.dtype).to(tl.float32) * w).to(raw.dtype).to(tl.float32)
    if ROTARY:
        # Each number turns with its partner, half a head away.
        partner = tl.load(turned_at, mask=there, other=0.0).to(tl.float32)
        if NORMED:
            w = tl.load(weight + turned_weight_at, mask=inside, other=0.0).to(tl.float32)[None, :]
            partner = ((partner * scale).to(raw.dtype).to(tl.float32) * w).to(raw.dtype).to(tl.float32)
        x = x * cos + partner * sin
    return x.to(raw.dtype)


@triton.jit
def _look(
    keys, values, positions, end, queries, most, total, sums, e, inside, scale, E: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one block of positions into the running softmax."""
    at = positions[:, None] * E + e[None, :]
    there = (positions < end)[:, None] & inside[None, :]
    key = tl.load(keys + at, mask=there, other=0.0)
    value = tl.load(values + at, mask=there, other=0.0)
    scores = tl.dot(queries, tl.trans(key), input_precision=PRECISION) * scale
    scores = tl.where((positions < end)[None, :], scores, float("-inf"))
    higher = tl.maximum(most, tl.max(scores, 1))
    shrink = tl.exp(most - higher)
    parts = tl.exp(scores - higher[:, None])
    total = total * shrink + tl.sum(parts, 1)
    sums = tl.dot(parts.to(value.dtype), value, sums * shrink[:, None], input_precision=PRECISION)
    return higher, total, sums


@triton.jit
def _attend(
    qkv_KMX, q_norm_KE, k_norm_KE, cos_TF, sin_TF,
    prompt_keys, prompt_values, keys, values,
    slots_KM, prompt_lengths_KQ, written_KS, out_KMX,
    M, S, Q, P, C, siblings, scale, epsilon,
    H: tl.constexpr, G: tl.constexpr, E: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, POSITIONS: tl.constexpr,
    ROTARY: tl.constexpr, NORMED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    m, g, k = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots_KM + k * M + m)
    if slot < 0:
        return
    sequence = k * S + slot
    question = k * Q + slot // siblings
    length = tl.load(prompt_lengths_KQ + question)
    written = tl.load(written_KS + sequence)

    each: tl.constexpr = H // G
    half: tl.constexpr = E // 2
    h, e, t = tl.arange(0, HEADS), tl.arange(0, WIDTH), tl.arange(0, POSITIONS)
    inside = e < E
    turned = tl.where(e < half, e + half, e - half)
    cos, sin = 1.0, 0.0
    if ROTARY:
        at = (length + written) * half + tl.where(e < half, e, e - half)
        cos = tl.load(cos_TF + at, mask=inside, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(sin_TF + at, mask=inside, other=0.0).to(tl.float32)
        sin = tl.where(e < half, -sin, sin)[None, :]
    row = qkv_KMX + (k * M + m).to(tl.int64) * (H + 2 * G) * E
    q_row = row + (g * each + h[:, None]) * E
    here = (h[:, None] < each) & inside[None, :]
    queries = _heads(
        q_row + e[None, :], q_row + turned[None, :], here, q_norm_KE, k * E + e, k * E + turned, cos, sin, E, epsilon,
        inside, ROTARY, NORMED,
    )  # fmt: skip
    # One new key and value for this group of heads; a leading axis of one keeps what follows alike for all.
    one = tl.arange(0, 1)[:, None]
    k_row = row + (H + g) * E + one
    key = _heads(
        k_row + e[None, :], k_row + turned[None, :], inside[None, :], k_norm_KE, k * E + e, k * E + turned, cos, sin, E,
        epsilon, inside, ROTARY, NORMED,
    )  # fmt: skip
    value = tl.load(k_row + G * E + e[None, :], mask=inside[None, :], other=0.0)
    own = (sequence.to(tl.int64) * G + g) * C * E
    put = own + (written + one) * E + e[None, :]
    tl.store(keys + put, key, mask=inside[None, :])
    tl.store(values + put, value, mask=inside[None, :])

    # The new position first, from registers: nobody need wait for it to reach the cache.
    most = tl.sum(queries.to(tl.float32) * key.to(tl.float32), 1) * scale
    total = tl.full((HEADS,), 1.0, tl.float32)
    sums = tl.zeros((HEADS, WIDTH), tl.float32) + value.to(tl.float32)
    shared = (question.to(tl.int64) * G + g) * P * E
    for start in range(0, length, POSITIONS):
        most, total, sums = _look(
            prompt_keys + shared, prompt_values + shared, start + t, length, queries, most, total, sums, e, inside,
            scale, E, PRECISION,
        )  # fmt: skip
    for start in range(0, written, POSITIONS):
        most, total, sums = _look(
            keys + own, values + own, start + t, written, queries, most, total, sums, e, inside, scale, E, PRECISION
        )
    out_at = out_KMX + (k * M + m).to(tl.int64) * H * E + (g * each + h[:, None]) * E + e[None, :]
    tl.store(out_at, (sums / total[:, None]).to(queries.dtype), mask=here)


@dataclass(frozen=True, slots=True)
class Stage:
    """What attention must know of sequences beside this step's tokens: buffers that stay where they are."""

    slots_KM: Tensor  # the sequence each row stands for; -1: none
    prompt_lengths_KQ: Tensor
    written_KS: Tensor  # completion positions in the cache
    siblings: int


def attend(
    qkv_KMX: Tensor,
    stage: Stage,
    prompt_cache: Tensor,  # keys and values, (2, K, Q, G, P, E)
    cache: Tensor,  # keys and values, (2, K, S, G, C, E)
    heads: int,
    rotary: tuple[Tensor, Tensor] | None,  # cosines and sines, (positions, E / 2)
    norms: tuple[Tensor, Tensor] | None,  # weights of the norms of queries and keys, (K, E)
    epsilon: float,
) -> Tensor:
    """One new token for every row: into the cache with it, and attention over all before it, (K, M, H*E)."""
    K, M, _ = qkv_KMX.shape
    _, _, S, G, C, E = cache.shape
    Q, P = prompt_cache.shape[2], prompt_cache.shape[4]
    out_KMX = qkv_KMX.new_empty(K, M, heads * E)
    cos, sin = rotary or (qkv_KMX, qkv_KMX)
    q_norm, k_norm = norms or (qkv_KMX, qkv_KMX)
    _attend[(M, G, K)](
        qkv_KMX, q_norm, k_norm, cos, sin, prompt_cache[0], prompt_cache[1], cache[0], cache[1],
        stage.slots_KM, stage.prompt_lengths_KQ, stage.written_KS, out_KMX,
        M, S, Q, P, C, stage.siblings, E**-0.5, epsilon,
        H=heads, G=G, E=E, HEADS=max(16, triton.next_power_of_2(heads // G)),
        WIDTH=max(16, triton.next_power_of_2(E)), POSITIONS=POSITIONS[heads > G],
        ROTARY=rotary is not None, NORMED=norms is not None,
        PRECISION="ieee" if qkv_KMX.dtype == torch.float32 else "tf32", num_warps=WARPS[heads > G],
        num_stages=2,
    )  # fmt: skip
    return out_KMX


@triton.jit
def _embed(
    tokens_KVD, positions_KTD, ids_KS, slots_KM, prompt_lengths_KQ, written_KS, out_KMD,
    M, S, Q, V, T, D, siblings, WIDTH: tl.constexpr, LEARNED: tl.constexpr,
):  # fmt: skip
    m, k = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.maximum(tl.load(slots_KM + k * M + m), 0)
    token = tl.load(ids_KS + k * S + slot)
    d = tl.arange(0, WIDTH)
    x = tl.load(tokens_KVD + (k * V + token) * D + d, mask=d < D, other=0.0)
    if LEARNED:
        position = tl.load(prompt_lengths_KQ + k * Q + slot // siblings) + tl.load(written_KS + k * S + slot)
        # A row that has ended stands one past its last position, which may be the model's last.
        position = tl.minimum(position, T - 1)
        x += tl.load(positions_KTD + (k * T + position) * D + d, mask=d < D, other=0.0)
    tl.store(out_KMD + (k * M + m) * D + d, x, mask=d < D)


def embed(stage: Stage, ids_KS: Tensor, tokens_KVD: Tensor, positions_KTD: Tensor | None) -> Tensor:
    """Rows of the token table, plus those of the table of positions where positions are learned, (K, M, D)."""
    (K, M), (_, V, D) = stage.slots_KM.shape, tokens_KVD.shape
    out_KMD = tokens_KVD.new_empty(K, M, D)
    table = tokens_KVD if positions_KTD is None else positions_KTD
    _embed[(M, K)](
        tokens_KVD, table, ids_KS, stage.slots_KM, stage.prompt_lengths_KQ, stage.written_KS, out_KMD,
        M, ids_KS.shape[1], stage.prompt_lengths_KQ.shape[1], V, table.shape[1], D, stage.siblings,
        WIDTH=triton.next_power_of_2(D), LEARNED=positions_KTD is not None, num_warps=4,
    )  # fmt: skip
    return out_KMD


@triton.jit
def _survey(scores_KMV, most_RB, sum_RB, V, B, sharpness, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = block * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores_KMV + row * V + v, mask=v < V, other=float("-inf")).to(tl.float32) * sharpness
    most = tl.max(score, 0)
    # A block of nothing but -inf would else become NaN.
    total = tl.sum(tl.exp(score - tl.maximum(most, -3.0e38)), 0)
    tl.store(most_RB + row * B + block, most)
    tl.store(sum_RB + row * B + block, total)


@triton.jit
def _choose(
    scores_KMV, most_RB, sum_RB, all_most_RB, all_sum_RB, uniform_KSC, ends_A, slots_KM,
    ids_KS, chosen_KSC, logprobs_KSC, written_KS, done_KS, lengths_KS,
    M, S, Q, C, V, B, siblings, limit, sharpness,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ENDS: tl.constexpr, GREEDY: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    m, k = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_KM + k * M + m)
    if slot < 0:
        return
    sequence = (k * S + slot).to(tl.int64)
    if tl.load(done_KS + sequence) != 0:
        return
    # The first choice is made from the prompt's scores, of which there is one row per question.
    row = (k * Q + slot // siblings if FIRST else k * M + m).to(tl.int64)
    b = tl.arange(0, BLOCKS)
    most_B = tl.load(most_RB + row * B + b, mask=b < B, other=float("-inf"))
    sum_B = tl.load(sum_RB + row * B + b, mask=b < B, other=0.0)
    most = tl.max(most_B, 0)
    weight_B = sum_B * tl.exp(most_B - most)
    total = tl.sum(weight_B, 0)
    at = tl.load(written_KS + sequence) + (0 if FIRST else 1)
    v = tl.arange(0, BLOCK)
    if GREEDY:
        block = tl.min(tl.where(most_B == most, b, B), 0)
        score = tl.load(scores_KMV + row * V + block * BLOCK + v, mask=block * BLOCK + v < V, other=float("-inf"))
        inside = tl.min(tl.where(score.to(tl.float32) * sharpness == most, v, BLOCK - 1), 0)
    else:
        upto_B = tl.cumsum(weight_B, 0)
        threshold = tl.load(uniform_KSC + sequence * C + at) * total
        # A block without weight adds nothing, so `<=` steps over it; the last one guards the last rounding.
        block = tl.minimum(tl.sum((upto_B <= threshold).to(tl.int32), 0), B - 1)
        before = tl.sum(tl.where(b < block, weight_B, 0.0), 0)
        here = block * BLOCK + v
        score = tl.load(scores_KMV + row * V + here, mask=here < V, other=float("-inf")).to(tl.float32) * sharpness
        weight = tl.exp(score - most)
        upto = before + tl.cumsum(weight, 0)
        inside = tl.sum((upto <= threshold).to(tl.int32), 0)
        # Beyond the last token of any weight there is only rounding.
        inside = tl.minimum(inside, tl.max(tl.where(weight > 0, v, 0), 0))
    # Among scores that are no numbers none is the highest; what is chosen must still be a token.
    token = tl.minimum(block * BLOCK + inside, V - 1)
    # The log-prob is that of the full distribution, whatever part of it was left to choose from.
    all_B = tl.load(all_most_RB + row * B + b, mask=b < B, other=float("-inf"))
    all_most = tl.max(all_B, 0)
    all_total = tl.sum(tl.load(all_sum_RB + row * B + b, mask=b < B, other=0.0) * tl.exp(all_B - all_most), 0)
    logprob = tl.load(scores_KMV + row * V + token).to(tl.float32) * sharpness - all_most - tl.log(all_total)
    tl.store(chosen_KSC + sequence * C + at, token.to(tl.int64))
    tl.store(logprobs_KSC + sequence * C + at, logprob)
    tl.store(ids_KS + sequence, token.to(tl.int64))
    tl.store(written_KS + sequence, at)
    ending = tl.sum((tl.load(ends_A + tl.arange(0, ENDS)) == token).to(tl.int32), 0) > 0
    if ending:
        tl.store(done_KS + sequence, 1)
        tl.store(lengths_KS + sequence, at + 1)
    elif at + 1 >= limit:
        tl.store(done_KS + sequence, 2)


@dataclass(frozen=True, slots=True)
class Record:
    """What has been chosen so far, and how to go on: buffers that stay where they are."""

    uniform_KSC: Tensor
    ends_A: Tensor  # MOST_ENDS of them, -1 where there is none
    ids_KS: Tensor  # the newest token of each sequence
    chosen_KSC: Tensor
    logprobs_KSC: Tensor
    done_KS: Tensor  # 0: running, 1: stopped by itself, 2: out of room
    lengths_KS: Tensor
    limit: int  # new tokens at most


def survey(scores_KMV: Tensor, sharpness: float) -> tuple[Tensor, Tensor]:
    """The highest score in every block of the vocabulary, and the sum of the exponentials below it."""
    V = scores_KMV.shape[-1]
    R, B = scores_KMV.numel() // V, triton.cdiv(V, VOCABULARY_BLOCK)
    most_RB, sum_RB = scores_KMV.new_empty(2, R, B, dtype=torch.float32)
    _survey[(R, B)](scores_KMV, most_RB, sum_RB, V, B, sharpness, BLOCK=VOCABULARY_BLOCK, num_warps=4)
    return most_RB, sum_RB


def choose(
    scores_KMV: Tensor,
    kept_KMV: Tensor | None,
    stage: Stage,
    record: Record,
    temperature: float,
    *,
    first: bool = False,
) -> None:
    """Choose each row's next token and write it down; by inverting the cumulative distribution, as `sampling.pick`.

    `kept` are the scores of the tokens to choose among, where that is not all of them.
    """
    sharpness = 1.0 / temperature if temperature else 1.0
    everything = survey(scores_KMV, sharpness)
    kept = everything if kept_KMV is None else survey(kept_KMV, sharpness)
    (K, M), (_, S, C), V = stage.slots_KM.shape, record.uniform_KSC.shape, scores_KMV.shape[-1]
    B = everything[0].shape[1]
    _choose[(M, K)](
        scores_KMV if kept_KMV is None else kept_KMV, *kept, *everything, record.uniform_KSC, record.ends_A,
        stage.slots_KM, record.ids_KS, record.chosen_KSC, record.logprobs_KSC, stage.written_KS, record.done_KS,
        record.lengths_KS, M, S, stage.prompt_lengths_KQ.shape[1], C, V, B, stage.siblings, record.limit,
        sharpness, BLOCK=VOCABULARY_BLOCK, BLOCKS=triton.next_power_of_2(B), ENDS=len(record.ends_A),
        GREEDY=temperature == 0, FIRST=first, num_warps=4,
    )  # fmt: skip
