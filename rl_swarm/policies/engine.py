"""What a learner needs to know and to have: its settings as plain values, and models that compute.

Shape letters: K nodes, S sequences, C completion positions.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from rl_swarm.errors import SettingsError
from rl_swarm.policies.batches import Padded
from rl_swarm.policies.families.parts import Weights
from rl_swarm.policies.memory import Counts
from rl_swarm.policies.sampling import Sampled


@dataclass(frozen=True, slots=True)
class Learning:
    """The learner's settings, as plain values."""

    learning_rate: float
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    loss: str = "grpo"
    advantage: str = "std"
    aggregate: str = "token"
    minibatches: int = 1
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_beta: float = 0.0
    negative_weight: float = 1.0
    off_policy: str = "damp"
    peer_negative_weight: float = 0.2
    max_grad_norm: float = 1.0
    micro_batch_tokens: int | None = None
    dtype: str = "float32"
    gradient_checkpointing: bool = False
    compile: str = "auto"
    cuda_graphs: bool = True
    lora_rank: int = 0
    chat_template: str = "auto"


class Models(Protocol):
    """The models of K nodes: what they compute, their gradients, their optimiser."""

    name: str
    context: int
    vocabulary: int
    device: torch.device

    def sample(
        self,
        prompts: Sequence[Sequence[Sequence[int]]],
        uniform_KSC: Tensor,
        *,
        ends: Sequence[int],
        temperature: float,
        top_p: float,
    ) -> Sampled:
        """Completions for Q prompts of each node, one per row of uniform numbers."""
        ...

    def release(self) -> None:
        """Give up memory that is only kept so that the next sampling begins sooner."""
        ...

    def logprobs(self, padded: Padded, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of every completion token, (K, S, C), differentiable in the weights."""
        ...

    def reference_logprobs(self, padded: Padded, temperature: float) -> Tensor:
        """The same under the weights the models started from."""
        ...

    def gradients(self, k: int) -> Weights:
        """What has been accumulated for node k, under the weights' names."""
        ...

    def drop_gradients(self) -> None: ...

    def step(self, active_K: Tensor, learning_rate: float, max_norm: float) -> tuple[Tensor, Tensor]:
        """Update the active nodes, using up the gradients; returns each node's gradient norm and whether it moved."""
        ...

    def weights(self, k: int) -> Weights:
        """A copy of node k's weights on the CPU, under the names they are saved by."""
        ...

    def state(self, k: int) -> dict[str, Any]:
        """Weights and optimiser of node k on the CPU, to be written out before anything moves again."""
        ...

    def load_state(self, k: int, state: Mapping[str, Any]) -> None:
        """The reverse. Raises CheckpointError, and changes nothing, if the state is of another model."""
        ...

    def counts(self) -> Counts:
        """The models in numbers, for an estimate of the memory they will take."""
        ...


def pick_devices(wanted: str, nodes: int) -> list[str]:
    """The devices to compute on, never more than nodes. `auto` takes cuda, then mps, then cpu; `cuda` is all GPUs."""
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    there = [*gpus, *(["mps"] if torch.backends.mps.is_available() else []), "cpu"]
    if gpus and wanted in ("auto", "cuda"):
        return gpus[:nodes] if len(gpus) > 1 and nodes > 1 else ["cuda"]
    named = [there[0]] if wanted == "auto" else wanted.split(",")
    if not set(named) <= set(there):
        raise SettingsError(
            f"DEVICE={wanted!r} is not allowed: torch finds only {', '.join(there)} on this machine; use these or auto."
        )
    return named[:nodes]


def is_recent_gpu(device: torch.device | str) -> bool:
    """Ampere and later: they compute in bfloat16, and our own kernels are written for them."""
    return torch.device(device).type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def kernels_run_on(device: torch.device) -> bool:
    """Whether our own kernels do: Triton must be there, and the C compiler it calls."""
    compilers = (os.environ.get("CC", "gcc"), "gcc", "clang")
    there = find_spec("triton") is not None and any(shutil.which(name) for name in compilers)
    return there and torch.version.cuda is not None and is_recent_gpu(device)
