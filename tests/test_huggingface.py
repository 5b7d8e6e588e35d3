"""Models through transformers' own code: the same figures as the stacked decoder, any family, adapters, exports."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from swarms import ask

from rl_swarm.errors import CheckpointError, ModelError
from rl_swarm.models import PICO_FOLDER
from rl_swarm.policies import huggingface, open_policy
from rl_swarm.policies.engine import Learning
from rl_swarm.policies.huggingface import HuggingfaceModels, huggingface_learner
from rl_swarm.policies.learner import Learner
from rl_swarm.policies.saving import read_saved_weights
from rl_swarm.policies.stacked import stacked_learner
from rl_swarm.settings import load
from rl_swarm.types import RolloutGroup, ScoredGroup, Step

pytestmark = pytest.mark.torch
torch.set_num_threads(1)

LEARNING = Learning(learning_rate=1e-3, max_new_tokens=6, temperature=1.5, micro_batch_tokens=200)
NONSENSE = ["what?", "abc", "z(q)", "why, why", "9a9", "(((", "x/y=", "sum of"]
SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "eos_token_id": 1, "bos_token_id": None}
SMALL |= {"pad_token_id": 0}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
# Families that the stacked decoder does not run, each odd in its own way.
OTHERS = {
    "a sliding window": transformers.MistralConfig(**SMALL, **ATTENTION, sliding_window=6, max_position_embeddings=64),
    "capped scores": transformers.Gemma2Config(
        **SMALL, **ATTENTION, head_dim=8, final_logit_softcapping=3.0, max_position_embeddings=64, sliding_window=8
    ),
    "partly rotary, dropout": transformers.GPTNeoXConfig(
        **SMALL, num_attention_heads=4, intermediate_size=48, max_position_embeddings=64, hidden_dropout=0.3,
        attention_dropout=0.3,
    ),
    "a state instead of a cache": transformers.MambaConfig(**SMALL, state_size=4, num_heads=4),
}  # fmt: skip


def learning(**changes: object) -> Learning:
    values = {field: getattr(LEARNING, field) for field in Learning.__dataclass_fields__}
    return Learning(**(values | changes))


def groups(policy: Learner, nodes: list[str], seed: int = 0) -> dict[str, list[ScoredGroup]]:
    rng = random.Random(seed)
    # Nothing the model knows an answer to: siblings must differ, or their advantages cancel.
    questions = {node: ask(*rng.sample(NONSENSE, 2)) for node in nodes}
    answers = policy.generate(questions, 4, {node: seed + number for number, node in enumerate(nodes)})
    return {
        node: [
            ScoredGroup(RolloutGroup(node, Step(0), str(q), question, rollouts), tuple(rng.random() for _ in rollouts))
            for q, (question, rollouts) in enumerate(zip(questions[node], answers[node], strict=True))
        ]
        for node in nodes
    }


@pytest.fixture(scope="module", params=OTHERS)
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(OTHERS[request.param]).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(PICO_FOLDER / name, folder / name)
    return folder


def test_the_same_tokens_log_probs_and_gradients_as_the_stacked_decoder() -> None:
    stacked = stacked_learner(["a", "b"], PICO_FOLDER, LEARNING)
    other = huggingface_learner(["a", "b"], PICO_FOLDER, LEARNING, "cpu")
    ours, theirs = groups(stacked, ["a", "b"]), groups(other, ["a", "b"])
    for node in ("a", "b"):
        for one, two in zip(ours[node], theirs[node], strict=True):
            for rollout, twin in zip(one.group.rollouts, two.group.rollouts, strict=True):
                assert rollout.token_ids == twin.token_ids
                assert rollout.logprobs == pytest.approx(twin.logprobs, abs=1e-4)
    expected, found = stacked.gradients(ours), other.gradients(ours)
    for node in ("a", "b"):
        assert expected[node].keys() == found[node].keys()
        for name, gradient in expected[node].items():
            assert (found[node][name] - gradient).norm() < 1e-4 * gradient.norm() + 1e-8, name


def test_a_round_moves_the_weights_as_the_stacked_decoder_does() -> None:
    stacked = stacked_learner(["a"], PICO_FOLDER, learning(kl_beta=0.1, minibatches=2))
    other = huggingface_learner(["a"], PICO_FOLDER, learning(kl_beta=0.1, minibatches=2), "cpu")
    batch = groups(stacked, ["a"])
    first, second = stacked.update(batch)["a"], other.update(batch)["a"]
    assert first == pytest.approx(second, rel=1e-3, abs=1e-5)
    before = stacked_learner(["a"], PICO_FOLDER, LEARNING).node_weights("a")
    moved = [stacked.node_weights("a"), other.node_weights("a")]
    flat = [torch.cat([(weights[name] - before[name]).flatten() for name in before]) for weights in moved]
    assert torch.nn.functional.cosine_similarity(flat[0], flat[1], dim=0) > 0.999


def test_any_family_trains_on_what_it_sampled(other: Path) -> None:
    policy = huggingface_learner(["a", "b"], other, LEARNING, "cpu")
    before = policy.node_weights("b")
    stats = policy.update(groups(policy, ["a", "b"]) | {"b": []})
    assert stats["a"]["logprob_gap"] < 1e-4
    assert (stats["a"]["updated"], stats["b"]["updated"]) == (1.0, 0.0)
    assert all(torch.equal(before[name], weight) for name, weight in policy.node_weights("b").items())
    assert any(not torch.equal(before[name], weight) for name, weight in policy.node_weights("a").items())


def test_any_familys_log_probs_are_those_of_transformers_one_sequence_at_a_time(other: Path) -> None:
    policy = huggingface_learner(["a"], other, LEARNING, "cpu")
    model = transformers.AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).eval()
    for scored in groups(policy, ["a"])["a"]:
        prompt = policy._tokens.encode_prompt(scored.group.question.prompt)
        for rollout in scored.group.rollouts:
            assert rollout.token_ids is not None and rollout.logprobs is not None
            with torch.no_grad():
                scores = model(torch.tensor([[*prompt, *rollout.token_ids]])).logits[0] / LEARNING.temperature
            logp = torch.log_softmax(scores.float(), -1)
            expected = [logp[len(prompt) - 1 + place, id].item() for place, id in enumerate(rollout.token_ids)]
            assert rollout.logprobs == pytest.approx(expected, abs=1e-4)


def test_gradient_checkpointing_and_padding_change_no_gradient(other: Path) -> None:
    plain = huggingface_learner(["a"], other, learning(micro_batch_tokens=1), "cpu")
    batch = groups(plain, ["a"])
    padded = huggingface_learner(["a"], other, learning(gradient_checkpointing=True, micro_batch_tokens=4096), "cpu")
    expected, found = plain.gradients(batch)["a"], padded.gradients(batch)["a"]
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() < 1e-4 * gradient.norm() + 1e-7, name


def test_a_model_beyond_the_decoder_is_opened_through_transformers(other: Path) -> None:
    chosen = load({"model_name": str(other), "tasks": "arithmetic", "max_new_tokens": 4, "device": "cpu"})
    policy = open_policy(chosen, ["a"])
    assert "in transformers" in policy.about(2, 2, 4) and "the model" in policy.about(2, 2, 4)
    assert "as one program" in open_policy(load({"model_name": "pico", "device": "cpu"}), ["a"]).about(2, 2, 4)


def test_half_precision_compute_stays_near() -> None:
    policy = huggingface_learner(["a"], PICO_FOLDER, learning(dtype="bfloat16"), "cpu")
    batch = groups(policy, ["a"])
    half = policy.gradients(batch)["a"]
    full = huggingface_learner(["a"], PICO_FOLDER, LEARNING, "cpu").gradients(batch)["a"]
    flat = [torch.cat([gradient.flatten() for gradient in gradients.values()]) for gradients in (half, full)]
    assert torch.nn.functional.cosine_similarity(flat[0], flat[1], dim=0) > 0.98
    assert 0 <= policy.update(batch)["a"]["logprob_gap"] < 0.2


# Adapters


def test_adapters_start_as_the_base_model_learn_apart_and_leave_it_alone() -> None:
    policy = huggingface_learner(["a", "b"], PICO_FOLDER, learning(lora_rank=4, learning_rate=1e-2), "cpu")
    plain = stacked_learner(["a", "b"], PICO_FOLDER, LEARNING)
    batch, same = groups(policy, ["a", "b"]), groups(plain, ["a", "b"])
    tokens = [
        [r.token_ids for node in ("a", "b") for s in each[node] for r in s.group.rollouts] for each in (batch, same)
    ]
    assert tokens[0] == tokens[1]
    models = policy._models
    assert isinstance(models, HuggingfaceModels)
    base = {name: one.clone() for name, one in models._models[0].named_parameters() if "lora" not in name}
    before = {node: policy.node_weights(node) for node in ("a", "b")}
    assert before["a"].keys() and all(".lora_" in name for name in before["a"])
    assert all(torch.equal(weight, before["b"][name]) for name, weight in before["a"].items())
    policy.update({"a": batch["a"], "b": []})
    assert any(not torch.equal(weight, before["a"][name]) for name, weight in policy.node_weights("a").items())
    assert all(torch.equal(weight, before["b"][name]) for name, weight in policy.node_weights("b").items())
    after = dict(models._models[0].named_parameters())
    assert all(torch.equal(after[name], weight) for name, weight in base.items())
    answers = policy.generate({node: ask("1+2=", "17*4=") for node in ("a", "b")}, 8, {"a": 1, "b": 1})
    assert answers["a"] != answers["b"]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kl_beta", [0.0, 0.2])
def test_adapters_of_several_nodes_have_the_gradients_of_single_ones(kl_beta: float, checkpointed: bool) -> None:
    """peft switches adapters for the whole model at once, also while a node's gradient is still to come."""
    nodes = ["a", "b", "c"]
    chosen = learning(lora_rank=4, kl_beta=kl_beta, gradient_checkpointing=checkpointed, learning_rate=1e-2)
    together = huggingface_learner(nodes, PICO_FOLDER, chosen, "cpu")
    batch = groups(together, nodes)
    together.update(batch)  # apart from each other, and from the base model
    found = together.gradients(batch)
    for node in nodes:
        alone = huggingface_learner([node], PICO_FOLDER, learning(lora_rank=4, kl_beta=kl_beta), "cpu")
        alone.load(node, together.save(node, {}), {})
        for name, gradient in alone.gradients({node: batch[node]})[node].items():
            assert (found[node][name] - gradient).norm() < 1e-4 * gradient.norm() + 1e-7, (node, name)
        assert max(float(gradient.norm()) for gradient in found[node].values()) > 1e-3
    for row in together.update(batch).values():
        assert (row["kl"] > 0) if kl_beta else ("kl" not in row)


def test_a_checkpoint_of_adapters_is_small_exact_and_of_its_rank_alone() -> None:
    note: dict[str, str | int] = {"run": "r", "node": "b", "seed": 1, "round": 3}
    policy = huggingface_learner(["a", "b"], PICO_FOLDER, learning(lora_rank=4), "cpu")
    batch = groups(policy, ["a", "b"])
    policy.update(batch)
    saved = policy.save("b", note)
    assert len(saved) < 0.5 * PICO_FOLDER.joinpath("model.safetensors").stat().st_size
    policy.update(batch)
    expected = policy.node_weights("b")
    again = huggingface_learner(["a", "b"], PICO_FOLDER, learning(lora_rank=4), "cpu")
    assert again.load("b", saved, note) == note
    again.update(batch)
    assert all(torch.equal(expected[name], weight) for name, weight in again.node_weights("b").items())
    with pytest.raises(CheckpointError, match="another model"):
        huggingface_learner(["b"], PICO_FOLDER, learning(lora_rank=2), "cpu").load("b", saved, note)
    with pytest.raises(CheckpointError, match="another model"):
        stacked_learner(["b"], PICO_FOLDER, LEARNING).load("b", saved, note)


def test_merged_adapters_compute_what_the_adapted_model_did() -> None:
    policy = huggingface_learner(["a"], PICO_FOLDER, learning(lora_rank=4, learning_rate=3e-2), "cpu")
    for _ in range(3):
        policy.update(groups(policy, ["a"]))
    merged = huggingface.merged_weights(PICO_FOLDER, read_saved_weights(policy.save("a", {})))
    model = transformers.AutoModelForCausalLM.from_pretrained(PICO_FOLDER, dtype=torch.float32)
    start = {name: one.detach().clone() for name, one in model.named_parameters()}
    assert merged.keys() == start.keys()
    model.load_state_dict(merged, strict=False)
    ids = torch.tensor([[5, 9, 12, 30]])
    models = policy._models
    assert isinstance(models, HuggingfaceModels)
    with torch.no_grad(), models._acting(0) as adapted:
        assert torch.allclose(model(ids).logits, adapted(ids).logits, atol=1e-4)
    assert any(not torch.allclose(merged[name], start[name]) for name in start)


# Bad input


def test_a_folder_transformers_cannot_load_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nonsense", "eos_token_id": 1}')
    shutil.copyfile(PICO_FOLDER / "tokenizer.json", tmp_path / "tokenizer.json")
    with pytest.raises(ModelError, match="cannot be loaded"):
        huggingface_learner(["a"], tmp_path, LEARNING, "cpu")


def test_code_that_comes_with_a_model_is_not_run_whoever_would_agree_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}'
    )
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ModelError):
        huggingface.load_model(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_model_with_a_weight_missing_is_refused_and_not_filled_with_noise(tmp_path: Path) -> None:
    config = transformers.MistralConfig(**SMALL, **ATTENTION, max_position_embeddings=64)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks the weight model\.layers\.1\.mlp\.up_proj\.weight"):
        huggingface.load_model(tmp_path)


def test_dropout_is_off_under_whatever_name(tmp_path: Path) -> None:
    config = transformers.BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    config.intermediate_size, config.is_decoder = 48, True
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = huggingface.load_model(tmp_path)
    assert all(module.p == 0 for module in model.modules() if isinstance(module, torch.nn.Dropout))
