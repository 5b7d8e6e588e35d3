"""The models that MODEL_NAME=auto chooses from: by the GPU's memory, and within a pool by the node's name."""

from __future__ import annotations

from typing import NamedTuple

from rl_swarm.randomness import named_rng
from rl_swarm.types import Step

AUTO = "auto"
GIB = 2**30

SMALL_POOL = ("Gensyn/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-0.6B")
LARGE_POOL = ("nvidia/AceInstruct-1.5B", "dnotitia/Smoothie-Qwen3-1.7B", "Gensyn/Qwen2.5-1.5B-Instruct")

# The large pool is for cards of 40 GiB and more. Such a card reports a little over 39: its driver keeps the rest.
LARGE_FROM = 38 * GIB


class Choice(NamedTuple):
    model: str
    reason: str


def choose_model(memory: int, seed: int, node: str) -> Choice:
    """A model for a GPU with so many bytes of memory, 0 where there is none; the same at every start."""
    size, pool = ("large", LARGE_POOL) if memory >= LARGE_FROM else ("small", SMALL_POOL)
    model = named_rng(seed, node, "model", Step(0)).choice(pool)
    found = f"{memory / GIB:.0f} GiB of GPU memory" if memory else "no GPU"
    return Choice(model, f"auto: {found}, so one of the {size} pool: {model}")


def is_pooled(model: str) -> bool:
    return model in SMALL_POOL + LARGE_POOL
