"""Log-probs of chosen tokens without ever holding the scores over the vocabulary for a whole batch.

Shape letters: K nodes, N positions, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Scores over the vocabulary held at a time, as 4-byte numbers: 128 MiB. Softmax and gradient need a few times that.
CHUNK_NUMBERS = 2**25


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob of each target, and the entropy of each distribution (a figure, not differentiated)."""
    if torch.compiler.is_compiling():
        return _fusible_logprobs(logits.float() / temperature, targets)
    logp = torch.log_softmax(logits.float() / temperature, -1)
    chosen = logp.gather(-1, targets[..., None])[..., 0]
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    return chosen, entropy


def _fusible_logprobs(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same in a form that compiles into one pass over the scores each way: nothing is scattered."""
    chosen = torch.arange(scores.shape[-1], device=scores.device) == targets[..., None]
    total = torch.logsumexp(scores, -1)
    with torch.no_grad():
        entropy = total - (torch.exp(scores - total[..., None]) * scores).sum(-1)
    return torch.where(chosen, scores, 0.0).sum(-1) - total, entropy


Score = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def chunked_logprobs(
    head: Callable[[Tensor], Tensor],
    hidden_KND: Tensor,
    targets_KN: Tensor,
    temperature: float,
    vocabulary: int,
    most_numbers: int = CHUNK_NUMBERS,
) -> tuple[Tensor, Tensor]:
    """As `token_logprobs(head(hidden), targets)`, a chunk of positions at a time."""

    def score(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(head(hidden), targets, temperature)

    return in_chunks(score, hidden_KND, targets_KN, vocabulary, most_numbers)


def in_chunks(
    score: Score, hidden_KND: Tensor, targets_KN: Tensor, vocabulary: int, most_numbers: int
) -> tuple[Tensor, Tensor]:
    """As `score(hidden, targets)`, a chunk of positions at a time.

    The scores of a chunk are computed again on the way back instead of being kept, unless there is only one.
    """
    K, N, _ = hidden_KND.shape
    size = max(1, most_numbers // (K * vocabulary))
    if size >= N:
        return score(hidden_KND, targets_KN)
    parts: list[tuple[Tensor, Tensor]] = []
    for start in range(0, N, size):
        piece = (hidden_KND[:, start : start + size], targets_KN[:, start : start + size])
        parts.append(checkpoint(score, *piece, use_reentrant=False) if torch.is_grad_enabled() else score(*piece))
    return torch.cat([logp for logp, _ in parts], 1), torch.cat([entropy for _, entropy in parts], 1)


def at_real_positions(
    score: Score,
    hidden_KND: Tensor,
    source_KSC: Tensor,
    targets_KSC: Tensor,
    real_KSC: Tensor,
) -> tuple[Tensor, Tensor]:
    """Score completion tokens and nothing else: padding costs memory and time by the vocabulary's size.

    `source` says which of the hidden states scores a completion's token. Real positions are packed side by side, (K, M)
    with M the most any node has, scored, and put back in their places; everywhere else there is zero.
    """
    K, S, C = source_KSC.shape
    real = real_KSC.reshape(K, S * C).bool()
    # A stable sort brings each node's real positions to the front, in order.
    order_KM = (~real).to(torch.int8).argsort(dim=1, stable=True)[:, : int(real.sum(1).max())]
    source_KM = source_KSC.reshape(K, S * C).gather(1, order_KM)
    targets_KM = targets_KSC.reshape(K, S * C).gather(1, order_KM)
    # Siblings' first tokens are scored by one state. Indexing sums its gradients in a fixed order; `gather` would not.
    offsets_K1 = torch.arange(K, device=source_KM.device)[:, None] * hidden_KND.shape[1]
    hidden_KMD = hidden_KND.flatten(0, 1)[source_KM + offsets_K1]
    logp_KM, entropy_KM = score(hidden_KMD, targets_KM)

    def back(values_KM: Tensor) -> Tensor:
        # A node with fewer real positions than M had others scored for company: those are dropped.
        found = values_KM.new_zeros(K, S * C).scatter(1, order_KM, values_KM)
        return torch.where(real, found, 0.0).view(K, S, C)

    return back(logp_KM), back(entropy_KM)
