"""Llama (SmolLM2, the embedded pico), Qwen2 and Qwen3: RMS norms, rotary positions, a gated feed-forward.

They differ in little: Qwen2 has biases on queries, keys and values; Qwen3 norms each head's queries and keys.
Left out: dropout, sliding windows, scaled or partial rotary positions.
"""

from __future__ import annotations

from typing import Any

from rl_swarm.policies.families.parts import Names, Shape

PREFIX = "model."
NAMES = Names(
    layer="model.layers.",
    embed="model.embed_tokens",
    positions=None,
    last="model.norm",
    parts={
        "norm1": ("input_layernorm",),
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "q_norm": ("self_attn.q_norm",),
        "k_norm": ("self_attn.k_norm",),
        "out": ("self_attn.o_proj",),
        "norm2": ("post_attention_layernorm",),
        "up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    },
)

# What transformers assumes of a Qwen3 configuration that does not say.
QWEN3_HEAD_WIDTH = 128


def unlike(config: dict[str, Any]) -> dict[str, bool]:
    """What this block would compute wrongly, and whether this model has it."""
    rotary = _rotary(config)
    return {
        "scaled rotary positions": rotary.get("rope_type", rotary.get("type", "default")) != "default",
        "rotary positions that differ by layer": any(isinstance(value, dict) for value in rotary.values()),
        "partly rotary positions": (rotary.get("partial_rotary_factor") or config.get("partial_rotary_factor", 1)) != 1,
        "a sliding window": bool(config.get("use_sliding_window"))
        or any(kind != "full_attention" for kind in config.get("layer_types") or ()),
        "another activation than silu": config.get("hidden_act", "silu") != "silu",
    }


def read_shape(config: dict[str, Any]) -> Shape:
    family, width, heads = config["model_type"], int(config["hidden_size"]), int(config["num_attention_heads"])
    return Shape(
        family=family,
        vocabulary=int(config["vocab_size"]),
        width=width,
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_width=int(config.get("head_dim") or (QWEN3_HEAD_WIDTH if family == "qwen3" else width // heads)),
        ffn=int(config["intermediate_size"]),
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        context=int(config["max_position_embeddings"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        rotary_base=float(_rotary(config).get("rope_theta") or config.get("rope_theta") or 10_000.0),
        biased=_biased(config),
        gated=True,
    )


def _rotary(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of rotary positions: under one name in folders of transformers 5, under another before."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return found if isinstance(found, dict) else {"rope_type": found}


def _biased(config: dict[str, Any]) -> tuple[str, ...]:
    if config["model_type"] == "qwen2":
        return ("q_proj", "k_proj", "v_proj")
    attention = ("q_proj", "k_proj", "v_proj", "o_proj") if config.get("attention_bias") else ()
    # Qwen3 has no such biases, whatever its configuration says.
    gated = config["model_type"] == "llama" and config.get("mlp_bias")
    return (*attention, *(("gate_proj", "up_proj", "down_proj") if gated else ()))


def weight_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    width, queries, pairs = shape.width, shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    layers = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (pairs, width),
        "self_attn.v_proj": (pairs, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (shape.ffn, width),
        "mlp.up_proj": (shape.ffn, width),
        "mlp.down_proj": (width, shape.ffn),
    }
    norms = {"input_layernorm": width, "post_attention_layernorm": width}
    if shape.family == "qwen3":
        norms |= {"self_attn.q_norm": shape.head_width, "self_attn.k_norm": shape.head_width}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, width)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        for name, size in layers.items():
            shapes[f"{prefix}{name}.weight"] = size
            if name.rpartition(".")[2] in shape.biased:
                shapes[f"{prefix}{name}.bias"] = size[:1]
        for name, length in norms.items():
            shapes[f"{prefix}{name}.weight"] = (length,)
    shapes["model.norm.weight"] = (width,)
    return shapes
