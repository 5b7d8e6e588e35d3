"""The estimate before the first round counts what is really kept: activations layer by layer, for each family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rl_swarm.policies.batches import TrainingSequence, pad
from rl_swarm.policies.decoder import Grouped, grouped_mask, rotary, run
from rl_swarm.policies.engine import Learning
from rl_swarm.policies.layout import stack
from rl_swarm.policies.memory import Work, estimate
from rl_swarm.policies.reading import read_shape, read_weights
from rl_swarm.policies.stacked import StackedModels, kept_by_layer

pytestmark = pytest.mark.torch
torch.set_num_threads(1)

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 24, "bos_token_id": None, "eos_token_id": 1}
FAMILIES = {
    "llama": transformers.LlamaConfig(**SIZES),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES),
    "gpt2": transformers.GPT2Config(
        vocab_size=64, n_embd=96, n_inner=256, n_layer=3, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=1
    ),
}


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(FAMILIES[request.param]).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("halved", [False, True])
def test_activations_are_estimated_as_they_are_kept(folder: Path, halved: bool) -> None:
    shape = read_shape(folder)
    dtype = torch.bfloat16 if halved else torch.float32
    weights = {name: w.to(dtype).requires_grad_() for name, w in stack(shape, read_weights(folder, shape), 1).items()}
    known = {weight.untyped_storage().data_ptr() for weight in weights.values()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return tensor

    shared = [1, *[2] * 23]
    siblings = [TrainingSequence(shared, [*[3] * 24], 1.0) for _ in range(4)]
    padded = pad([[siblings, siblings]], torch.device("cpu"))
    attend = Grouped(
        shape,
        rotary(shape, weights, padded.positions),
        padded.prompts_KQP,
        grouped_mask(padded.lengths_KQ, 24, 4, 24, dtype),
    )
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = run(shape, weights, padded.tokens, padded.positions, lambda layer: attend)
    assert hidden.requires_grad
    by_token = sum(storage.nbytes() for storage in kept.values()) / padded.tokens.numel() / shape.layers
    estimated = kept_by_layer(shape, halved) * (2 if halved else 4)
    assert 0.85 * estimated < by_token < 1.05 * estimated


def test_weights_and_optimiser_are_counted_exactly(folder: Path) -> None:
    for dtype, copies in (("float32", 0), ("bfloat16", 2)):
        models = StackedModels(3, folder, Learning(1e-4, 8, dtype=dtype, kl_beta=0.1), "cpu")
        found = estimate(models.counts(), Work(8, 16, 64), None, 8192)
        numbers = sum(weight.numel() for weight in models.weights(0).values())
        assert found.held == {"weights": (4 + copies) * 3 * numbers + 4 * numbers, "optimiser": 8 * 3 * numbers}
        assert found.training["gradients"] == 4 * 3 * numbers


def test_little_work_is_not_estimated_as_a_full_pass(folder: Path) -> None:
    counts = StackedModels(1, folder, Learning(1e-4, 8), "cpu").counts()
    little, much = (estimate(counts, Work(4, trained, 64), None, 8192) for trained in (4, 4000))
    assert little.training["activations"] * 32 == much.training["activations"]
    assert little.micro_batch_tokens == much.micro_batch_tokens == 8192
    tight = estimate(counts, Work(4, 4000, 64), much.to_come // 2, 8192)
    assert tight.micro_batch_tokens < 8192
