"""The learner's arithmetic: gradients against a naive loop in float64, Adam against torch's, nodes against others."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import transformers

from rl_swarm.errors import CheckpointError, ModelError
from rl_swarm.models import PICO_FOLDER
from rl_swarm.policies.adam import StackedAdam
from rl_swarm.policies.learner import Learner, Learning
from rl_swarm.policies.stacked import stacked_learner
from rl_swarm.policies.tokens import Tokens
from rl_swarm.tasks.arithmetic import Arithmetic
from rl_swarm.types import Rollout, RolloutGroup, ScoredGroup, Step

pytestmark = pytest.mark.torch
torch.set_num_threads(1)

LEARNING = Learning(learning_rate=1e-3, max_new_tokens=8, temperature=0.8)


def make_policy(nodes: list[str], **changes: object) -> Learner:
    values = {field: getattr(LEARNING, field) for field in Learning.__dataclass_fields__}
    return stacked_learner(nodes, PICO_FOLDER, Learning(**(values | changes)))


def sampled_groups(
    policy: Learner, nodes: list[str], seed: int = 0, group_size: int = 4
) -> dict[str, list[ScoredGroup]]:
    """Two questions a node, sampled for real, with made-up rewards so that every group says something."""
    rng = random.Random(seed)
    questions = {node: Arithmetic().sample(2, rng) for node in nodes}
    prompts = {node: [question.prompt for question in asked] for node, asked in questions.items()}
    answers = policy.generate(prompts, group_size, {node: seed + number for number, node in enumerate(nodes)})
    return {
        node: [
            ScoredGroup(RolloutGroup(node, Step(0), str(q), question, rollouts), tuple(rng.random() for _ in rollouts))
            for q, (question, rollouts) in enumerate(zip(questions[node], answers[node], strict=True))
        ]
        for node in nodes
    }


def as_text(scored: ScoredGroup) -> ScoredGroup:
    """The group as a peer receives it."""
    group = scored.group
    rollouts = tuple(Rollout(rollout.text, truncated=rollout.truncated) for rollout in group.rollouts)
    return ScoredGroup(RolloutGroup(group.node, group.step, group.id, group.question, rollouts), scored.rewards)


def naive_gradients(
    groups: list[ScoredGroup], temperature: float, foreign: set[str], negative: float
) -> dict[str, torch.Tensor]:
    """The objective written out token by token, on transformers' model, in float64."""
    model = transformers.AutoModelForCausalLM.from_pretrained(PICO_FOLDER, dtype=torch.float64)
    tokens = Tokens(PICO_FOLDER)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for scored in groups:
        mean = sum(scored.rewards) / len(scored.rewards)
        spread = (sum((reward - mean) ** 2 for reward in scored.rewards) / (len(scored.rewards) - 1)) ** 0.5
        prompt = tokens.encode(scored.group.question.prompt)
        for rollout, reward in zip(scored.group.rollouts, scored.rewards, strict=True):
            advantage = (reward - mean) / (spread + 1e-8)
            if scored.group.node in foreign and advantage < 0:
                advantage *= negative
            completion = tokens.encode(rollout.text) + ([] if rollout.truncated else [tokens.end])
            scores = model(torch.tensor([prompt + completion])).logits[0] / temperature
            for position, token in enumerate(completion):
                logp = torch.log_softmax(scores[len(prompt) - 1 + position], -1)[token]
                ratio = torch.exp(logp - logp.detach())
                total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
                count += 1
    (total / count).backward()  # type: ignore[no-untyped-call]
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("off_policy", "negative"), [("none", 1.0), ("damp", 0.2), ("positive", 0.0)])
def test_gradients_equal_a_naive_loop_in_float64(off_policy: str, negative: float) -> None:
    policy = make_policy(["me"], off_policy=off_policy)
    peers = make_policy(["peer"])
    own = sampled_groups(policy, ["me"])["me"]
    theirs = [as_text(scored) for scored in sampled_groups(peers, ["peer"], seed=5)["peer"]]
    ours = policy.gradients({"me": own + theirs})["me"]
    expected = naive_gradients(own + theirs, 0.8, {"peer"}, negative)
    for name, gradient in expected.items():
        assert (ours[name] - gradient).norm() < 1e-4 * gradient.norm() + 1e-9, name


def test_gradients_do_not_depend_on_the_micro_batch() -> None:
    groups = sampled_groups(make_policy(["a", "b"]), ["a", "b"])
    groups["b"] = groups["b"][:1]  # unequal numbers of sequences
    whole = make_policy(["a", "b"]).gradients(groups)
    for tokens in (1, 60, 200):
        parts = make_policy(["a", "b"], micro_batch_tokens=tokens).gradients(groups)
        for node in whole:
            for name in whole[node]:
                assert torch.allclose(whole[node][name], parts[node][name], atol=1e-6, rtol=1e-4), name


def test_gradient_checkpointing_changes_nothing_but_memory() -> None:
    groups = sampled_groups(make_policy(["a"]), ["a"])
    plain = make_policy(["a"]).gradients(groups)["a"]
    checkpointed = make_policy(["a"], gradient_checkpointing=True).gradients(groups)["a"]
    for name in plain:
        assert torch.allclose(plain[name], checkpointed[name], atol=1e-7), name


def test_the_end_of_text_is_trained() -> None:
    """A completion that is nothing but the end of text, rewarded, becomes likelier."""
    policy = make_policy(["a"])
    question = Arithmetic(["sum"]).sample(1, random.Random(0))[0]
    rollouts = (
        Rollout("", token_ids=(policy._tokens.end,)),
        Rollout("7", token_ids=tuple(policy._tokens.encode("7")), truncated=True),
    )
    scored = ScoredGroup(RolloutGroup("a", Step(0), "0", question, rollouts), (1.0, 0.0))

    def empty_answers() -> int:
        answers = policy.generate({"a": [question.prompt]}, 200, {"a": 1})["a"][0]
        return sum(rollout.text == "" for rollout in answers)

    before = empty_answers()
    for _ in range(10):
        policy.update({"a": [scored]})
    assert before == 0
    assert empty_answers() > 100


def test_log_probs_in_training_equal_those_in_sampling() -> None:
    policy = make_policy(["a", "b"])
    stats = policy.update(sampled_groups(policy, ["a", "b"]))
    assert all(0.0 <= figures["logprob_gap"] < 1e-4 for figures in stats.values())
    # The figure is alive: against stale log-probs it is large.
    groups = sampled_groups(make_policy(["a", "b"]), ["a", "b"])
    for _ in range(3):
        stats = policy.update(groups)
    assert stats["a"]["logprob_gap"] > 1e-2


def test_bfloat16_compute_stays_near_float32() -> None:
    policy = make_policy(["a"], dtype="bfloat16", temperature=1.5)
    groups = sampled_groups(policy, ["a"], group_size=16)
    half, full = policy.gradients(groups)["a"], make_policy(["a"], temperature=1.5).gradients(groups)["a"]
    assert all(gradient.dtype == torch.float32 for gradient in half.values())
    flat = [torch.cat([gradient.flatten() for gradient in gradients.values()]) for gradients in (half, full)]
    assert torch.nn.functional.cosine_similarity(flat[0], flat[1], dim=0) > 0.98
    assert policy.update(groups)["a"]["logprob_gap"] < 0.2


def test_a_peers_text_is_encoded_to_the_tokens_it_was_sampled_from() -> None:
    policy = make_policy(["a"])
    for scored in sampled_groups(policy, ["a"], group_size=16)["a"]:
        for rollout in scored.group.rollouts:
            assert (
                tuple(policy._encode_completion(Rollout(rollout.text, truncated=rollout.truncated)))
                == rollout.token_ids
            )


def test_groups_without_advantage_count_in_the_mean_and_nothing_else() -> None:
    policy = make_policy(["a"])
    useful, flat = sampled_groups(policy, ["a"])["a"]
    flat = ScoredGroup(flat.group, (1.0,) * len(flat.rewards))
    tokens = [sum(rollout.tokens for rollout in scored.group.rollouts) for scored in (useful, flat)]
    alone, diluted = policy.gradients({"a": [useful]})["a"], policy.gradients({"a": [useful, flat]})["a"]
    for name in alone:
        assert torch.allclose(alone[name] * tokens[0] / sum(tokens), diluted[name], atol=1e-7), name


def test_a_node_with_nothing_to_learn_stays_exactly_where_it_is() -> None:
    policy = make_policy(["a", "b"])
    groups = sampled_groups(policy, ["a", "b"])
    policy.update(groups)  # momentum to be tempted by
    before = policy.node_weights("b")
    flat = [ScoredGroup(scored.group, (0.5,) * len(scored.rewards)) for scored in groups["b"]]
    stats = policy.update({"a": groups["a"], "b": flat})
    assert stats["a"]["updated"] == 1.0
    assert stats["b"]["updated"] == 0.0
    assert all(torch.equal(before[name], weight) for name, weight in policy.node_weights("b").items())


def test_a_gradient_that_is_not_a_number_leaves_the_weights_alone() -> None:
    policy = make_policy(["a", "b"])
    groups = sampled_groups(policy, ["a", "b"])
    before = policy.node_weights("a")
    broken = [ScoredGroup(scored.group, (float("nan"), *scored.rewards[1:])) for scored in groups["a"]]
    stats = policy.update({"a": broken, "b": groups["b"]})
    assert (stats["a"]["updated"], stats["b"]["updated"]) == (0.0, 1.0)
    assert all(torch.equal(before[name], weight) for name, weight in policy.node_weights("a").items())
    assert all(weight.isfinite().all() for weight in policy.node_weights("b").values())


def test_stacked_nodes_have_the_gradients_of_separate_nodes() -> None:
    """Gradients, not weights: Adam turns the last bit of a gradient near zero into a whole step."""
    nodes = ["a", "b", "c"]
    together = make_policy(nodes)
    groups = sampled_groups(together, nodes)
    stacked = together.gradients(groups)
    for node in nodes:
        alone = make_policy([node]).gradients({node: groups[node]})[node]
        for name, gradient in alone.items():
            assert torch.allclose(stacked[node][name], gradient, atol=1e-6, rtol=1e-4), (node, name)


def test_stacked_adam_equals_torch_adam_with_a_clip_per_node() -> None:
    generator = torch.Generator().manual_seed(0)
    start = {"w": torch.randn(2, 3, 4, generator=generator), "v": torch.randn(2, 5, generator=generator)}
    ours = StackedAdam({name: tensor.clone() for name, tensor in start.items()})
    singles = [{name: tensor[k].clone().requires_grad_() for name, tensor in start.items()} for k in range(2)]
    theirs = [torch.optim.Adam(single.values(), lr=0.01) for single in singles]
    for step in range(5):
        gradients = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in start.items()}
        active = torch.tensor([True, step != 2])  # the second node sits one step out
        for k in range(2):
            if not active[k]:
                continue
            for name, parameter in singles[k].items():
                parameter.grad = gradients[name][k].clone()
            torch.nn.utils.clip_grad_norm_(singles[k].values(), 1.0)
            theirs[k].step()
        ours.step(gradients, active, learning_rate=0.01, max_norm=1.0)
    for k in range(2):
        for name, parameter in singles[k].items():
            assert torch.allclose(ours.weights[name][k], parameter, atol=1e-6), (k, name)


def test_a_checkpoint_brings_back_weights_and_optimiser_exactly() -> None:
    note: dict[str, str | int] = {"run": "r", "node": "b", "seed": 1, "round": 3}
    policy = make_policy(["a", "b"])
    groups = sampled_groups(policy, ["a", "b"])
    policy.update(groups)
    saved = policy.save("b", note)
    policy.update(groups)
    expected = policy.node_weights("b")
    other = make_policy(["a", "b"])
    other.load("b", saved, note)
    other.update(groups)
    assert all(torch.equal(expected[name], weight) for name, weight in other.node_weights("b").items())


def test_a_damaged_or_foreign_checkpoint_is_refused_and_changes_nothing() -> None:
    note: dict[str, str | int] = {"run": "r", "node": "a", "seed": 1, "round": 3}
    policy = make_policy(["a"])
    saved = policy.save("a", note)
    before = policy.node_weights("a")
    for bad in (b"", b"garbage", saved[: len(saved) // 2], saved[:-100]):
        with pytest.raises(CheckpointError):
            policy.load("a", bad, note)
    with pytest.raises(CheckpointError, match="belongs"):
        policy.load("a", saved, {"run": "another"})
    assert policy.load("a", saved, {"run": "r", "node": "a"}) == note
    assert all(torch.equal(before[name], weight) for name, weight in policy.node_weights("a").items())


def test_a_checkpoint_holds_nothing_that_runs_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(make_policy(["a"]).save("a", {"round": 1}))
    assert set(torch.load(path, weights_only=True)) == {"weights", "first", "second", "steps", "note"}


def test_a_prompt_beyond_the_context_is_an_error_with_a_remedy() -> None:
    with pytest.raises(ModelError, match="MAX_NEW_TOKENS"):
        make_policy(["a"]).generate({"a": ["1" * 125]}, 2, {"a": 0})


def test_text_too_long_or_no_text_at_all_does_not_fit() -> None:
    policy = make_policy(["a"])
    for text, truncated, fits in [
        ("1234567", False, True),  # with its end, eight tokens: as many as the node may write itself
        ("12345678", False, False),
        ("12345678", True, True),
        ("1" * 200, True, False),
        ("x" * 1_000_000, True, False),
        ("", False, True),
        ("", True, False),  # no token: nothing that could be trained
    ]:
        assert policy.fits("1+1=", [Rollout("7"), Rollout(text, truncated=truncated)]) == fits, text[:20]


def test_nothing_is_claimed_of_a_round_in_which_nothing_was_learned() -> None:
    policy = make_policy(["a"])
    (scored, _) = sampled_groups(policy, ["a"])["a"]
    stats = policy.update({"a": [ScoredGroup(scored.group, (1.0,) * len(scored.rewards))]})["a"]
    assert stats["updated"] == 0.0
    assert "entropy" not in stats and "logprob_gap" not in stats
