"""The block of GPT-2: layer norms, learned positions, one fused layer for queries, keys and values, biases everywhere.

Linear layers of a block lie as (in, out) in the folder, the other way round than everyone else's, and stay so here.
Left out: dropout, cross attention, the variants of attention scaling.

Shape letters: K nodes, N tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_swarm.policies.families.parts import Attend, Shape, Weights, look_up

PREFIX = "transformer."
EMBEDDING = "transformer.wte"


def unlike(config: dict[str, Any]) -> dict[str, bool]:
    """What this block would compute wrongly, and whether this model has it."""
    return {
        "attention scaled by layer": bool(config.get("scale_attn_by_inverse_layer_idx")),
        "unscaled attention": not config.get("scale_attn_weights", True),
        "reordered attention": bool(config.get("reorder_and_upcast_attn")),
        "cross attention": bool(config.get("add_cross_attention")),
        "another activation than gelu_new": config.get("activation_function", "gelu_new") != "gelu_new",
    }


def read_shape(config: dict[str, Any]) -> Shape:
    width, heads = int(config["n_embd"]), int(config["n_head"])
    return Shape(
        family="gpt2",
        vocabulary=int(config["vocab_size"]),
        width=width,
        layers=int(config["n_layer"]),
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        ffn=int(config.get("n_inner") or 4 * width),
        norm_epsilon=float(config.get("layer_norm_epsilon", 1e-5)),
        context=int(config["n_positions"]),
        tied=bool(config.get("tie_word_embeddings", True)),
        rotary_base=None,
        biased=("c_attn", "c_proj", "c_fc"),
    )


def weight_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    width = shape.width
    layers = {
        "attn.c_attn": (width, 3 * width),
        "attn.c_proj": (width, width),
        "mlp.c_fc": (width, shape.ffn),
        "mlp.c_proj": (shape.ffn, width),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (shape.vocabulary, width),
        "transformer.wpe.weight": (shape.context, width),
    }
    for layer in range(shape.layers):
        prefix = f"transformer.h.{layer}."
        for name, size in layers.items():
            shapes[f"{prefix}{name}.weight"] = size
            shapes[f"{prefix}{name}.bias"] = size[1:]
        for name in ("ln_1", "ln_2"):
            shapes[f"{prefix}{name}.weight"] = shapes[f"{prefix}{name}.bias"] = (width,)
    shapes["transformer.ln_f.weight"] = shapes["transformer.ln_f.bias"] = (width,)
    return shapes


def embed(weights: Weights, ids_KN: Tensor, positions_KN: Tensor) -> Tensor:
    return look_up(weights["transformer.wte.weight"], ids_KN) + look_up(weights["transformer.wpe.weight"], positions_KN)


def block(shape: Shape, weights: Weights, layer: int, x_KND: Tensor, attend: Attend) -> Tensor:
    prefix = f"transformer.h.{layer}."
    y = _layer_norm(weights, prefix + "ln_1", x_KND, shape.norm_epsilon)
    fused = _linear(weights, prefix + "attn.c_attn", y).view(*y.shape[:2], 3, shape.heads, shape.head_width)
    x_KND = x_KND + _linear(weights, prefix + "attn.c_proj", attend(layer, *fused.unbind(2)))
    y = _layer_norm(weights, prefix + "ln_2", x_KND, shape.norm_epsilon)
    inner = F.gelu(_linear(weights, prefix + "mlp.c_fc", y), approximate="tanh")
    return x_KND + _linear(weights, prefix + "mlp.c_proj", inner)


def last_norm(shape: Shape, weights: Weights, x_KND: Tensor) -> Tensor:
    return _layer_norm(weights, "transformer.ln_f", x_KND, shape.norm_epsilon)


def _linear(weights: Weights, name: str, x_KND: Tensor) -> Tensor:
    return torch.baddbmm(weights[name + ".bias"][:, None], x_KND, weights[name + ".weight"])


def _layer_norm(weights: Weights, name: str, x_KND: Tensor, epsilon: float) -> Tensor:
    # All of it in float32 and rounded once, as torch's own layer norm does, which knows no node axis.
    normed = F.layer_norm(x_KND.float(), x_KND.shape[-1:], eps=epsilon)
    weight, bias = weights[name + ".weight"][:, None].float(), weights[name + ".bias"][:, None].float()
    return (normed * weight + bias).to(x_KND.dtype)
