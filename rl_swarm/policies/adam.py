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
        # One number per node: kept on the CPU, where float64 always exists.
        self.steps_K = torch.zeros(next(iter(weights.values())).shape[0], dtype=torch.float64)

    @torch.no_grad()
    def step(
        self, gradients: Weights, active_K: Tensor, learning_rate: float | Tensor, max_norm: float
    ) -> tuple[Tensor, Tensor]:
        """Update the active nodes in place, using up the gradients; returns each node's norm and whether it moved.

        The learning rate is one number, or one for each node.
        """
        squares_K = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients.values()])
        norm_K = squares_K.cpu().double().sum(0).sqrt()
        # Without any gradient there is nothing to move along but momentum.
        moved_K = active_K & norm_K.isfinite() & (norm_K > 0)
        self.steps_K += moved_K
        steps_K = self.steps_K.clamp(min=1)
        # A node that sits out has coefficients of zero: its moments and weights are multiplied by one and stay.
        scale_K = torch.where(norm_K > max_norm, max_norm / norm_K, 1.0)
        rate_K = learning_rate * (1 - BETA2**steps_K).sqrt() / (1 - BETA1**steps_K) * moved_K
        epsilon_K = EPSILON * (1 - BETA2**steps_K).sqrt()
        first_K, second_K = (1 - BETA1) * moved_K, (1 - BETA2) * moved_K
        still = (~moved_K).nonzero().flatten().tolist()
        for name, gradient in gradients.items():
            weight, first, second = self.weights[name], self.first[name], self.second[name]

            def spread(value_K: Tensor, like: Tensor = weight) -> Tensor:
                return value_K.to(like.dtype).to(like.device).view(-1, *(1,) * (like.dim() - 1))

            for k in still:
                gradient[k] = 0.0
            gradient.mul_(spread(scale_K).nan_to_num(0.0))
            first.lerp_(gradient, spread(first_K).expand_as(first))
            second.lerp_(gradient.square_(), spread(second_K).expand_as(second))
            weight.sub_(first.div(second.sqrt().add_(spread(epsilon_K))).mul_(spread(rate_K)))
        return norm_K, moved_K
