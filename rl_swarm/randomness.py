"""Randomness by name: every draw is a function of (seed, node, purpose, step), never of what was drawn before.

So a restarted node replays a step exactly, co-hosted nodes cannot disturb one another, and a checkpoint needs no
generator state: the step it was taken at says it all.
"""

from __future__ import annotations

import hashlib
import random

from rl_swarm.types import Step

# Question seeds and generator seeds stay inside what every JSON reader holds exactly.
SEED_BITS = 48


def named_seed(seed: int, node: str, purpose: str, step: Step) -> int:
    name = f"{seed}\x1f{node}\x1f{purpose}\x1f{step.round}\x1f{step.stage}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> (64 - SEED_BITS)


def named_rng(seed: int, node: str, purpose: str, step: Step) -> random.Random:
    return random.Random(named_seed(seed, node, purpose, step))
