"""Weights go from a folder's layout to the decoder's and back without a bit lost; a filled-up table does no harm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_decoder import FAMILIES, GPT2, SMALL, save_random

from rl_swarm.policies import decoder, reading
from rl_swarm.policies.batches import Padded, TrainingSequence, pad
from rl_swarm.policies.engine import Learning, Models
from rl_swarm.policies.families.parts import Weights
from rl_swarm.policies.huggingface import HuggingfaceModels
from rl_swarm.policies.layout import joined, parted, stack
from rl_swarm.policies.reading import read_shape, read_weights, weight_shapes
from rl_swarm.policies.stacked import StackedModels

pytestmark = pytest.mark.torch
torch.set_num_threads(1)

# As odd as GPT-2's, and large enough to be filled up.
VOCABULARY, FILLED = 4099, 4160
LARGE = {
    "gpt2": transformers.GPT2Config(**GPT2 | {"vocab_size": VOCABULARY, "n_embd": 8, "n_layer": 1}),
    "llama, untied": transformers.LlamaConfig(
        **SMALL | {"vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 1}, num_key_value_heads=2
    ),
}
LEARNING = Learning(learning_rate=1e-2, max_new_tokens=8)


@pytest.mark.parametrize("config", [*FAMILIES.values(), *LARGE.values()], ids=[*FAMILIES, *LARGE])
def test_joined_and_parted_are_each_others_inverse_bit_for_bit(config: Any, tmp_path: Path) -> None:
    save_random(config, tmp_path, 1)
    shape = read_shape(tmp_path)
    weights = read_weights(tmp_path, shape)
    ours = joined(shape, weights)
    back = parted(shape, ours)
    assert list(back) == list(weights) == list(weight_shapes(shape)), "in the order in which they are saved"
    assert all(torch.equal(back[name], weight) for name, weight in weights.items())
    again = joined(shape, back)
    assert again.keys() == ours.keys()
    assert all(torch.equal(again[name], weight) for name, weight in ours.items())
    stacked = stack(shape, weights, 3)
    assert all(torch.equal(stacked[name][k], weight) for name, weight in ours.items() for k in range(3))
    total = sum(weight.numel() for weight in weights.values())
    tables = 1 if shape.tied else 2
    filled = (FILLED - VOCABULARY) * shape.width * tables if shape.vocabulary == VOCABULARY else 0
    assert sum(weight.numel() for weight in ours.values()) == total + filled, "nothing is there twice"


def test_small_vocabularies_and_round_ones_are_left_alone() -> None:
    folder_names = {"gpt2": "transformer.wte.weight", "llama": "model.embed_tokens.weight"}
    for family, embedding in folder_names.items():
        for vocabulary, length in {61: 61, 4095: 4095, 4096: 4096, 4097: 4160, 4160: 4160, 50_257: 50_304}.items():
            config = FAMILIES[family].to_dict() | {"vocab_size": vocabulary}
            config |= {"num_hidden_layers": 0, "n_layer": 0, "hidden_size": 4, "n_embd": 4}
            shape = reading.FAMILIES[family].read_shape(config)
            weights = {name: torch.ones(size) for name, size in weight_shapes(shape).items()}
            table = joined(shape, weights)["embed"]
            assert table.shape[0] == length and weights[embedding].shape[0] == vocabulary
            assert not table[vocabulary:].any()


def batch(nodes: int) -> Padded:
    """Two prompts for each node, the very last tokens of the vocabulary among theirs."""
    generator = torch.Generator().manual_seed(3)

    def ids(length: int) -> list[int]:
        return [*torch.randint(0, VOCABULARY, (length,), generator=generator).tolist(), VOCABULARY - 1]

    groups = []
    for _ in range(nodes):
        prompts = [ids(3), ids(1)]
        groups.append([[TrainingSequence(prompt, ids(2 + r), 1.0 - 1.5 * r) for r in range(2)] for prompt in prompts])
    return pad(groups, torch.device("cpu"))


def accumulate(models: Models, padded: Padded) -> None:
    logprobs, _ = models.logprobs(padded, 1.3)
    (logprobs * padded.advantage_KS1).sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("family", LARGE)
def test_a_filled_up_table_has_the_scores_and_gradients_of_transformers(family: str, tmp_path: Path) -> None:
    folder = save_random(LARGE[family], tmp_path, 5)
    ours, theirs = StackedModels(2, folder, LEARNING, "cpu"), HuggingfaceModels(2, folder, LEARNING, "cpu")
    padded = batch(2)
    for k in range(2):
        found, expected = (models.logprobs(padded, 1.3)[0][k] for models in (ours, theirs))
        assert (found - expected).abs().max() < 1e-5
    for models in (ours, theirs):
        accumulate(models, padded)
    for k in range(2):
        gradients, expected_gradients = ours.gradients(k), theirs.gradients(k)
        assert gradients.keys() == expected_gradients.keys()
        for name, gradient in expected_gradients.items():
            assert gradients[name].shape == gradient.shape
            assert (gradients[name] - gradient).norm() < 1e-5 * gradient.norm() + 1e-6, name


@pytest.mark.parametrize("family", LARGE)
def test_what_a_table_is_filled_up_with_stays_zero_and_has_no_scores(family: str, tmp_path: Path) -> None:
    folder = save_random(LARGE[family], tmp_path, 5)
    models = StackedModels(2, folder, LEARNING, "cpu")
    before = models.weights(0)
    for _ in range(3):
        accumulate(models, batch(2))
        models.step(torch.tensor([True, True]), 0.01, 1.0)
    weights: Weights = models._adam.weights
    tables = [weights[name] for name in ("embed", "head") if name in weights]
    for table in tables:
        assert table.shape[1] == FILLED
        assert not table[:, VOCABULARY:].any() and table[:, :VOCABULARY].any()
    after = models.weights(0)
    assert all(after[name].shape == weight.shape for name, weight in before.items())
    assert all(not torch.equal(after[name], weight) for name, weight in before.items())
    shape = read_shape(folder)
    assert decoder.scores(shape, weights, torch.randn(2, 3, shape.width)).shape == (2, 3, VOCABULARY)
    # So hot that the last number falls on the last token.
    uniform = torch.full((2, 1, 4), 1 - 2**-20)
    sampled = models.sample([[[1, 2]], [[3]]], uniform, ends=[-1], temperature=1e6, top_p=1.0)
    assert sampled.ids_KSC.max() == VOCABULARY - 1
