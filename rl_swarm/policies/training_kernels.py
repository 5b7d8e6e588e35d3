"""Kernels for training, written in Triton: what torch would do in many passes over memory, in one.

Shape letters: K nodes, N numbers of a weight.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _adam(
    weight_KN, first_KN, second_KN, gradient_KN, copy_KN, coefficients_5K, N, K,
    BLOCK: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(1).to(tl.int64)
    here = coefficients_5K + k
    scale, first_part, second_part = tl.load(here), tl.load(here + K), tl.load(here + 2 * K)
    if first_part == 0.0:  # this node sits the round out
        return
    rate, epsilon = tl.load(here + 3 * K), tl.load(here + 4 * K)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at, inside = k * N + n, n < N
    gradient = tl.load(gradient_KN + at, mask=inside, other=0.0).to(tl.float32) * scale
    first = tl.load(first_KN + at, mask=inside, other=0.0)
    second = tl.load(second_KN + at, mask=inside, other=0.0)
    first += (gradient - first) * first_part
    second += (gradient * gradient - second) * second_part
    weight = tl.load(weight_KN + at, mask=inside, other=0.0) - first / (tl.sqrt(second) + epsilon) * rate
    tl.store(weight_KN + at, weight, mask=inside)
    tl.store(first_KN + at, first, mask=inside)
    tl.store(second_KN + at, second, mask=inside)
    if COPIED:
        tl.store(copy_KN + at, weight.to(copy_KN.dtype.element_ty), mask=inside)


def adam(
    weight: Tensor, first: Tensor, second: Tensor, gradient: Tensor, copy: Tensor | None, coefficients_5K: Tensor
) -> None:
    """One step of `StackedAdam` in place, every number read and written once, its copy in half precision too."""
    K = len(weight)
    N = weight.numel() // K
    assert all(one.is_contiguous() for one in (weight, first, second)) and (copy is None or copy.is_contiguous())
    _adam[(triton.cdiv(N, 1024), K)](
        weight, first, second, gradient.contiguous(), weight if copy is None else copy, coefficients_5K.contiguous(),
        N, K, BLOCK=1024, COPIED=copy is not None, num_warps=4,
    )  # fmt: skip
