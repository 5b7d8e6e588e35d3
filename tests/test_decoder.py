"""The decoder computes what transformers computes, for every family, stacked or not, sampling or training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rl_swarm.errors import ModelError
from rl_swarm.models import PICO_FOLDER
from rl_swarm.policies import sampling
from rl_swarm.policies.decoder import forward
from rl_swarm.policies.families.parts import Shape, Weights
from rl_swarm.policies.layout import joined, parted, stack
from rl_swarm.policies.reading import read_config, read_shape, read_weights, unsupported
from rl_swarm.policies.tokens import Tokens

pytestmark = pytest.mark.torch
torch.set_num_threads(1)

SMALL = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
PUBLISHED = "gpt2, named as published"
FAMILIES = {
    "gpt2": transformers.GPT2Config(**GPT2),
    PUBLISHED: transformers.GPT2Config(**GPT2),
    "gpt2, untied, own feed-forward width": transformers.GPT2Config(**GPT2, n_inner=40, tie_word_embeddings=False),
    "llama": transformers.LlamaConfig(**SMALL, num_key_value_heads=4, tie_word_embeddings=True),
    "llama, grouped queries, untied": transformers.LlamaConfig(**SMALL, num_key_value_heads=2, rms_norm_eps=1e-5),
    "llama, biases": transformers.LlamaConfig(**SMALL, num_key_value_heads=2, attention_bias=True, mlp_bias=True),
    "qwen2": transformers.Qwen2Config(**SMALL, num_key_value_heads=2, rope_theta=1e6, tie_word_embeddings=True),
    "qwen2, untied": transformers.Qwen2Config(**SMALL, num_key_value_heads=1),
    "qwen3": transformers.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=12, tie_word_embeddings=True),
    "qwen3, biases, untied": transformers.Qwen3Config(
        **SMALL, num_key_value_heads=2, head_dim=16, rope_theta=1e6, attention_bias=True
    ),
}
PROMPTS = [[5, 9, 2], [7], [3, 1, 4, 1, 5, 9, 2, 6]]


def save_random(config: Any, folder: Path, seed: int) -> Path:
    """A tiny model as transformers saves it; no weight keeps a value, one or zero, that would hide a mistake."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        start = parameter.detach() if parameter.dim() == 1 else torch.zeros(())
        parameter.data = start + 0.3 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    return folder


def name_as_published(folder: Path) -> Path:
    """The published GPT-2 was saved from the bare model, with its causal masks."""
    path = folder / "model.safetensors"
    weights = {name.removeprefix("transformer."): weight for name, weight in load_file(path).items()}
    for layer in range(GPT2["n_layer"]):
        weights[f"h.{layer}.attn.bias"] = torch.ones(64, 64).tril().view(1, 1, 64, 64)
        weights[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(weights, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(params=FAMILIES)
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """Two models of one shape, one pair for each family."""
    pair = [save_random(FAMILIES[request.param], tmp_path / str(seed), seed) for seed in (7, 8)]
    if request.param == PUBLISHED:
        pair = [name_as_published(folder) for folder in pair]
    return pair[0], pair[1]


@pytest.fixture
def folder(folders: tuple[Path, Path]) -> Path:
    return folders[0]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def read_stacked(folders: Sequence[Path]) -> tuple[Shape, Weights]:
    """A node for each folder."""
    shape = read_shape(folders[0])
    single = [joined(shape, read_weights(folder, shape)) for folder in folders]
    return shape, {name: torch.stack([weights[name] for weights in single]) for name in single[0]}


def random_ids(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(61, (length,), generator=generator).tolist() for length in lengths]


def scores(
    shape: Shape, weights: Weights, texts: Sequence[Sequence[Sequence[int]]], padding: int, checkpointed: bool = False
) -> torch.Tensor:
    """Logits (K, S, T, V) of every node's texts, padded on the right to the longest and further."""
    longest = max(len(ids) for node in texts for ids in node) + padding
    ids_KST = torch.tensor([[[*ids, *[0] * (longest - len(ids))] for ids in node] for node in texts])
    positions = torch.arange(longest).expand_as(ids_KST)
    return forward(shape, weights, ids_KST, positions, checkpointed=checkpointed)


def generate(
    shape: Shape,
    weights: Weights,
    prompts: Sequence[Sequence[Sequence[int]]],
    group_size: int,
    seeds: Sequence[int],
    ends: Sequence[int],
    new_tokens: int,
    temperature: float,
    top_p: float = 1.0,
) -> sampling.Sampled:
    uniform_KSC = sampling.draws(seeds, len(prompts[0]) * group_size, new_tokens)
    return sampling.sample(shape, weights, prompts, uniform_KSC, ends=ends, temperature=temperature, top_p=top_p)


def log_probs(logits_TV: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    """Of each token but the first."""
    return torch.log_softmax(logits_TV[:-1], -1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.mark.parametrize("padding", [0, 1, 7])
def test_every_node_of_a_stack_computes_what_transformers_computes(folders: tuple[Path, Path], padding: int) -> None:
    shape, weights = read_stacked(folders)
    texts = [random_ids((1, 3, 11), seed=1), random_ids((6, 2, 4), seed=2)]
    ours_KSTV = scores(shape, weights, texts, padding)
    for k, folder in enumerate(folders):
        reference = load(folder)
        for s, ids in enumerate(texts[k]):
            ours, expected = ours_KSTV[k, s, : len(ids)], reference(torch.tensor([ids])).logits[0]
            assert expected.std() > 0.3, "differences would show"
            assert (ours - expected).abs().max() < 1e-4
            if len(ids) > 1:
                assert (log_probs(ours, ids) - log_probs(expected, ids)).abs().max() < 1e-4


def test_far_positions_are_rounded_as_in_transformers(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, max_position_embeddings=4096)
    shape, weights = read_stacked([save_random(config, tmp_path, 3)])
    ids = random_ids((3000,))[0]
    with torch.no_grad():
        ours, expected = scores(shape, weights, [[ids]], 0)[0], load(tmp_path)(torch.tensor([ids])).logits
    assert (ours - expected).abs().max() < 1e-4


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_equal_those_of_transformers(folders: tuple[Path, Path], checkpointed: bool) -> None:
    shape, weights = read_stacked(folders)
    for weight in weights.values():
        weight.requires_grad_()
    texts = [random_ids((9, 5), seed=1), random_ids((4, 7), seed=2)]
    ours_KSTV = scores(shape, weights, texts, 1, checkpointed)
    every = [log_probs(ours_KSTV[k, s, : len(ids)], ids) for k in (0, 1) for s, ids in enumerate(texts[k])]
    torch.cat(every).sum().backward()  # type: ignore[no-untyped-call]
    for k, folder in enumerate(folders):
        reference = load(folder)
        for ids in texts[k]:
            log_probs(reference(torch.tensor([ids])).logits[0], ids).sum().backward()  # type: ignore[no-untyped-call]
        expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
        found = {name: weight.grad[k] for name, weight in weights.items() if weight.grad is not None}
        ours = parted(shape, found)
        assert expected.keys() == ours.keys()
        for name, gradient in expected.items():
            assert gradient.abs().max() > 1e-3
            assert torch.allclose(ours[name], gradient, rtol=1e-3, atol=1e-4), name


def test_greedy_decoding_equals_that_of_transformers_for_prompts_of_unequal_length(folders: tuple[Path, Path]) -> None:
    shape, weights = read_stacked(folders)
    sampled = generate(shape, weights, [PROMPTS, PROMPTS], 2, [0, 0], ends=[-1], new_tokens=7, temperature=0.0)
    for k, folder in enumerate(folders):
        reference = load(folder)
        for q, prompt in enumerate(PROMPTS):
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
                assert sampled.ids_KSC[k, 2 * q + sibling].tolist() == expected[0, len(prompt) :].tolist()


def test_log_probs_of_sampling_equal_those_of_a_plain_forward_pass(folder: Path) -> None:
    shape, weights = read_stacked([folder])
    sampled = generate(shape, weights, [PROMPTS], 3, [11], ends=[4, 6], new_tokens=9, temperature=0.7)
    for s in range(9):
        length = int(sampled.lengths_KS[0, s])
        prompt, completion = PROMPTS[s // 3], sampled.ids_KSC[0, s, :length].tolist()
        assert not {4, 6} & set(completion[:-1]), "nothing is counted after the end of text"
        assert bool(sampled.stopped_KS[0, s]) == (completion[-1] in (4, 6))
        ids = prompt + completion
        expected = log_probs(scores(shape, weights, [[ids]], 2)[0, 0, : len(ids)] / 0.7, ids)[-length:]
        assert (sampled.logprobs_KSC[0, s, :length] - expected).abs().max() < 1e-4


def test_nodes_with_different_weights_do_not_disturb_each_other(folders: tuple[Path, Path]) -> None:
    shape, both = read_stacked(folders)
    prompts = [[[5, 9, 2], [7]], [[1, 2, 3, 4], [8, 8]]]

    def sample(weights: Weights, prompts: list[list[list[int]]], seeds: list[int]) -> sampling.Sampled:
        return generate(shape, weights, prompts, 4, seeds, ends=[3], new_tokens=8, temperature=1.0, top_p=0.9)

    together = sample(both, prompts, [1, 2])
    for k, folder in enumerate(folders):
        alone = sample(stack(shape, read_weights(folder, shape), 1), prompts[k : k + 1], [k + 1])
        for s in range(8):
            length = int(alone.lengths_KS[0, s])
            assert together.lengths_KS[k, s] == length
            assert together.ids_KSC[k, s, :length].tolist() == alone.ids_KSC[0, s, :length].tolist()


def test_a_slice_of_the_stack_is_a_model_that_transformers_loads(folders: tuple[Path, Path], tmp_path: Path) -> None:
    shape, weights = read_stacked(folders)
    weights = {name: weight + 0.1 for name, weight in weights.items()}
    ids = random_ids((9,))[0]
    ours_KSTV = scores(shape, weights, [[ids], [ids]], 0)
    for k, folder in enumerate(folders):
        out = tmp_path / f"out{k}"
        out.mkdir()
        (out / "config.json").write_text((folder / "config.json").read_text())
        single = parted(shape, {name: weight[k] for name, weight in weights.items()})
        save_file({name: weight.contiguous() for name, weight in single.items()}, out / "model.safetensors")
        reference, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert (ours_KSTV[k, 0] - reference(torch.tensor([ids])).logits[0]).abs().max() < 1e-4


def test_bfloat16_is_as_near_to_float32_as_that_of_transformers(folder: Path) -> None:
    shape, weights = read_stacked([folder])
    texts = random_ids((12,) * 20)
    exact = load(folder)(torch.tensor(texts)).logits
    theirs = load(folder, torch.bfloat16)(torch.tensor(texts)).logits.float()
    halved = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
    ours = scores(shape, halved, [texts], 0)[0]
    error = (theirs - exact).abs().mean()
    assert (ours - exact).abs().mean() < 1.1 * error
    assert (ours - theirs).abs().mean() < error


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
    reference = load(PICO_FOLDER)
    tokenizer = transformers.AutoTokenizer.from_pretrained(PICO_FOLDER)
    tokens, (shape, weights) = Tokens(PICO_FOLDER), read_stacked([PICO_FOLDER])
    for text in ("47+85=", "gcd(48,36)=<answer>12</answer>", "rev(abc)="):
        ids = tokens.encode(text)
        assert tokenizer(text).input_ids == ids
        assert tokens.decode(ids) == text
        ours = scores(shape, weights, [[ids]], 3)[0, 0, : len(ids)]
        assert (ours - reference(torch.tensor([ids])).logits[0]).abs().max() < 1e-4
    assert sum(file.stat().st_size for file in PICO_FOLDER.iterdir()) < 4 * 2**20
    assert 0.7e6 < sum(weight.numel() for weight in weights.values()) < 1.3e6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_stored_in_half_precision_and_in_shards_are_read_as_float32(folder: Path, dtype: torch.dtype) -> None:
    whole = read_weights(folder, read_shape(folder))
    sharded = folder / "sharded"
    load(folder, dtype).save_pretrained(sharded, max_shard_size="10KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    weights = read_weights(sharded, read_shape(sharded))
    assert weights.keys() == whole.keys()
    for name, weight in weights.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, whole[name].to(dtype).float())


def test_the_whole_model_is_read_whatever_lies_beside_it(tmp_path: Path) -> None:
    folder = save_random(FAMILIES["llama"], tmp_path, 1)
    shape = read_shape(folder)
    expected = read_weights(folder, shape)
    save_file({name: torch.zeros_like(weight) for name, weight in expected.items()}, folder / "other.safetensors")
    assert all(torch.equal(weight, expected[name]) for name, weight in read_weights(folder, shape).items())


def test_a_folder_of_older_transformers_is_read_alike(tmp_path: Path) -> None:
    config = json.loads((save_random(FAMILIES["qwen2"], tmp_path, 1) / "config.json").read_text())
    shape = read_shape(tmp_path)
    assert shape.rotary_base == 1e6
    older = {name: value for name, value in config.items() if name not in ("rope_parameters", "layer_types")}
    (tmp_path / "config.json").write_text(json.dumps(older | {"rope_theta": 1e6, "rope_scaling": None}))
    assert read_shape(tmp_path) == shape


def test_what_a_configuration_leaves_out_is_what_transformers_assumes(tmp_path: Path) -> None:
    optional = {"num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "n_inner"}
    for name in ("gpt2", "llama", "qwen2", "qwen3"):
        assumed = type(FAMILIES[name])()
        told = {key: value for key, value in assumed.to_dict().items() if key not in optional}
        (tmp_path / "config.json").write_text(json.dumps(told))
        shape = read_shape(tmp_path)
        assert shape.tied == assumed.tie_word_embeddings
        if name == "gpt2":
            assert shape.ffn == 4 * assumed.n_embd
        else:
            head_width = getattr(assumed, "head_dim", assumed.hidden_size // assumed.num_attention_heads)
            assert (shape.head_width, shape.kv_heads) == (head_width, assumed.num_key_value_heads)
            assert (shape.norm_epsilon, shape.rotary_base) == (
                assumed.rms_norm_eps,
                assumed.rope_parameters["rope_theta"],
            )


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("llama", {"model_type": "mamba"}, "is a 'mamba' model"),
        ("llama", {"model_type": None}, "is a None model"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "scaled rotary"),
        ("llama", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "scaled rotary"),
        ("llama", {"rope_parameters": "yarn"}, "scaled rotary"),
        ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "differ by layer"),
        ("llama", {"partial_rotary_factor": 0.5}, "partly rotary"),
        ("llama", {"hidden_act": "gelu"}, "silu"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ("qwen2", {"use_sliding_window": True}, "sliding window"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scaled by layer"),
        ("gpt2", {"scale_attn_weights": False}, "unscaled attention"),
        ("gpt2", {"reorder_and_upcast_attn": True}, "reordered attention"),
        ("gpt2", {"add_cross_attention": True}, "cross attention"),
        ("gpt2", {"activation_function": "relu"}, "gelu_new"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_with_its_reason(
    family: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = FAMILIES[family].to_dict()
    assert unsupported(config) is None
    config |= changes
    told = unsupported(config)
    assert told is not None and reason in told
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        read_shape(tmp_path)
    assert f"{tmp_path} {told};" in str(caught.value)


def test_folders_that_are_no_model_are_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_config(tmp_path)
    for text, sentence in {
        '{"model_type": "llama"': "cannot be read",
        "[]": "does not describe a model",
        '{"model_type": "llama", "hidden_size": 32}': "lacks 'num_attention_heads'",
        '{"model_type": "gpt2", "n_embd": "wide"}': "does not describe a model: .*'wide'",
    }.items():
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=sentence):
            read_shape(tmp_path)
    (tmp_path / "config.json").write_text((PICO_FOLDER / "config.json").read_text())
    shape = read_shape(tmp_path)
    with pytest.raises(ModelError, match="no weights"):
        read_weights(tmp_path, shape)
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.* save_pretrained"):
        read_weights(tmp_path, shape)
    (tmp_path / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(ModelError, match="cannot be read"):
        read_weights(tmp_path, shape)
    with pytest.raises(ModelError, match="no tokenizer"):
        Tokens(tmp_path)


def test_weights_that_do_not_belong_to_the_configuration_are_refused_with_a_sentence(folder: Path) -> None:
    shape = read_shape(folder)
    weights = read_weights(folder, shape)
    embedding, *_, last = weights
    wrong = {
        f"lacks the weight {last}": {name: weight for name, weight in weights.items() if name != last},
        rf"{last} has shape \(1, ": weights | {last: weights[last][None]},
        rf"{embedding} has shape \(60, 32\), .* implies \(61, 32\)": weights | {embedding: weights[embedding][:60]},
    }
    if shape.tied:
        wrong["another lm_head"] = weights | {"lm_head.weight": weights[embedding] + 1}
    for sentence, tensors in wrong.items():
        save_file({name: weight.contiguous() for name, weight in tensors.items()}, folder / "model.safetensors")
        with pytest.raises(ModelError, match=sentence):
            read_weights(folder, shape)
    save_file(
        weights | ({"lm_head.weight": weights[embedding].clone()} if shape.tied else {}), folder / "model.safetensors"
    )
    assert read_weights(folder, shape).keys() == weights.keys()
