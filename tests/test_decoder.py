"""The decoder computes what transformers computes, stacked or not, sampling or training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from rl_swarm.errors import ModelError
from rl_swarm.models import PICO_FOLDER
from rl_swarm.policies import sampling
from rl_swarm.policies.decoder import Shape, Weights, forward, logits, read_shape, read_weights, stack
from rl_swarm.policies.tokens import Tokens

pytestmark = pytest.mark.torch
torch.set_num_threads(1)

LLAMA = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES = {
    "llama": transformers.LlamaConfig(**LLAMA, num_key_value_heads=4, tie_word_embeddings=True),
    "llama, grouped queries, untied": transformers.LlamaConfig(**LLAMA, num_key_value_heads=2, rms_norm_eps=1e-5),
    "qwen2": transformers.Qwen2Config(**LLAMA, num_key_value_heads=2, rope_theta=1e6, tie_word_embeddings=True),
}


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A random tiny model of each family, as transformers saves it."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[request.param])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path)
    return tmp_path


def ours(shape: Shape, weights: Weights, ids: list[int], padding: int) -> torch.Tensor:
    """Logits of one sequence for node 0, with some padding on the right."""
    K = weights["model.norm.weight"].shape[0]
    padded = torch.tensor(ids + [0] * padding).expand(K, 1, -1)
    positions = torch.arange(padded.shape[-1]).expand(K, 1, -1)
    hidden = forward(shape, weights, padded, positions)
    return logits(shape, weights, hidden.view(K, -1, shape.width))[0, : len(ids)]


@pytest.mark.parametrize("padding", [0, 1, 9])
def test_logits_equal_those_of_transformers_at_any_padding(folder: Path, padding: int) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    shape = read_shape(folder)
    weights = stack(read_weights(folder, shape), 2)
    generator = torch.Generator().manual_seed(padding)
    for length in (1, 3, 11):
        ids = torch.randint(shape.vocabulary, (length,), generator=generator).tolist()
        expected = reference(torch.tensor([ids])).logits[0]
        assert (ours(shape, weights, ids, padding) - expected).abs().max() < 1e-4


def test_greedy_decoding_equals_that_of_transformers_for_prompts_of_unequal_length(folder: Path) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    shape = read_shape(folder)
    weights = stack(read_weights(folder, shape), 1)
    prompts = [[5, 9, 2], [7], [3, 1, 4, 1, 5, 9, 2, 6]]
    sampled = sampling.sample(
        shape, weights, [prompts], 2, [0], ends=[-1], max_new_tokens=7, temperature=0.0, top_p=1.0
    )
    for q, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        expected = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=7,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        for sibling in (0, 1):
            assert sampled.ids_KSC[0, 2 * q + sibling].tolist() == expected[0, len(prompt) :].tolist()


def test_log_probs_of_sampling_equal_those_of_a_plain_forward_pass(folder: Path) -> None:
    shape = read_shape(folder)
    weights = stack(read_weights(folder, shape), 1)
    prompts = [[5, 9, 2], [7], [3, 1, 4, 1, 5, 9, 2, 6]]
    sampled = sampling.sample(
        shape, weights, [prompts], 3, [11], ends=[4, 6], max_new_tokens=9, temperature=0.7, top_p=1.0
    )
    for s in range(9):
        length = int(sampled.lengths_KS[0, s])
        prompt, completion = prompts[s // 3], sampled.ids_KSC[0, s, :length].tolist()
        assert not {4, 6} & set(completion[:-1]), "nothing is counted after the end of text"
        assert bool(sampled.stopped_KS[0, s]) == (completion[-1] in (4, 6))
        scores = torch.log_softmax(ours(shape, weights, prompt + completion, 2) / 0.7, -1)
        for c, token in enumerate(completion):
            expected = scores[len(prompt) - 1 + c, token]
            assert abs(float(sampled.logprobs_KSC[0, s, c] - expected)) < 1e-4


def test_nodes_with_different_weights_do_not_disturb_each_other(folder: Path) -> None:
    shape = read_shape(folder)
    single = read_weights(folder, shape)
    other = {name: weight + 0.1 * torch.randn_like(weight) for name, weight in single.items()}
    both = {name: torch.stack((single[name], other[name])) for name in single}
    prompts = [[[5, 9, 2], [7]], [[1, 2, 3, 4], [8, 8]]]

    def sample(weights: Weights, prompts: list[list[list[int]]], seeds: list[int]) -> sampling.Sampled:
        return sampling.sample(
            shape, weights, prompts, 4, seeds, ends=[3], max_new_tokens=8, temperature=1.0, top_p=0.9
        )

    together = sample(both, prompts, [1, 2])
    for k, weights in enumerate((single, other)):
        alone = sample(stack(weights, 1), prompts[k : k + 1], [k + 1])
        for s in range(8):
            length = int(alone.lengths_KS[0, s])
            assert together.lengths_KS[k, s] == length
            assert together.ids_KSC[k, s, :length].tolist() == alone.ids_KSC[0, s, :length].tolist()


def test_sampling_follows_the_distribution() -> None:
    scores = torch.tensor([[[2.0, 1.0, 0.0, -1.0]]]).expand(1, 40_000, 4)
    uniform = torch.rand(1, 40_000, generator=torch.Generator().manual_seed(0))
    ids, logprobs = sampling.pick(scores, uniform, temperature=2.0, top_p=1.0)
    expected = torch.softmax(torch.tensor([2.0, 1.0, 0.0, -1.0]) / 2.0, 0)
    counts = torch.bincount(ids[0], minlength=4) / 40_000
    assert (counts - expected).abs().max() < 0.01
    assert torch.allclose(logprobs[0], expected.log()[ids[0]], atol=1e-5)


def test_top_p_leaves_out_the_tail() -> None:
    scores = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(1, 5000, 4)
    uniform = torch.rand(1, 5000, generator=torch.Generator().manual_seed(0))
    ids, _ = sampling.pick(scores, uniform, temperature=1.0, top_p=0.75)
    assert set(ids[0].tolist()) == {0, 1}
    assert abs(float((ids == 0).float().mean()) - 0.5 / 0.8) < 0.03


def test_the_embedded_model_loads_in_transformers_and_answers_alike() -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(PICO_FOLDER)
    tokenizer = transformers.AutoTokenizer.from_pretrained(PICO_FOLDER)
    tokens, shape = Tokens(PICO_FOLDER), read_shape(PICO_FOLDER)
    weights = stack(read_weights(PICO_FOLDER, shape), 1)
    for text in ("47+85=", "gcd(48,36)=<answer>12</answer>", "rev(abc)="):
        ids = tokens.encode(text)
        assert tokenizer(text).input_ids == ids
        assert tokens.decode(ids) == text
        assert (ours(shape, weights, ids, 3) - reference(torch.tensor([ids])).logits[0]).abs().max() < 1e-4
    assert sum(file.stat().st_size for file in PICO_FOLDER.iterdir()) < 4 * 2**20
    assert 0.7e6 < sum(weight.numel() for weight in weights.values()) < 1.3e6


def test_folders_that_are_no_model_are_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ModelError, match="'mamba'"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(ModelError, match="cannot be read"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text((PICO_FOLDER / "config.json").read_text())
    shape = read_shape(tmp_path)
    with pytest.raises(ModelError, match="no weights"):
        read_weights(tmp_path, shape)
    (tmp_path / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(ModelError, match="cannot be read"):
        read_weights(tmp_path, shape)
    with pytest.raises(ModelError, match="no tokenizer"):
        Tokens(tmp_path)
