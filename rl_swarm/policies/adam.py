"""Adam over stacked weights: each node has its own step count, gradient clip and the right to sit a round out.

A node without usable gradient (nothing to learn from, or a non-finite one) keeps weights and moments untouched, which
an ordinary optimiser over stacked tensors cannot do: its momentum would go on moving that node.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_swarm.policies.decoder import Weights

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


class StackedAdam:
    """Moments and step counts for weights of shape (K, ...)."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.first = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self.second = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        sample = next(iter(weights.values()))
        self.steps_K = torch.zeros(sample.shape[0], dtype=torch.float64, device=sample.device)

    @torch.no_grad()
    def step(
        self, gradients: Weights, active_K: Tensor, learning_rate: float, max_norm: float
    ) -> tuple[Tensor, Tensor]:
        """Update the active nodes in place; returns each node's gradient norm and whether it was updated."""
        squares_K = torch.stack([gradient.flatten(1).double().pow(2).sum(1) for gradient in gradients.values()]).sum(0)
        norm_K = squares_K.sqrt()
        moved_K = active_K & norm_K.isfinite()
        self.steps_K += moved_K
        scale_K = torch.where(norm_K > max_norm, max_norm / norm_K, 1.0)
        steps_K = self.steps_K.clamp(min=1)
        rate_K = learning_rate * (1 - BETA2**steps_K).sqrt() / (1 - BETA1**steps_K)
        epsilon_K = EPSILON * (1 - BETA2**steps_K).sqrt()
        for name, gradient in gradients.items():
            weight, first, second = self.weights[name], self.first[name], self.second[name]
            axes = (-1,) + (1,) * (weight.dim() - 1)
            moved = moved_K.view(axes)
            gradient = torch.where(moved, gradient * scale_K.view(axes).to(gradient.dtype), 0.0)
            first.copy_(torch.where(moved, torch.lerp(first, gradient, 1 - BETA1), first))
            second.copy_(torch.where(moved, torch.lerp(second, gradient * gradient, 1 - BETA2), second))
            change = (
                first / (second.sqrt() + epsilon_K.view(axes).to(weight.dtype)) * rate_K.view(axes).to(weight.dtype)
            )
            weight.sub_(torch.where(moved, change, 0.0))
        return norm_K, moved_K
