"""The objective of one round: tensors in, loss out. Every function is pure; equations are per node.

Notation: completion i of the batch has tokens t = 1..|i|, advantage A_i (advantages.py), log-probs logp_t under the
weights being trained and old_t under the weights the round began with; ratio_t = exp(logp_t - old_t).

With one update a round (MINIBATCHES=1) old is logp of the same forward pass: the ratio is 1, no clip can bind, and all
three losses have the gradient of the plain policy gradient, sum_t A_i * grad logp_t. That is the paper's setting. With
several, the first has ratio 1 and the later ones move away from it. The ratio never corrects for who wrote a text: a
peer's completion starts at ratio 1 like the node's own. What corrects for that is an off-policy rule (bottom).

Left out: a value function, entropy bonuses, per-token advantages, and importance weights between the sampler's
arithmetic and the trainer's (they are the same program here; `logprob_gap` in the metrics shows how nearly).

Shape letters: K nodes, S sequences, C completion positions. `real` is 1 where a completion has a token, else 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# These rules weigh a peer's text by how likely its writer says it was.
NEEDS_LOGPROBS = ("topr", "truncated")
# Above this, `truncated` cuts an importance weight off: rare texts must not decide a whole update.
LARGEST_WEIGHT = 2.0


# Losses: per-token losses, and where the clip decided them


def clipped_surrogate(logp: Tensor, old: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """`grpo`: loss_t = -min(ratio_t * A, clip(ratio_t, 1 - low, 1 + high) * A). With high > low, DAPO's clip-higher."""
    ratio = torch.exp(logp - old)
    plain = ratio * advantage
    clipped = ratio.clamp(1 - low, 1 + high) * advantage
    return -torch.minimum(plain, clipped), clipped < plain


def sequence_surrogate(
    logp: Tensor, old: Tensor, advantage: Tensor, real: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """`gspo`: as `grpo` with one ratio for the whole completion, s = exp(mean_t(logp_t - old_t)), at each token.

    Mean over a completion's tokens is GSPO's own aggregation (`sequence`). Its ratios stay near 1: clips of 3e-4 and
    4e-4 are usual where `grpo` has 0.2.
    """
    length = real.sum(-1, keepdim=True).clamp(min=1)
    distance = ((logp - old) * real).sum(-1, keepdim=True) / length
    return clipped_surrogate(distance.expand_as(logp), torch.zeros_like(logp), advantage, low, high)


def clipped_importance(logp: Tensor, old: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """`cispo`: loss_t = -stop_gradient(clip(ratio_t, 1 - low, 1 + high)) * A * logp_t.

    Clips the weight of a token's gradient, never the gradient itself: no token falls silent.
    """
    ratio = torch.exp(logp.detach() - old)
    weight = ratio.clamp(1 - low, 1 + high)
    return -weight * advantage * logp, (weight != ratio) & (advantage != 0)


def token_losses(
    loss: str, logp: Tensor, old: Tensor, advantage: Tensor, real: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """The per-token losses by name."""
    if loss == "grpo":
        return clipped_surrogate(logp, old, advantage, low, high)
    if loss == "gspo":
        return sequence_surrogate(logp, old, advantage, real, low, high)
    return clipped_importance(logp, old, advantage, low, high)


def divergence(logp: Tensor, reference: Tensor) -> Tensor:
    """An estimate of KL(policy || reference) at each token, never negative: exp(d) - d - 1 with d = reference - logp.

    Unbiased for tokens drawn from the policy itself, and used for those alone: on a peer's text it has no bound, and a
    single text that was usual at the start could outweigh everything else.
    """
    difference = reference - logp
    return torch.exp(difference) - difference - 1


# Aggregation: from per-token losses to one number a node


def token_weights(aggregate: str, real_KSC: Tensor, tokens_K: Tensor, sequences_K: Tensor, longest: int) -> Tensor:
    """What each token's loss is multiplied by, so that the sum over a node's whole batch is its loss.

        token     1 / (tokens of the batch)                          the paper's; long completions weigh more
        sequence  1 / (|i| * completions of the batch)               GRPO's first form; every completion weighs the same
        constant  1 / (MAX_NEW_TOKENS * completions of the batch)    Dr. GRPO's: no bias by length

    Counts are those of the whole batch, zero-advantage groups included, however it is cut into micro-batches.
    """
    if aggregate == "token":
        per_token = 1.0 / tokens_K.clamp(min=1)[:, None, None]
    elif aggregate == "sequence":
        lengths_KS1 = real_KSC.sum(-1, keepdim=True).clamp(min=1)
        per_token = 1.0 / (lengths_KS1 * sequences_K.clamp(min=1)[:, None, None])
    else:
        per_token = 1.0 / (longest * sequences_K.clamp(min=1)[:, None, None])
    return real_KSC * per_token


# Peers' text


def corrected(off_policy: str, advantage_G: Tensor, logp_G: Tensor, writer_G: Tensor) -> Tensor:
    """Advantages of a peer's group, corrected for its writer: a text's probability is pi here, and was mu there.

        topr       A >= 0: A;  A < 0: A * min(pi / mu, 1)     arXiv:2503.14286: what is unlikely here is not pushed down
        truncated  w * (A - sum(w * A) / sum(w)), w = min(pi / mu, 2)     truncated importance sampling, for both signs

    Log-probs are sums over a text's tokens, under the weights the round begins with. The second mean in `truncated` is
    needed: weights that differ among siblings make what is left of A push the node away from all it says itself.
    pi / mu is a product over all tokens: for long texts it is nearly always either tiny or cut off. Both believe the
    writer's log-prob; a lie can silence its own text, or make it count as much as the cap allows, and nothing worse.
    The other rules are constants (`negative_weight`) and change nothing here.
    """
    ratio_G = torch.exp((logp_G - writer_G).clamp(max=10.0))
    if off_policy == "topr":
        return torch.where(advantage_G < 0, advantage_G * ratio_G.clamp(max=1.0), advantage_G)
    if off_policy == "truncated":
        weight_G = ratio_G.clamp(max=LARGEST_WEIGHT)
        centre = (weight_G * advantage_G).sum() / weight_G.sum().clamp(min=1e-30)
        return weight_G * (advantage_G - centre)
    return advantage_G


def negative_weight(off_policy: str, foreign: bool, own: float, damped: float) -> float:
    """What a negative advantage is multiplied by; `none` treats a peer's text as the node's own."""
    if not foreign or off_policy == "none":
        return own
    return {"damp": damped, "positive": 0.0}.get(off_policy, 1.0)


def better_than_chance(logp: Tensor, lengths: Tensor, vocabulary: int) -> Tensor:
    """Whether a text is at least as likely, token for token, as one drawn blindly from the vocabulary.

    A peer's text that is not is noise or poison around an answer, and its gradient is enormous.
    """
    return logp >= -lengths * math.log(vocabulary)
