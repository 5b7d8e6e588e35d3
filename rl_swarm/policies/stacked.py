"""K nodes' models stacked into one program: every weight has a node axis, sampling and learning go side by side.

Shape letters: K nodes, S sequences, T positions, C completion positions, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_swarm.policies import memory, sampling, saving
from rl_swarm.policies.adam import StackedAdam
from rl_swarm.policies.batches import Padded
from rl_swarm.policies.decoder import Shape, Weights, forward, logits, read_shape, read_weights, stack
from rl_swarm.policies.engine import Learning
from rl_swarm.policies.learner import Learner
from rl_swarm.policies.logprobs import at_real_positions, chunked_logprobs
from rl_swarm.policies.tokens import Tokens


def stacked_learner(nodes: Sequence[str], folder: Path, learning: Learning, device: str = "cpu") -> Learner:
    """A Policy over one model folder; every node starts from the same weights."""
    tokens = Tokens(folder, chat=learning.chat_template == "auto")
    return Learner(nodes, StackedModels(len(nodes), folder, learning, device), tokens, learning)


class StackedModels:
    def __init__(self, count: int, folder: Path, learning: Learning, device: str) -> None:
        self._shape = read_shape(folder)
        self._halved = learning.dtype == "bfloat16"
        self._checkpointed = learning.gradient_checkpointing
        self.name = f"{count} node{'' if count == 1 else 's'} as one program"
        self.context, self.vocabulary = self._shape.context, self._shape.vocabulary
        self.device = torch.device(device)
        single = {name: weight.to(device) for name, weight in read_weights(folder, self._shape).items()}
        # Only a KL term looks back; all nodes share one reference, since all started from it.
        self._reference = {name: weight.unsqueeze(0) for name, weight in single.items()} if learning.kl_beta else {}
        self._adam = StackedAdam(stack(single, count))
        # What the forward pass reads: the weights themselves, or their copies in half precision.
        self._read: Weights = {}
        self._gradients: Weights = {}
        for name, weight in self._adam.weights.items():
            self._read[name] = (weight.to(torch.bfloat16) if self._halved else weight.detach()).requires_grad_(True)
            # The hook knows the table and not this object, which else would hold itself for ever.
            take = partial(_take_gradient, self._gradients, name)
            self._read[name].register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _refresh(self) -> None:
        if self._halved:
            for name, weight in self._adam.weights.items():
                self._read[name].copy_(weight)

    def sample(
        self,
        prompts: Sequence[Sequence[Sequence[int]]],
        uniform_KSC: Tensor,
        *,
        ends: Sequence[int],
        temperature: float,
        top_p: float,
    ) -> sampling.Sampled:
        return sampling.sample(
            self._shape, self._read, prompts, uniform_KSC, ends=ends, temperature=temperature, top_p=top_p
        )

    def logprobs(self, padded: Padded, temperature: float) -> tuple[Tensor, Tensor]:
        return self._logprobs(self._read, padded, temperature)

    @torch.no_grad()
    def reference_logprobs(self, padded: Padded, temperature: float) -> Tensor:
        K = padded.ids_KST.shape[0]
        dtype = torch.bfloat16 if self._halved else torch.float32
        expanded = {name: w.to(dtype).expand(K, *w.shape[1:]) for name, w in self._reference.items()}
        return self._logprobs(expanded, padded, temperature)[0]

    def _logprobs(self, weights: Weights, padded: Padded, temperature: float) -> tuple[Tensor, Tensor]:
        K, S, T = padded.ids_KST.shape
        positions = torch.arange(T, device=self.device).expand(K, S, T)
        checkpointed = self._checkpointed and torch.is_grad_enabled()
        hidden_KSTD = forward(self._shape, weights, padded.ids_KST, positions, checkpointed=checkpointed)

        def head(hidden_KND: Tensor) -> Tensor:
            return logits(self._shape, weights, hidden_KND)

        return at_real_positions(
            lambda hidden, targets: chunked_logprobs(head, hidden, targets, temperature, self.vocabulary),
            hidden_KSTD,
            padded.source_KSC,
            padded.targets_KSC,
            padded.real_KSC,
        )

    def gradients(self, k: int) -> Weights:
        return {
            name: self._gradients[name][k].clone() if name in self._gradients else torch.zeros_like(weight[k])
            for name, weight in self._adam.weights.items()
        }

    def drop_gradients(self) -> None:
        self._gradients.clear()
        for read in self._read.values():
            read.grad = None

    def step(self, active_K: Tensor, learning_rate: float, max_norm: float) -> tuple[Tensor, Tensor]:
        for name, weight in self._adam.weights.items():
            self._gradients.setdefault(name, torch.zeros_like(weight))
        moved = self._adam.step(self._gradients, active_K, learning_rate, max_norm)
        self.drop_gradients()
        self._refresh()
        return moved

    def weights(self, k: int) -> Weights:
        return _slice(self._adam.weights, k)

    def state(self, k: int) -> dict[str, Any]:
        adam = self._adam
        return {
            "weights": _slice(adam.weights, k, copied=False),
            "first": _slice(adam.first, k, copied=False),
            "second": _slice(adam.second, k, copied=False),
            "steps": adam.steps_K[k].clone(),
        }

    def load_state(self, k: int, state: Mapping[str, Any]) -> None:
        adam = self._adam
        saving.check_sizes(state, {name: weight[k] for name, weight in adam.weights.items()})
        for part, tensors in (("weights", adam.weights), ("first", adam.first), ("second", adam.second)):
            for name, tensor in tensors.items():
                tensor[k].copy_(state[part][name])
        adam.steps_K[k] = state["steps"]
        self._refresh()

    def counts(self) -> memory.Counts:
        shape, K = self._shape, len(self._adam.steps_K)
        numbers = sum(weight.numel() for weight in self._adam.weights.values())
        return memory.Counts(
            nodes=K,
            item=2 if self._halved else 4,
            weights=numbers + sum(weight.numel() for weight in self._reference.values()),
            trained=numbers,
            copied=numbers if self._halved else 0,
            cached=2 * shape.layers * shape.kv_heads * shape.head_width,
            kept=kept_by_layer(shape, self._halved),
            width=shape.width,
            layers=shape.layers,
            vocabulary=self.vocabulary,
            checkpointed=self._checkpointed,
        )


def _take_gradient(sums: Weights, name: str, read: Tensor) -> None:
    """Sum gradients up in float32, pass by pass, whatever they were computed in."""
    assert read.grad is not None
    if name in sums:
        sums[name] += read.grad
    else:
        sums[name] = read.grad.float()
    read.grad = None


def kept_by_layer(shape: Shape, halved: bool) -> int:
    """Numbers a layer keeps for the way back, per token, as counted in this decoder; a test counts them again.

    Norms are computed in float32, which in half precision is twice the room.
    """
    by_width = 18 if halved else 11
    if shape.family == "qwen3":  # norms of queries and keys too
        by_width += 10 if halved else 4
    return by_width * shape.width + (2 if shape.family == "gpt2" else 4) * shape.ffn


def _slice(tensors: Weights, k: int, *, copied: bool = True) -> Weights:
    """Node k's tensors on the CPU: as copies, or, to be written out at once, without where that is possible."""
    parts = {name: tensor[k].detach().cpu() for name, tensor in tensors.items()}
    return {
        # What is saved of a tensor is all the memory behind it: a slice of several nodes must be copied out of it.
        name: part.clone() if copied or part.untyped_storage().nbytes() > part.nbytes else part
        for name, part in parts.items()
    }
