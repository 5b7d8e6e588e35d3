"""The decoder, every weight with a leading node axis: K models of one shape run as one program.

Weights are a plain dictionary under the names of an ordinary Hugging Face folder, each stacked over nodes, so loading
and saving are a slice and a copy. With K=1 it is one model. What differs between families is in `families`; here are
reading, attention and caching.

Shape letters: K nodes, S sequences, T positions, N = S*T, D width, H heads, G key-value heads, E head width, V tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rl_swarm.errors import ModelError
from rl_swarm.policies.families import gpt2, llama
from rl_swarm.policies.families.parts import Attend, Shape, Weights, linear

__all__ = [
    "Cache",
    "Shape",
    "Weights",
    "forward",
    "linear",
    "logits",
    "read_config",
    "read_shape",
    "read_weights",
    "stack",
    "unsupported",
    "weight_shapes",
]


class Family(Protocol):
    """What a module of `families` offers."""

    PREFIX: str  # of every weight's name but the head's; folders saved from the bare model leave it out
    EMBEDDING: str

    def unlike(self, config: dict[str, Any]) -> dict[str, bool]: ...
    def read_shape(self, config: dict[str, Any]) -> Shape: ...
    def weight_shapes(self, shape: Shape) -> dict[str, tuple[int, ...]]: ...
    def embed(self, weights: Weights, ids_KN: Tensor, positions_KN: Tensor) -> Tensor: ...
    def block(self, shape: Shape, weights: Weights, layer: int, x_KND: Tensor, attend: Attend) -> Tensor: ...
    def last_norm(self, shape: Shape, weights: Weights, x_KND: Tensor) -> Tensor: ...


FAMILIES: dict[str, Family] = {"gpt2": gpt2, "llama": llama, "qwen2": llama, "qwen3": llama}


# Reading a model folder


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a Hugging Face folder."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"{folder} is not a model folder: it has no config.json.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} does not describe a model.")
    return config


def unsupported(config: dict[str, Any]) -> str | None:
    """Why this decoder would compute the model wrongly, to be read after the model's name; None if it would not."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return f"is a {config.get('model_type')!r} model"
    if config.get("quantization_config"):
        return "has quantised weights"
    return next((f"has {what}" for what, found in family.unlike(config).items() if found), None)


def read_shape(folder: Path) -> Shape:
    """The shape of the model in a Hugging Face folder, refusing what this forward pass would compute wrongly."""
    config = read_config(folder)
    if reason := unsupported(config):
        raise ModelError(f"{folder} {reason}; this decoder runs plain {', '.join(FAMILIES)} models.")
    try:
        return FAMILIES[config["model_type"]].read_shape(config)
    except KeyError as error:
        raise ModelError(f"{folder / 'config.json'} lacks {error}.") from None
    except (TypeError, ValueError) as error:
        raise ModelError(f"{folder / 'config.json'} does not describe a model: {error}.") from None


def weight_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Every weight of the model, in the order in which they are drawn and saved."""
    head = {} if shape.tied else {"lm_head.weight": (shape.vocabulary, shape.width)}
    return FAMILIES[shape.family].weight_shapes(shape) | head


def read_weights(folder: Path, shape: Shape) -> Weights:
    """One model's weights in float32, without a node axis."""
    found: Weights = {}
    for path in _weight_files(folder):
        try:
            found |= load_file(path)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read: {error}.") from None
    family = FAMILIES[shape.family]
    weights: Weights = {}
    for name, size in weight_shapes(shape).items():
        weight = found.get(name, found.get(name.removeprefix(family.PREFIX)))
        if weight is None:
            raise ModelError(f"{folder} lacks the weight {name}.")
        if tuple(weight.shape) != size:
            raise ModelError(f"{folder}: {name} has shape {tuple(weight.shape)}, config.json implies {size}.")
        weights[name] = weight.float()
    head = found.get("lm_head.weight")
    if shape.tied and head is not None and not torch.equal(head.float(), weights[family.EMBEDDING + ".weight"]):
        # transformers would use this head, others would not.
        raise ModelError(
            f"{folder}: config.json ties the head to the embedding, but the weights hold another lm_head.weight. "
            "Set tie_word_embeddings to false, or leave the head out."
        )
    return weights


def _weight_files(folder: Path) -> list[Path]:
    """The file of the whole model, or its shards."""
    whole = folder / "model.safetensors"
    files = [whole] if whole.exists() else sorted(folder.glob("*.safetensors"))
    if not files and (folder / "pytorch_model.bin").exists():
        raise ModelError(
            f"{folder} has its weights in pytorch_model.bin, which could run any code when opened, and no .safetensors "
            "file. Convert it on a machine that trusts it: load the model with transformers and call save_pretrained."
        )
    if not files:
        raise ModelError(f"{folder} has no weights: no .safetensors file in it.")
    return files


def stack(weights: Weights, copies: int) -> Weights:
    """The same model for every node; from here on they go their own ways."""
    return {name: weight.unsqueeze(0).repeat(copies, *(1,) * weight.dim()) for name, weight in weights.items()}


# The forward pass


@dataclass(slots=True)
class Cache:
    """Keys and values of every layer, (K*S, G, T, E). An empty one is filled by the forward pass over the prompts."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


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
    family = FAMILIES[shape.family]
    x = family.embed(weights, ids_KST.reshape(K, S * T), positions_KST.reshape(K, S * T))
    rows = positions_KST.reshape(K * S, T)
    rotary = None if shape.rotary_base is None else _rotary(rows, shape.head_width, shape.rotary_base, x.dtype)
    attend = _Attention(K, rows, rotary, cache, mask)

    def block(x: Tensor, layer: int) -> Tensor:
        return family.block(shape, weights, layer, x, attend)

    for layer in range(shape.layers):
        x = checkpoint(block, x, layer, use_reentrant=False) if checkpointed else block(x, layer)
    return family.last_norm(shape, weights, x).view(K, S, T, shape.width)


@dataclass(frozen=True, slots=True)
class _Attention:
    """Attention within one forward pass: knows where its tokens stand and what they may look at."""

    nodes: int
    rows: Tensor  # positions, (K*S, T)
    rotary: tuple[Tensor, Tensor] | None
    cache: Cache | None
    mask: Tensor | None

    def __call__(self, layer: int, queries_KNHE: Tensor, keys_KNGE: Tensor, values_KNGE: Tensor) -> Tensor:
        queries, keys, values = self._by_head(queries_KNHE), self._by_head(keys_KNGE), self._by_head(values_KNGE)
        if self.rotary is not None:
            queries, keys = _rotate(queries, *self.rotary), _rotate(keys, *self.rotary)
        if self.cache is not None:
            keys, values = self._remember(self.cache, layer, keys, values)
        groups = queries.shape[1] // keys.shape[1]
        if groups > 1:
            keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        causal = self.mask is None and self.rows.shape[1] > 1
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self.mask, is_causal=causal)
        return out.transpose(1, 2).reshape(self.nodes, queries_KNHE.shape[1], -1)

    def _by_head(self, x_KNHE: Tensor) -> Tensor:
        """(K*S, H, T, E): sequences of all nodes side by side."""
        return x_KNHE.reshape(*self.rows.shape, *x_KNHE.shape[2:]).transpose(1, 2)

    def _remember(self, cache: Cache, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put new keys and values into the cache; returns those to look at."""
        if self.mask is None:
            cache.keys.append(keys)
            cache.values.append(values)
            return keys, values
        sequences, slots = torch.arange(len(self.rows), device=self.rows.device), self.rows[:, 0]
        cache.keys[layer][sequences, :, slots] = keys[:, :, 0]
        cache.values[layer][sequences, :, slots] = values[:, :, 0]
        return cache.keys[layer], cache.values[layer]


def _rotary(rows: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each token's position, (K*S, 1, T, E), worked out in float32."""
    exponents = torch.arange(0, width, 2, device=rows.device, dtype=torch.float32) / width
    # Rounded as in transformers: dividing by base**exponents is as exact, but drifts from it by 1e-3 in 3,000 tokens.
    angles = rows[:, None, :, None].float() * (1.0 / base**exponents)
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def logits(shape: Shape, weights: Weights, hidden_KND: Tensor) -> Tensor:
    """Scores over the vocabulary, (K, N, V), in float32."""
    return linear(weights, FAMILIES[shape.family].EMBEDDING if shape.tied else "lm_head", hidden_KND).float()
