"""Which of the peers' groups a node trains on: each rule is one function (candidates, how many, rng) -> chosen.

Candidates come in a canonical order, so a rule that draws only from `rng` gives the same choice on every replay.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from rl_swarm.protocols import Select
from rl_swarm.types import ScoredGroup


def informative(candidates: Sequence[ScoredGroup], count: int, rng: random.Random) -> list[ScoredGroup]:
    """The paper's rule: drop groups whose advantages are all zero, then draw uniformly without replacement."""
    return uniform([group for group in candidates if group.informative], count, rng)


def uniform(candidates: Sequence[ScoredGroup], count: int, rng: random.Random) -> list[ScoredGroup]:
    """No filter: a control that shows what the filter is worth."""
    return rng.sample(list(candidates), min(count, len(candidates)))


RULES: dict[str, Select] = {"informative": informative, "uniform": uniform}
