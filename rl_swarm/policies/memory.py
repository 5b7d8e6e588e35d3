"""How much memory training will take, said before it is taken; and how to tell that it ran out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from rl_swarm.policies.logprobs import CHUNK_NUMBERS

GIB = 2**30
USUAL_MICRO_BATCH, LARGEST_MICRO_BATCH, SMALLEST_MICRO_BATCH = 8192, 131_072, 256
# The parts of a GPU's free memory for the activations of a pass, and for scores.
GPU_ACTIVATIONS, GPU_SCORES = 2, 5
# Activations of one pass on a CPU, where nothing else is asked for. Every pass adds to all gradients: with a quarter of
# this, a pass of SmolLM2 spends more time on that than on the model.
CPU_ACTIVATIONS = GIB * 5 // 4
# Scores over the vocabulary are there as such, as log-probs, as probabilities and as a gradient.
SCORE_BYTES = 4 * 4
# Compiled, they are there in half precision and as a gradient, with something to spare.
COMPILED_SCORE_BYTES = 6
# What allocators say that have no error of their own for it.
NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "cublas_status_alloc_failed")


@dataclass(frozen=True, slots=True)
class Work:
    """What one node does in a round, at most: completions it samples, completions it trains on, tokens of each."""

    sampled: int
    trained: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Counts:
    """The models in numbers, of all nodes together where nothing else is said."""

    nodes: int
    item: int  # bytes of a number in the compute type
    weights: int
    trained: int
    copied: int  # weights copied to the compute type
    cached: int  # by one token while sampling
    kept: int  # by one token in one layer, for the way back
    width: int
    layers: int
    vocabulary: int
    checkpointed: bool
    chunk: int = CHUNK_NUMBERS  # scores over the vocabulary held at a time
    score_bytes: int = SCORE_BYTES  # that each takes while it is there
    cache_stays: bool = False  # while training, too

    @property
    def activation_bytes(self) -> int:
        """What one token takes while training, in all layers together."""
        by_layer = self.kept * self.layers
        return self.item * (self.width * self.layers + self.kept if self.checkpointed else by_layer)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes by purpose, at the fullest moment; `free` is what was left once weights and optimiser were in place."""

    held: Mapping[str, int]
    sampling: Mapping[str, int]
    training: Mapping[str, int]
    staying: Mapping[str, int]
    free: int | None
    micro_batch_tokens: int

    @property
    def total(self) -> int:
        return sum(self.held.values()) + self.to_come

    @property
    def to_come(self) -> int:
        """What is taken after weights and optimiser: sampling and training take turns, unless the cache stays."""
        return max(sum(self.sampling.values()), sum(self.training.values())) + sum(self.staying.values())

    def sentence(self) -> str:
        parts = {**self.held, **self.sampling, **self.staying, **self.training}
        listed = ", ".join(f"{name} {size(count)}" for name, count in parts.items())
        text = f"memory, at most about {size(self.total)}: {listed}; {self.micro_batch_tokens} tokens a pass"
        if self.free is not None and self.to_come > self.free:
            text += f". Only {size(self.free)} are free: it may run out"
        return text


def estimate(counts: Counts, work: Work, free: int | None, micro_batch_tokens: int) -> Estimate:
    """What a round of this work takes, and the largest micro-batch, at most the one given, that fits what is free."""
    item, per_token = counts.item, counts.activation_bytes
    wanted = min(micro_batch_tokens, counts.nodes * work.trained * work.tokens)
    scores = counts.score_bytes * min(counts.chunk, wanted * counts.vocabulary)
    gradients = 4 * counts.trained
    cache = {"cache": item * counts.nodes * work.sampled * work.tokens * counts.cached}
    staying = cache if counts.cache_stays else {}
    fit = fitting(wanted, per_token, gradients + scores + sum(staying.values()), free)
    return Estimate(
        held={"weights": 4 * counts.weights + item * counts.copied, "optimiser": 8 * counts.trained},
        sampling={} if counts.cache_stays else cache,
        staying=staying,
        training={"gradients": gradients, "activations": per_token * fit, "scores": scores},
        free=free,
        micro_batch_tokens=fit if fit < wanted else micro_batch_tokens,
    )


def size(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB / 2 else f"{count / 2**20:.0f} MiB"


def default_micro_batch(counts: Counts, device: torch.device) -> int:
    """Large passes make a GPU quick; on a CPU they only take memory."""
    free = free_memory(device)
    if device.type == "cuda" and free is not None:
        return fitting(LARGEST_MICRO_BATCH, counts.activation_bytes, 0, free // GPU_ACTIVATIONS)
    if device.type != "cpu":
        return USUAL_MICRO_BATCH
    return fitting(USUAL_MICRO_BATCH, counts.activation_bytes, 0, CPU_ACTIVATIONS)


def default_chunk(device: torch.device, score_bytes: int) -> int:
    """Scores over the vocabulary to hold at a time: on a GPU as many as it bears, there one chunk is quickest."""
    free = free_memory(device) if device.type == "cuda" else None
    return CHUNK_NUMBERS if free is None else max(CHUNK_NUMBERS, free // GPU_SCORES // score_bytes)


def fitting(wanted: int, per_token: int, fixed: int, free: int | None) -> int:
    """The wanted micro-batch, halved until it leaves the fixed parts their room, or is as small as makes sense."""
    tokens = wanted
    while free is not None and tokens > SMALLEST_MICRO_BATCH and fixed + tokens * per_token > free:
        tokens = max(SMALLEST_MICRO_BATCH, tokens // 2)
    return tokens


def free_memory(device: torch.device) -> int | None:
    """Bytes that could still be taken; None where nobody tells."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    table = Path("/proc/meminfo")
    if device.type == "cpu" and table.is_file():
        for line in table.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def is_out_of_memory(error: RuntimeError) -> bool:
    """CUDA has an error of its own for it; the CPU's allocator, Apple's and cuBLAS say it in words."""
    words = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or any(said in words for said in NO_MEMORY)
