"""What every family is made of: stacked weights, the shape of a model, linear layers and look-up tables.

Shape letters: K nodes, N tokens, D width, H heads, G key-value heads, E head width, V rows of a table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Weights = dict[str, Tensor]

# Layer, queries (K, N, H, E), keys and values (K, N, G, E); gives (K, N, H*E). A block need not know about sequences,
# rotary positions or caches.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


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
    biased: tuple[str, ...]  # the linear layers of a block that have a bias


def linear(weights: Weights, name: str, x_KND: Tensor) -> Tensor:
    weight, bias = weights[name + ".weight"].transpose(1, 2), weights.get(name + ".bias")
    # Adding the bias within the product rounds once in bfloat16, as transformers does.
    return torch.bmm(x_KND, weight) if bias is None else torch.baddbmm(bias[:, None], x_KND, weight)


def look_up(table_KVD: Tensor, ids_KN: Tensor) -> Tensor:
    """Each node's rows from its own table, (K, N, D)."""
    nodes = torch.arange(ids_KN.shape[0], device=ids_KN.device)[:, None]
    return table_KVD[nodes, ids_KN]
