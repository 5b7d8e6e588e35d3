"""Adam over stacked weights: each node has its own step count, gradient clip and the right to sit a round out.

A node without usable gradient (nothing to learn from, or a non-finite one) keeps weights and moments untouched, which
an ordinary optimiser over stacked tensors cannot do: its momentum would go on moving that node.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_swarm.policies.engine import kernels_run_on
from rl_swarm.policies.families.parts import Weights

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


class StackedAdam:
    """Moments and step counts for weights of shape (K, ...)."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.first = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self.second = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        # What else must follow the weights: their copies in half precision, under the same names.
        self.copies: Weights = {}
        # Where one kernel can read and write every number once: on a GPU all else is traffic.
        self._in_one_kernel = kernels_run_on(next(iter(weights.values())).device)
        # One number per node: kept on the CPU, where float64 always exists.
        self.steps_K = torch.zeros(next(iter(weights.values())).shape[0], dtype=torch.float64)

    @torch.no_grad()
    def step(
        self, gradients: Weights, active_K: Tensor, learning_rate: float | Tensor, max_norm: float
    ) -> tuple[Tensor, Tensor]:
        """Update the active nodes in place, using up the gradients; returns each node's norm and whether it moved.

        The learning rate is one number, or one for each node.
        """
        norms = [
            torch.linalg.vector_norm(gradient.flatten(1), dim=1, dtype=torch.float32) for gradient in gradients.values()
        ]
        norm_K = torch.stack(norms).cpu().double().square().sum(0).sqrt()
        # Without any gradient there is nothing to move along but momentum.
        moved_K = active_K & norm_K.isfinite() & (norm_K > 0)
        self.steps_K += moved_K
        steps_K = self.steps_K.clamp(min=1)
        # A node that sits out has coefficients of zero: its moments and weights are multiplied by one and stay.
        scale_K = torch.where(norm_K > max_norm, max_norm / norm_K, 1.0).nan_to_num(0.0)
        rate_K = learning_rate * (1 - BETA2**steps_K).sqrt() / (1 - BETA1**steps_K) * moved_K
        epsilon_K = EPSILON * (1 - BETA2**steps_K).sqrt()
        coefficients = torch.stack((scale_K, (1 - BETA1) * moved_K, (1 - BETA2) * moved_K, rate_K, epsilon_K))
        for name, gradient in gradients.items():
            self._move(name, gradient, coefficients.float().to(gradient.device), moved_K)
        if not self._in_one_kernel:
            self.refresh()
        return norm_K, moved_K

    def _move(self, name: str, gradient: Tensor, coefficients: Tensor, moved_K: Tensor) -> None:
        weight, first, second = self.weights[name], self.first[name], self.second[name]
        if self._in_one_kernel:
            from rl_swarm.policies import training_kernels

            training_kernels.adam(weight, first, second, gradient, self.copies.get(name), coefficients)
            return
        gradient = gradient.float()
        scale, first_part, second_part, rate, epsilon = coefficients.view(5, -1, *(1,) * (weight.dim() - 1))
        for k in (~moved_K).nonzero().flatten().tolist():
            gradient[k] = 0.0
        gradient.mul_(scale)
        first.lerp_(gradient, first_part.expand_as(first))
        second.lerp_(gradient.square_(), second_part.expand_as(second))
        weight.sub_(first.div(second.sqrt().add_(epsilon)).mul_(rate))

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the copies up to the weights."""
        for name, copy in self.copies.items():
            copy.copy_(self.weights[name])
