"""GPT-2: layer norms, learned positions, one fused layer for queries, keys and values, biases everywhere.

Left out: dropout, cross attention, the variants of attention scaling.
"""

from __future__ import annotations

from typing import Any

from rl_swarm.policies.families.parts import Names, Shape

PREFIX = "transformer."
NAMES = Names(
    layer="transformer.h.",
    embed="transformer.wte",
    positions="transformer.wpe",
    last="transformer.ln_f",
    parts={
        "norm1": ("ln_1",),
        "qkv": ("attn.c_attn",),
        "out": ("attn.c_proj",),
        "norm2": ("ln_2",),
        "up": ("mlp.c_fc",),
        "down": ("mlp.c_proj",),
    },
    turned=True,
)


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
        gated=False,
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
