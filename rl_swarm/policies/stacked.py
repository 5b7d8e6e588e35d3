"""K nodes' models stacked into one program: every weight has a node axis, sampling and learning go side by side.

Shape letters: K nodes, S sequences, T positions, C completion positions, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_swarm.policies import memory, sampling, saving
from rl_swarm.policies.adam import StackedAdam
from rl_swarm.policies.batches import Padded
from rl_swarm.policies.compiling import (
    HeadLogprobs,
    compiled_block,
    compiled_logprobs,
    compiled_split,
    head_logprobs,
    is_worth_it,
)
from rl_swarm.policies.decoder import Attend, Block, Grouped, Rotary, block, grouped_mask, rotary, run
from rl_swarm.policies.engine import Learning, kernels_run_on
from rl_swarm.policies.families.parts import Shape, Weights
from rl_swarm.policies.layout import joined, parted
from rl_swarm.policies.learner import Learner
from rl_swarm.policies.logprobs import CHUNK_NUMBERS, at_real_positions, in_chunks
from rl_swarm.policies.reading import read_shape, read_weights
from rl_swarm.policies.tokens import Tokens

if TYPE_CHECKING:
    from rl_swarm.policies.decoding import Decoding


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
        single = {
            name: weight.to(device).unsqueeze(0)
            for name, weight in joined(self._shape, read_weights(folder, self._shape)).items()
        }
        # Only a KL term looks back; all nodes share one reference, since all started from it.
        self._reference = single if learning.kl_beta else {}
        self._adam = StackedAdam(
            {name: weight.repeat(count, *(1,) * (weight.dim() - 1)) for name, weight in single.items()}
        )
        # What the forward pass reads: the weights themselves, or their copies in half precision.
        self._read: Weights = {}
        self._gradients: Weights = {}
        for name, weight in self._adam.weights.items():
            self._read[name] = (weight.to(torch.bfloat16) if self._halved else weight.detach()).requires_grad_(True)
            if self._halved:
                self._adam.copies[name] = self._read[name].detach()
            # The hook knows the table and not this object, which else would hold itself for ever.
            take = partial(_take_gradient, self._gradients, name)
            self._read[name].register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
        self._grouped: Callable[[Shape, Rotary | None, Tensor, Tensor], Attend] = Grouped
        self._block: Block = block
        self._head_logprobs: HeadLogprobs = head_logprobs
        self._score_bytes = memory.SCORE_BYTES
        if is_worth_it(learning.compile, sum(weight.numel() for weight in self._read.values()), self.device):
            self._block, self._head_logprobs = compiled_block(), compiled_logprobs()
            self._score_bytes = memory.COMPILED_SCORE_BYTES
            self._grouped = partial(Grouped, split=compiled_split())
        # Who would rather compute twice than keep wants that of the scores too.
        self._chunk = CHUNK_NUMBERS if self._checkpointed else memory.default_chunk(self.device, self._score_bytes)
        # Sampling must see updates in place: these tensors are written to and never replaced.
        self._sampler: Callable[..., sampling.Sampled] = partial(sampling.sample, self._shape, self._read)
        self._decoding: Decoding | None = None
        if kernels_run_on(self.device):
            from rl_swarm.policies.arranging import arranged
            from rl_swarm.policies.decoding import Decoding

            if "0.q_norm.weight" not in self._read:
                self._grouped = arranged
            self._decoding = Decoding(self._shape, self._read, graphs=learning.cuda_graphs)
            self._sampler = self._decoding.sample

    def sample(
        self,
        prompts: Sequence[Sequence[Sequence[int]]],
        uniform_KSC: Tensor,
        *,
        ends: Sequence[int],
        temperature: float,
        top_p: float,
    ) -> sampling.Sampled:
        return self._sampler(prompts, uniform_KSC, ends=ends, temperature=temperature, top_p=top_p)

    def release(self) -> None:
        if self._decoding is not None:
            self._decoding.release()

    def logprobs(self, padded: Padded, temperature: float) -> tuple[Tensor, Tensor]:
        return self._logprobs(self._read, padded, temperature)

    @torch.no_grad()
    def reference_logprobs(self, padded: Padded, temperature: float) -> Tensor:
        K = len(padded.prompts_KQP)
        dtype = torch.bfloat16 if self._halved else torch.float32
        expanded = {name: w.to(dtype).expand(K, *w.shape[1:]) for name, w in self._reference.items()}
        return self._logprobs(expanded, padded, temperature)[0]

    def _logprobs(self, weights: Weights, padded: Padded, temperature: float) -> tuple[Tensor, Tensor]:
        P, C = padded.prompts_KQP.shape[2], padded.targets_KSC.shape[2]
        dtype = weights["embed"].dtype
        turns = rotary(self._shape, weights, padded.positions)
        mask = grouped_mask(padded.lengths_KQ, P, padded.siblings, C, dtype)
        attend = self._grouped(self._shape, turns, padded.prompts_KQP, mask)
        x_KND = run(
            self._shape,
            weights,
            padded.tokens,
            padded.positions,
            lambda layer: attend,
            checkpointed=self._checkpointed and torch.is_grad_enabled(),
            block=self._block,
        )

        def score(x_KMD: Tensor, targets_KM: Tensor) -> tuple[Tensor, Tensor]:
            return self._head_logprobs(self._shape, weights, x_KMD, targets_KM, temperature)

        return at_real_positions(
            lambda x_KMD, targets_KM: in_chunks(score, x_KMD, targets_KM, self.vocabulary, self._chunk),
            x_KND,
            padded.source_KSC,
            padded.targets_KSC,
            padded.real_KSC,
        )

    def gradients(self, k: int) -> Weights:
        gradients = {
            name: self._gradients[name][k].float().clone() if name in self._gradients else torch.zeros_like(weight[k])
            for name, weight in self._adam.weights.items()
        }
        return parted(self._shape, gradients)

    def drop_gradients(self) -> None:
        self._gradients.clear()
        for read in self._read.values():
            read.grad = None

    def step(self, active_K: Tensor, learning_rate: float, max_norm: float) -> tuple[Tensor, Tensor]:
        for name, weight in self._adam.weights.items():
            self._gradients.setdefault(name, torch.zeros_like(weight))
        moved = self._adam.step(self._gradients, active_K, learning_rate, max_norm)
        self.drop_gradients()
        return moved

    def weights(self, k: int) -> Weights:
        return self._slice(self._adam.weights, k)

    def state(self, k: int) -> dict[str, Any]:
        adam = self._adam
        return {
            "weights": self._slice(adam.weights, k, copied=False),
            "first": self._slice(adam.first, k, copied=False),
            "second": self._slice(adam.second, k, copied=False),
            "steps": adam.steps_K[k].clone(),
        }

    def load_state(self, k: int, state: Mapping[str, Any]) -> None:
        adam = self._adam
        saving.check_sizes(state, parted(self._shape, {name: weight[k] for name, weight in adam.weights.items()}))
        for part, tensors in (("weights", adam.weights), ("first", adam.first), ("second", adam.second)):
            for name, tensor in joined(self._shape, state[part]).items():
                tensors[name][k].copy_(tensor)
        adam.steps_K[k] = state["steps"]
        adam.refresh()

    def _slice(self, tensors: Weights, k: int, *, copied: bool = True) -> Weights:
        """Node k's part on the CPU as it lies in a folder: a copy, or, to be written at once, none where possible."""
        parts = parted(self._shape, {name: tensor[k].detach().cpu() for name, tensor in tensors.items()})
        return {
            # What is saved of a tensor is all the memory behind it: a slice of something larger must be copied out.
            name: part.contiguous().clone() if copied or part.untyped_storage().nbytes() > part.nbytes else part
            for name, part in parts.items()
        }

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
            chunk=self._chunk,
            score_bytes=self._score_bytes,
            cache_stays=self._decoding is not None,
        )


def _take_gradient(sums: Weights, name: str, read: Tensor) -> None:
    """Sum gradients up in float32, pass by pass, whatever they were computed in."""
    assert read.grad is not None
    if name not in sums:
        sums[name] = read.grad  # as it is: where one pass is all, nothing is gained by a wider copy
    else:
        sums[name] = sums[name].float().add_(read.grad)
    read.grad = None


def kept_by_layer(shape: Shape, halved: bool) -> int:
    """Numbers a layer keeps for the way back, per token, as counted in this decoder; a test counts them again.

    Norms are computed in float32, which in half precision is twice the room.
    """
    by_width = {"gpt2": (15, 20), "qwen3": (19, 34)}.get(shape.family, (17, 24))[halved]
    return by_width * shape.width + (4 if shape.gated else 2) * shape.ffn
