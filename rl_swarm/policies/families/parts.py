"""What the decoder must know of a model beside its weights, and how its weights lie in a folder.

The decoder runs every family by one forward pass over weights of its own names (`qkv`, `up`, ...); a family is a table
that says from which weights of a Hugging Face folder those are made.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """What the forward pass must know about a model beside its weights."""

    family: str
    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    ffn: int
    norm_epsilon: float
    context: int
    tied: bool
    rotary_base: float | None  # None: positions are learned
    biased: tuple[str, ...]  # the linear layers of a block that have a bias, by their names in the folder
    gated: bool  # the feed-forward: silu(gate) * up, or gelu(up)


@dataclass(frozen=True, slots=True)
class Names:
    """From which weights of a folder the decoder's are made."""

    layer: str  # before every layer's number
    embed: str
    positions: str | None
    last: str
    # The decoder's name of a part of a layer, and the folder's, whose outputs are put one after the other.
    parts: dict[str, tuple[str, ...]]
    turned: bool = False  # linear layers of a block lie as (in, out) in the folder
