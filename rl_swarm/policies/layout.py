"""Weights as they lie in a Hugging Face folder, and as the decoder wants them; there and back without a bit lost.

The decoder's own layout: queries, keys and values are one linear layer, gate and up are one, every linear layer lies
as (out, in), and the table of a large vocabulary is filled up with zeros to a length that suits a GPU.
"""

from __future__ import annotations

from collections.abc import Container

import torch

from rl_swarm.policies.families.parts import Shape, Weights
from rl_swarm.policies.reading import FAMILIES, weight_shapes

# A product with 50,257 columns runs at a fifth of the speed of one with 50,304. Small tables are left alone.
LARGE_VOCABULARY, MULTIPLE = 4096, 64
TABLES = ("embed", "head")
TURNED = ("qkv", "out", "up", "down")


def joined(shape: Shape, weights: Weights) -> Weights:
    """One model's weights, from a folder's layout to the decoder's."""
    made: Weights = {}
    for name, sources in _sources(shape, weights).items():
        weight = torch.cat([_turned(shape, name, weights[source]) for source in sources])
        missing = _padded(shape.vocabulary) - shape.vocabulary if name in TABLES else 0
        made[name] = torch.cat((weight, weight.new_zeros(missing, shape.width))) if missing else weight
    return made


def parted(shape: Shape, weights: Weights) -> Weights:
    """The way back; also of anything that has the shapes of weights, as gradients do."""
    sizes = weight_shapes(shape)
    found: Weights = {}
    for name, sources in _sources(shape, sizes).items():
        whole = weights[name][: shape.vocabulary] if name in TABLES else weights[name]
        outputs = [sizes[source][-1 if _is_turned(shape, name) else 0] for source in sources]
        for source, part in zip(sources, torch.split(whole, outputs), strict=True):
            found[source] = _turned(shape, name, part)
    return {name: found[name] for name in sizes}


def stack(shape: Shape, weights: Weights, copies: int) -> Weights:
    """The decoder's weights of `copies` nodes that all hold the model of these, which lie as in a folder."""
    return {
        name: weight.unsqueeze(0).repeat(copies, *(1,) * weight.dim())
        for name, weight in joined(shape, weights).items()
    }


def of_layer(weights: Weights, layer: int) -> Weights:
    """One layer's weights by the names they have in every layer."""
    prefix = f"{layer}."
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def _padded(vocabulary: int) -> int:
    return vocabulary if vocabulary < LARGE_VOCABULARY else -(-vocabulary // MULTIPLE) * MULTIPLE


def _sources(shape: Shape, there: Container[str]) -> dict[str, list[str]]:
    """The decoder's names, and from which of the folder's each is made. `there` holds the folder's names."""
    names = FAMILIES[shape.family].NAMES
    sources = {"embed": [names.embed + ".weight"]}
    if names.positions is not None:
        sources["positions"] = [names.positions + ".weight"]
    for layer in range(shape.layers):
        for part, folder_names in names.parts.items():
            for kind in ("weight", "bias"):
                found = [f"{names.layer}{layer}.{one}.{kind}" for one in folder_names]
                if found[0] in there:
                    sources[f"{layer}.{part}.{kind}"] = found
    sources |= {f"last.{kind}": [f"{names.last}.{kind}"] for kind in ("weight", "bias")}
    sources["head"] = ["lm_head.weight"]
    return {name: found for name, found in sources.items() if found[0] in there}


def _is_turned(shape: Shape, name: str) -> bool:
    part = name.split(".")
    return FAMILIES[shape.family].NAMES.turned and part[-1] == "weight" and part[-2] in TURNED


def _turned(shape: Shape, name: str, weight: torch.Tensor) -> torch.Tensor:
    return weight.T if _is_turned(shape, name) else weight
