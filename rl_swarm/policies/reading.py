"""Reading a model out of an ordinary Hugging Face folder: its configuration, its shape, its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from rl_swarm.errors import ModelError
from rl_swarm.policies.families import gpt2, llama
from rl_swarm.policies.families.parts import Names, Shape, Weights


class Family(Protocol):
    """What a module of `families` offers."""

    PREFIX: str  # of every weight's name but the head's; folders saved from the bare model leave it out
    NAMES: Names

    def unlike(self, config: dict[str, Any]) -> dict[str, bool]: ...
    def read_shape(self, config: dict[str, Any]) -> Shape: ...
    def weight_shapes(self, shape: Shape) -> dict[str, tuple[int, ...]]: ...


FAMILIES: dict[str, Family] = {"gpt2": gpt2, "llama": llama, "qwen2": llama, "qwen3": llama}


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
    if shape.tied and head is not None and not torch.equal(head.float(), weights[family.NAMES.embed + ".weight"]):
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
