"""What a metrics row says of a round of learning, gathered pass by pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rl_swarm.policies.batches import Padded


@dataclass(slots=True)
class Figures:
    """What one node's row says of its round of learning."""

    loss: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    seen: float = 0.0
    unlikely: float = 0.0
    divergence: float = 0.0
    own_seen: float = 0.0
    gap: float | None = None
    norms: float = 0.0
    updates: int = 0
    dropped: int = 0
    trained_tokens: int = 0

    def add(self, other: Figures) -> None:
        """Take in the figures of one update's passes."""
        self.loss += other.loss
        self.entropy += other.entropy
        self.clipped += other.clipped
        self.seen += other.seen
        self.unlikely += other.unlikely
        self.divergence += other.divergence
        self.own_seen += other.own_seen
        if other.gap is not None:
            self.gap = max(self.gap or 0.0, other.gap)

    def step(self, norm: float, moved: bool) -> None:
        self.norms += norm
        self.updates += moved
        # A gradient of nothing at all is no failure.
        self.dropped += not moved and norm != 0

    def row(self) -> dict[str, float]:
        """Means over tokens and updates; where there was nothing to learn from, nothing is claimed."""
        tried = self.updates + self.dropped
        row: dict[str, float] = {
            "loss": self.loss / max(1, tried),
            "grad_norm": self.norms / max(1, tried),
            "trained_tokens": self.trained_tokens,
            "updated": float(self.updates > 0),
            "dropped_updates": self.dropped,
        }
        if self.seen:
            row |= {
                "entropy": self.entropy / self.seen,
                "clip_fraction": self.clipped / self.seen,
                "unlikely_texts": self.unlikely,
            }
        if self.own_seen:
            row["kl"] = self.divergence / self.own_seen
        if self.gap is not None:
            row["logprob_gap"] = self.gap
        return row


def note_gap(figures: Sequence[Figures], padded: Padded, logp_KSC: Tensor) -> None:
    """How far the log-probs of training are from those of sampling, at the worst token of the node's own.

    Only under the weights they were sampled with: where older log-probs are known, that was noted when they were.
    """
    known_KSC = ~padded.sampled_KSC.isnan() & padded.old_KSC.isnan() & padded.real_KSC.bool()
    distance_KSC = (logp_KSC - padded.sampled_KSC).abs().masked_fill(~known_KSC, 0.0)
    known_K = known_KSC.flatten(1).any(1).tolist()
    for one, known, worst in zip(figures, known_K, distance_KSC.flatten(1).amax(1).tolist(), strict=True):
        if known:
            one.gap = max(one.gap or 0.0, worst)
