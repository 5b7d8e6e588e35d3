"""The decoder, every weight with a leading node axis: K models of one shape run as one program.

Llama-shaped models (the embedded pico, SmolLM2, Qwen2). Weights are a plain dictionary under the names of an ordinary
Hugging Face folder, each stacked over nodes, so loading and saving are a slice and a copy. With K=1 it is one model.

Shape letters: K nodes, S sequences, T positions, N = S*T, D width, H heads, G key-value heads, E head width, V tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rl_swarm.errors import ModelError

Weights = dict[str, Tensor]

SUPPORTED_FAMILIES = ("llama", "qwen2")


@dataclass(frozen=True, slots=True)
class Shape:
    """What the forward pass must know about a model beside its weights."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    norm_epsilon: float
    rotary_base: float
    context: int
    qkv_bias: bool
    tied: bool


@dataclass(slots=True)
class Cache:
    """Keys and values of every layer, (K*S, G, T, E). An empty one is filled by the forward pass over the prompts."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


def read_shape(folder: Path) -> Shape:
    """The shape of the model in a Hugging Face folder, refusing what this forward pass would compute wrongly."""
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"{folder} is not a model folder: it has no config.json.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from None
    family = config.get("model_type")
    if family not in SUPPORTED_FAMILIES:
        raise ModelError(f"{folder} holds a {family!r} model; this version runs {', '.join(SUPPORTED_FAMILIES)}.")
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    unlike = {
        "scaled rotary positions": rotary.get("rope_type", rotary.get("type", "default")) != "default",
        "partly rotary positions": (rotary.get("partial_rotary_factor") or config.get("partial_rotary_factor", 1)) != 1,
        "a sliding window": bool(config.get("use_sliding_window")),
        "another activation than silu": config.get("hidden_act", "silu") != "silu",
        "biases in its feed-forward layers": bool(config.get("mlp_bias")),
        "biases in all of its attention": family == "llama" and bool(config.get("attention_bias")),
    }
    for what, found in unlike.items():
        if found:
            raise ModelError(f"{folder} has {what}, which this version does not run.")
    try:
        heads = int(config["num_attention_heads"])
        return Shape(
            vocabulary=int(config["vocab_size"]),
            width=int(config["hidden_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_width=int(config.get("head_dim") or config["hidden_size"] // heads),
            norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
            rotary_base=float(rotary.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            context=int(config["max_position_embeddings"]),
            qkv_bias=family == "qwen2",
            tied=bool(config.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise ModelError(f"{path} lacks {error}.") from None


def weight_shapes(shape: Shape, ffn: int) -> dict[str, tuple[int, ...]]:
    """Every weight of the model, in the order in which they are drawn and saved."""
    width, queries, pairs = shape.width, shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, width)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q_proj", queries), ("k_proj", pairs), ("v_proj", pairs)):
            shapes[f"{prefix}self_attn.{name}.weight"] = (rows, width)
            if shape.qkv_bias:
                shapes[f"{prefix}self_attn.{name}.bias"] = (rows,)
        shapes[prefix + "self_attn.o_proj.weight"] = (width, queries)
        shapes[prefix + "mlp.gate_proj.weight"] = (ffn, width)
        shapes[prefix + "mlp.up_proj.weight"] = (ffn, width)
        shapes[prefix + "mlp.down_proj.weight"] = (width, ffn)
        shapes[prefix + "input_layernorm.weight"] = (width,)
        shapes[prefix + "post_attention_layernorm.weight"] = (width,)
    shapes["model.norm.weight"] = (width,)
    if not shape.tied:
        shapes["lm_head.weight"] = (shape.vocabulary, width)
    return shapes


def read_weights(folder: Path, shape: Shape) -> Weights:
    """One model's weights in float32, without a node axis."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no weights: no .safetensors file in it.")
    weights: Weights = {}
    for path in files:
        try:
            weights |= load_file(path)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read: {error}.") from None
    gate = weights.get("model.layers.0.mlp.gate_proj.weight")
    expected = weight_shapes(shape, 0 if gate is None else gate.shape[0])
    for name, size in expected.items():
        if name not in weights:
            raise ModelError(f"{folder} lacks the weight {name}.")
        if tuple(weights[name].shape) != size:
            raise ModelError(f"{folder}: {name} has shape {tuple(weights[name].shape)}, config.json implies {size}.")
    return {name: weights[name].float() for name in expected}


def stack(weights: Weights, copies: int) -> Weights:
    """The same model for every node; from here on they go their own ways."""
    return {name: weight.unsqueeze(0).repeat(copies, *(1,) * weight.dim()) for name, weight in weights.items()}


def linear(weights: Weights, name: str, x_KND: Tensor) -> Tensor:
    out = torch.bmm(x_KND, weights[name + ".weight"].transpose(1, 2))
    bias = weights.get(name + ".bias")
    return out if bias is None else out + bias[:, None]


def _norm(x_KND: Tensor, weight_KD: Tensor, epsilon: float) -> Tensor:
    scale = torch.rsqrt(x_KND.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (x_KND.float() * scale).to(x_KND.dtype) * weight_KD[:, None]


def rotary_table(shape: Shape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines by position, (T, E)."""
    exponents = torch.arange(0, shape.head_width, 2, device=device, dtype=torch.float32) / shape.head_width
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] / shape.rotary_base**exponents
    return torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def forward(
    shape: Shape,
    weights: Weights,
    ids_KST: Tensor,
    positions_KST: Tensor,
    cache: Cache | None = None,
    mask: Tensor | None = None,
    checkpointed: bool = False,
) -> Tensor:
    """Hidden states after the last norm, (K, S, T, D).

    Sequences are padded on the right, so causal attention alone keeps padding out of every real position.
    An empty cache collects the keys and values of this pass. With a filled one T is 1: keys and values go to each
    sequence's own slot `positions_KST`, and attention runs over the cache under `mask`.
    """
    K, S, T = ids_KST.shape
    nodes = torch.arange(K, device=ids_KST.device)[:, None]
    embedding = weights["model.embed_tokens.weight"]
    x = embedding[nodes, ids_KST.reshape(K, S * T)]
    length = cache.keys[0].shape[2] if cache is not None and cache.keys else T
    cos, sin = rotary_table(shape, length, ids_KST.device)
    rows = positions_KST.reshape(K * S, T)
    cos, sin = (table.to(x.dtype)[rows][:, None] for table in (cos, sin))

    def block(x: Tensor, layer: int) -> Tensor:
        x = x + _attention(shape, weights, layer, x, (K, S, T), cos, sin, rows, cache, mask)
        prefix = f"model.layers.{layer}."
        y = _norm(x, weights[prefix + "post_attention_layernorm.weight"], shape.norm_epsilon)
        gate = F.silu(linear(weights, prefix + "mlp.gate_proj", y))
        return x + linear(weights, prefix + "mlp.down_proj", gate * linear(weights, prefix + "mlp.up_proj", y))

    for layer in range(shape.layers):
        x = checkpoint(block, x, layer, use_reentrant=False) if checkpointed else block(x, layer)
    return _norm(x, weights["model.norm.weight"], shape.norm_epsilon).view(K, S, T, shape.width)


def _attention(
    shape: Shape,
    weights: Weights,
    layer: int,
    x_KND: Tensor,
    sizes: tuple[int, int, int],
    cos: Tensor,
    sin: Tensor,
    rows: Tensor,
    cache: Cache | None,
    mask: Tensor | None,
) -> Tensor:
    K, S, T = sizes
    prefix = f"model.layers.{layer}."
    y = _norm(x_KND, weights[prefix + "input_layernorm.weight"], shape.norm_epsilon)

    def heads(name: str, count: int) -> Tensor:
        out = linear(weights, f"{prefix}self_attn.{name}", y)
        return out.view(K * S, T, count, shape.head_width).transpose(1, 2)

    queries = _rotate(heads("q_proj", shape.heads), cos, sin)
    keys = _rotate(heads("k_proj", shape.kv_heads), cos, sin)
    values = heads("v_proj", shape.kv_heads)
    if cache is not None and mask is not None:
        slots = torch.arange(K * S, device=rows.device)
        cache.keys[layer][slots, :, rows[:, 0]] = keys[:, :, 0]
        cache.values[layer][slots, :, rows[:, 0]] = values[:, :, 0]
        keys, values = cache.keys[layer], cache.values[layer]
    elif cache is not None:
        cache.keys.append(keys)
        cache.values.append(values)
    if shape.kv_heads != shape.heads:
        groups = shape.heads // shape.kv_heads
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=mask is None and T > 1)
    return linear(weights, prefix + "self_attn.o_proj", out.transpose(1, 2).reshape(K, S * T, -1))


def logits(shape: Shape, weights: Weights, hidden_KND: Tensor) -> Tensor:
    """Scores over the vocabulary, (K, N, V), in float32."""
    return linear(weights, "model.embed_tokens" if shape.tied else "lm_head", hidden_KND).float()
