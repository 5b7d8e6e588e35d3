"""The objective of one round: tensors in, loss out.

    ratio_t = exp(logp_t - old_t)
    loss    = - sum_t w * min(ratio_t * A, clip(ratio_t, 1 - low, 1 + high) * A)  /  number of completion tokens

summed over the completion tokens of a node's batch, one advantage A per completion, w = 1 except for peers' text under
an off-policy rule. There is no KL term. With one update a round, old = logp of the same forward pass, so the ratio is
1 and clipping cannot bind: what is left is the plain policy gradient, as in the paper. A peer's completion is treated
as the node's own (no correction for who wrote it) unless an off-policy rule says otherwise.

Left out so far: several minibatches a round, KL to a reference, sequence-level ratios, other aggregations.

Shape letters: K nodes, S sequences, C completion positions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

# What a negative advantage of a peer's completion counts under `damp`: enough to feel, too little to dominate.
DAMPED = 0.2


def foreign_weight(off_policy: str, advantage: float) -> float:
    """The weight of a peer's completion: `none` is the paper's rule, the others soften pushing down foreign text."""
    if off_policy == "none" or advantage >= 0:
        return 1.0
    return {"damp": DAMPED, "positive": 0.0}[off_policy]


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob of each target, and the entropy of each distribution (a figure, not differentiated)."""
    logp = torch.log_softmax(logits / temperature, -1)
    chosen = logp.gather(-1, targets[..., None])[..., 0]
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    return chosen, entropy


def clipped_surrogate(logp: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """The per-token loss, and whether the clip decided it."""
    ratio = torch.exp(logp - old)
    plain = ratio * advantages
    clipped = ratio.clamp(1 - low, 1 + high) * advantages
    return -torch.minimum(plain, clipped), clipped < plain
