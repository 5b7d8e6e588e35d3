"""What a learner needs to know and to have: its settings as plain values, and models that compute.

Shape letters: K nodes, S sequences, C completion positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


def pick_device(wanted: str) -> str:
    """The device to compute on. `auto` takes cuda, then mps, then cpu."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        return next(name for name, available in there.items() if available)
    if not there[wanted]:
        raise SettingsError(f"DEVICE={wanted!r} is not available on this machine; use auto or cpu.")
    return wanted
