"""Attention over shared prompts as a GPU computes it equals the plain code; Triton's interpreter runs it here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_decoder import FAMILIES, read_stacked, save_random

from rl_swarm.policies import decoder
from rl_swarm.policies.batches import TrainingSequence, pad

pytest.importorskip("triton", reason="there is no Triton for this system")

from rl_swarm.policies.arranging import arranged

pytestmark = pytest.mark.torch
torch.set_num_threads(1)


def siblings(prompt: int, *completions: int) -> list[TrainingSequence]:
    return [TrainingSequence(list(range(1, prompt + 1)), list(range(2, c + 2)), 1.0) for c in completions]


@pytest.mark.parametrize("family", ["gpt2", "llama, grouped queries, untied", "qwen2, untied"])
def test_scores_and_gradients_are_those_of_plain_attention(family: str, tmp_path: Path) -> None:
    """Unequal prompts, unequal numbers of completions, and a node with fewer questions than the other."""
    shape, weights = read_stacked([save_random(FAMILIES[family], tmp_path / str(seed), seed) for seed in (7, 8)])
    for weight in weights.values():
        weight.requires_grad_()
    micro_batch = [[siblings(3, 2, 4, 1), siblings(5, 3)], [siblings(2, 4, 4)]]
    padded = pad(micro_batch, torch.device("cpu"))
    turns = decoder.rotary(shape, weights, padded.positions)
    P, C = padded.prompts_KQP.shape[2], padded.targets_KSC.shape[2]
    mask = decoder.grouped_mask(padded.lengths_KQ, P, padded.siblings, C, torch.float32)
    found = []
    for attend in (
        decoder.Grouped(shape, turns, padded.prompts_KQP, mask),
        arranged(shape, turns, padded.prompts_KQP, mask),
    ):
        x_KND = decoder.run(shape, weights, padded.tokens, padded.positions, lambda _, attend=attend: attend)  # type: ignore[misc]
        scores = decoder.scores(shape, weights, x_KND)
        gradients = torch.autograd.grad(scores.square().mean(), list(weights.values()))
        found.append((scores.detach(), gradients))
    (plain, plain_gradients), (ours, our_gradients) = found
    assert torch.allclose(plain, ours, atol=1e-5)
    for name, one, other in zip(weights, plain_gradients, our_gradients, strict=True):
        assert one.abs().max() > 1e-4
        assert torch.allclose(one, other, atol=1e-6), name
