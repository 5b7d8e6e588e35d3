"""How much better than its siblings each completion of a group was: plain numbers, no torch.

    std            A_i = (r_i - mean) / (std + 1e-8)      the paper's; std with Bessel's correction, as in public code
    mean           A_i =  r_i - mean                      Dr. GRPO's: groups of little spread are not blown up
    leave_one_out  A_i =  r_i - mean of the others        RLOO's; G/(G-1) times `mean`, an unbiased baseline

Completions that are left out (see TRUNCATED_COMPLETIONS) take no part in the mean and have advantage zero.
"""

from __future__ import annotations

from statistics import fmean, stdev

from rl_swarm.types import ScoredGroup


def advantages(scored: ScoredGroup, rule: str = "std") -> tuple[float, ...]:
    if not scored.informative:
        return (0.0,) * len(scored.rewards)
    counted = scored.counted_rewards
    mean = fmean(counted)
    if rule == "std":
        scale = 1 / (stdev(counted) + 1e-8)
    else:
        scale = len(counted) / (len(counted) - 1) if rule == "leave_one_out" else 1.0
    return tuple(
        0.0 if index in scored.left_out else (reward - mean) * scale for index, reward in enumerate(scored.rewards)
    )
