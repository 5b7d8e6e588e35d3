"""A node's state as bytes: tensors and a note, read back without running anything that is in them."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rl_swarm.errors import CheckpointError
from rl_swarm.policies.families.parts import Weights
from rl_swarm.protocols import CheckpointNote

PARTS = ("weights", "first", "second", "steps")


def to_bytes(state: Mapping[str, Any], note: CheckpointNote) -> bytes:
    buffer = io.BytesIO()
    torch.save({**state, "note": dict(note)}, buffer)
    return buffer.getvalue()


def from_bytes(saved: bytes) -> tuple[dict[str, Any], CheckpointNote]:
    try:
        state: Any = torch.load(io.BytesIO(saved), weights_only=True, map_location="cpu")
    except (RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(f"not a whole checkpoint ({type(error).__name__})") from None
    if not isinstance(state, dict) or state.keys() != {*PARTS, "note"}:
        raise CheckpointError("not a checkpoint of this program")
    return {part: state[part] for part in PARTS}, state["note"]


def check_note(note: CheckpointNote, expected: CheckpointNote) -> None:
    if not expected.items() <= note.items():
        raise CheckpointError(f"it belongs to {dict(note)}, not to {dict(expected)}")


def check_sizes(state: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Whether a state is of a model with these weights (one node's, without a node axis)."""
    sizes = {name: tensor.shape for name, tensor in weights.items()}
    for part in ("weights", "first", "second"):
        if {name: tensor.shape for name, tensor in state[part].items()} != sizes:
            raise CheckpointError("it was made with another model")


def read_saved_weights(saved: bytes) -> Weights:
    """The weights in a checkpoint, under the names they are saved by."""
    weights: Weights = from_bytes(saved)[0]["weights"]
    return weights


def is_adapter(weights: Weights) -> bool:
    """Whether these are LoRA's, to be worked into the weights of a base model."""
    return any(".lora_A." in name for name in weights)


def save_weights(weights: Weights, folder: Path) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
