"""The objectives against loops written from their equations: the learner's gradients, then each pure function.

The loops know the settings' values and nothing else of the code they check: no function of grpo.py or advantages.py.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from rl_swarm.models import PICO_FOLDER
from rl_swarm.policies import grpo
from rl_swarm.policies.batches import Batch, MicroBatch, TrainingSequence, micro_batches, pad, tokens_of
from rl_swarm.policies.engine import Learning
from rl_swarm.policies.learner import Learner
from rl_swarm.policies.logprobs import at_real_positions, chunked_logprobs, token_logprobs
from rl_swarm.policies.stacked import stacked_learner
from rl_swarm.policies.tokens import Tokens
from rl_swarm.types import Question, QuestionName, Rollout, RolloutGroup, ScoredGroup, Step

pytestmark = pytest.mark.torch
torch.set_num_threads(1)

TOKENS = Tokens(PICO_FOLDER)
CPU = torch.device("cpu")
# Narrow clips, so that they bind after one small move; no completion is as long as the longest allowed one.
LEARNING = Learning(learning_rate=1e-3, max_new_tokens=12, temperature=1.5, clip_low=0.05, clip_high=0.08)

Weights = dict[str, Tensor]


# Groups written by hand: completions of every length, cut off (~) and not


def group(
    node: str, prompt: str, texts: Sequence[str], rewards: Sequence[float], said: float | None = None
) -> ScoredGroup:
    """A group as its own node has it (with tokens), or as a peer's text."""
    rollouts = []
    for text in texts:
        truncated, visible = text.endswith("~"), text.removesuffix("~")
        ids = None if node == "peer" else (*TOKENS.encode(visible), *(() if truncated else (TOKENS.end,)))
        rollouts.append(Rollout(visible, token_ids=ids, truncated=truncated, said_logprob=said))
    question = Question(QuestionName("by hand", "v1", 0, 0), prompt, "")
    return ScoredGroup(RolloutGroup(node, Step(0), prompt, question, tuple(rollouts)), tuple(rewards))


OWN = [
    group("me", "what?", ["tt</answer>", "ttat<answer>5</answer>", "tt86", "tit~"], [0.9, 0.2, 0.4, 0.1]),
    group("me", "1+2=", ["4", "5~", "<answer>7</answer>", "6"], [0.0, 0.7, 0.3, 1.0]),
]
THEIRS = [
    group("peer", "why,", ["ttttttat~", "ttttt</answer>", "<answer>9</answer>", "t"], [0.3, 0.0, 0.8, 1.0]),
    group("peer", "rev(abc)=", ["cba", "<answer>cba</answer>", "cbb", "c~"], [0.2, 1.0, 0.1, 0.5]),
]
FLAT = [
    group("me", "bits(700)=", ["6", "<answer>6</answer>"], [1.0, 1.0]),
    group("me", "gcd(8,12)=", ["4~", "7"], [0.0, 0.0]),
]
# Dealt out in turn: of two updates the first has the even ones, the second the odd ones.
BATCH = [*OWN, *THEIRS, *FLAT]


# The objective, token by token, on transformers' model in float64


class Naive:
    """transformers' own code with some weights; remembers what it worked out, graph and all."""

    def __init__(self, weights: Weights | None = None) -> None:
        self._model = transformers.LlamaForCausalLM.from_pretrained(PICO_FOLDER, dtype=torch.float64)
        if weights is not None:
            self._model.load_state_dict({name: weight.double() for name, weight in weights.items()}, strict=False)
        self._known: dict[tuple[str, tuple[int, ...]], list[Tensor]] = {}

    def logprobs(self, prompt: str, completion: Sequence[int]) -> list[Tensor]:
        key = (prompt, tuple(completion))
        if key not in self._known:
            ids = TOKENS.encode(prompt)
            scores = self._model(torch.tensor([[*ids, *completion]])).logits[0] / LEARNING.temperature
            self._known[key] = [
                torch.log_softmax(scores[len(ids) - 1 + t], -1)[token] for t, token in enumerate(completion)
            ]
        return self._known[key]

    def gradients(self, loss: Tensor) -> Weights:
        names, parameters = zip(*self._model.named_parameters(), strict=True)
        found = torch.autograd.grad(loss, parameters, retain_graph=True)
        return dict(zip(names, found, strict=True))


def naive_completion(rollout: Rollout) -> list[int]:
    return [*TOKENS.encode(rollout.text), *([] if rollout.truncated else [TOKENS.end])]


def naive_advantages(scored: ScoredGroup, rule: str) -> dict[int, float]:
    """By number, of the completions that are not left out."""
    rewards = {number: reward for number, reward in enumerate(scored.rewards) if number not in scored.left_out}
    if len(set(rewards.values())) < 2:
        return dict.fromkeys(rewards, 0.0)
    mean = sum(rewards.values()) / len(rewards)
    spread = (sum((reward - mean) ** 2 for reward in rewards.values()) / (len(rewards) - 1)) ** 0.5
    found = {}
    for number, reward in rewards.items():
        others = [other for sibling, other in rewards.items() if sibling != number]
        found[number] = {
            "std": (reward - mean) / (spread + 1e-8),
            "mean": reward - mean,
            "leave_one_out": reward - sum(others) / len(others),
        }[rule]
    return found


def naive_weighed(
    scored: ScoredGroup, advantages: dict[int, float], before: dict[int, list[float]], foreign: bool, learning: Learning
) -> dict[int, float]:
    """Advantages after settings for bad completions, and what is thought of a peer's text; `before` has log-probs."""
    if foreign and learning.off_policy in ("topr", "truncated"):
        likelier = {}
        for number in advantages:
            said = scored.group.rollouts[number].said_logprob
            assert said is not None
            likelier[number] = math.exp(min(50.0, sum(before[number]) - said))
        if learning.off_policy == "topr":
            found = {n: a * min(1.0, likelier[n]) if a < 0 else a for n, a in advantages.items()}
        else:
            weights = {n: min(2.0, likelier[n]) for n in advantages}
            mean = sum(weights[n] * a for n, a in advantages.items()) / max(1e-30, sum(weights.values()))
            found = (
                {n: weights[n] * (a - mean) for n, a in advantages.items()} if any(advantages.values()) else advantages
            )
    else:
        own = learning.negative_weight
        bad = (
            {"none": own, "damp": learning.peer_negative_weight, "positive": 0.0}[learning.off_policy]
            if foreign
            else own
        )
        found = {n: a * bad if a < 0 else a for n, a in advantages.items()}
    if foreign:  # less likely than 52 tokens drawn blindly
        found = {n: 0.0 if sum(before[n]) < len(before[n]) * math.log(1 / 52) else a for n, a in found.items()}
    return found


def naive_token_losses(
    logp: Sequence[Tensor], old: Sequence[float], advantage: float, loss: str, clips: Counter[str]
) -> list[Tensor]:
    """The losses of one completion's tokens; `clips` counts where the clip decided, for good and bad completions."""
    low, high = 1 - LEARNING.clip_low, 1 + LEARNING.clip_high
    if loss == "gspo":
        mean = sum((logp[t] - old[t] for t in range(len(logp))), torch.zeros(())) / len(logp)
        ratios = [torch.exp(mean)] * len(logp)
    else:
        ratios = [torch.exp(logp[t] - old[t]) for t in range(len(logp))]
    losses = []
    for t, ratio in enumerate(ratios):
        clipped = min(max(ratio.item(), low), high)
        binds = clipped * advantage < ratio.item() * advantage
        if loss == "cispo":
            binds = clipped != ratio.item() and advantage != 0
            losses.append(-clipped * advantage * logp[t])
        elif binds:
            losses.append(torch.tensor(-clipped * advantage, dtype=torch.float64))
        else:
            losses.append(-ratio * advantage)
        if binds:
            clips["good" if advantage > 0 else "bad"] += 1
    return losses


def naive_loss(
    groups: Sequence[ScoredGroup],
    learning: Learning,
    now: Naive,
    old: Naive | None = None,
    start: Naive | None = None,
    node: str = "me",
    read: Callable[[Rollout], list[int]] = naive_completion,
    clips: Counter[str] | None = None,
) -> Tensor:
    """One node's loss of one update. `old` has the weights the round began with, `start` those of all beginning."""
    old, start = old or now, start or now
    taking_part = [(scored, number) for scored in groups for number in naive_advantages(scored, learning.advantage)]
    tokens = sum(len(read(scored.group.rollouts[number])) for scored, number in taking_part)
    total = torch.zeros((), dtype=torch.float64)
    for scored, number in taking_part:
        prompt, foreign = scored.group.question.prompt, scored.group.node != node
        texts = {n: read(rollout) for n, rollout in enumerate(scored.group.rollouts)}
        before = {n: [value.item() for value in old.logprobs(prompt, text)] for n, text in texts.items()}
        advantages = naive_advantages(scored, learning.advantage)
        weighed = naive_weighed(scored, advantages, before, foreign, learning)[number]
        completion = texts[number]
        logp = now.logprobs(prompt, completion)
        losses = naive_token_losses(logp, before[number], weighed, learning.loss, Counter() if clips is None else clips)
        for t, loss in enumerate(losses):
            if learning.kl_beta and not foreign:
                difference = start.logprobs(prompt, completion)[t].item() - logp[t]
                loss = loss + learning.kl_beta * (torch.exp(difference) - difference - 1)
            divisor = {
                "token": tokens,
                "sequence": len(completion) * len(taking_part),
                "constant": learning.max_new_tokens * len(taking_part),
            }[learning.aggregate]
            total = total + loss / divisor
    return total


def assert_same(ours: Weights, expected: Weights, case: object = None) -> None:
    for name, gradient in expected.items():
        assert (ours[name] - gradient).norm() < 1e-4 * gradient.norm() + 1e-9, (case, name)


# The learner


def learner(learning: Learning, nodes: Sequence[str] = ("me",)) -> Learner:
    return stacked_learner(nodes, PICO_FOLDER, learning)


def set_weights(policy: Learner, k: int, weights: Weights) -> None:
    policy._models.load_state(k, policy._models.state(k) | {"weights": weights})


def recorded_round(
    policy: Learner,
    batches: dict[str, list[ScoredGroup]],
    monkeypatch: pytest.MonkeyPatch,
    moved: Sequence[Weights] = (),
) -> list[list[tuple[Weights, Weights]]]:
    """A round of learning: for each update and node the weights and the gradient just before the step.

    Instead of stepping, node k takes the weights `moved[k]`; where there are none it steps.
    """
    found: list[list[tuple[Weights, Weights]]] = []
    models = policy._models
    really = models.step

    def step(active_K: Tensor, learning_rate: float, max_norm: float) -> tuple[Tensor, Tensor]:
        found.append([(models.weights(k), models.gradients(k)) for k in range(len(batches))])
        if not moved:
            return really(active_K, learning_rate, max_norm)
        models.drop_gradients()
        for k, weights in enumerate(moved):
            set_weights(policy, k, weights)
        return torch.ones(len(batches)), active_K

    with monkeypatch.context() as patch:
        patch.setattr(models, "step", step)
        policy.update(batches)
    return found


@pytest.fixture(scope="module")
def start() -> Naive:
    return Naive()


@pytest.fixture(scope="module")
def moved() -> Weights:
    """Weights a little way off, such that ratios leave the clips on both sides."""
    policy = learner(replace(LEARNING, learning_rate=2e-3))
    policy.update({"me": [replace(scored, rewards=scored.rewards[::-1]) for scored in [*OWN, *THEIRS]]})
    return policy.node_weights("me")


@pytest.fixture(scope="module")
def elsewhere(moved: Weights) -> Naive:
    return Naive(moved)


def assert_round_is_naive(
    learning: Learning,
    batch: list[ScoredGroup],
    monkeypatch: pytest.MonkeyPatch,
    start: Naive,
    elsewhere: Naive,
    moved: Weights,
) -> None:
    """Two updates: one with a ratio of 1, one from moved weights."""
    policy = learner(replace(learning, minibatches=2))
    (first,), (second,) = recorded_round(policy, {"me": batch}, monkeypatch, [moved])
    assert_same(first[1], start.gradients(naive_loss(batch[0::2], learning, start)), "ratio 1")
    clips = Counter[str]()
    loss = naive_loss(batch[1::2], learning, elsewhere, old=start, start=start, clips=clips)
    assert clips["good"] > 0 and clips["bad"] > 0, "the clips bind on both sides"
    assert_same(second[1], elsewhere.gradients(loss), "another ratio")


@pytest.mark.parametrize("advantage", ["std", "mean", "leave_one_out"])
@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo"])
def test_every_objective_has_the_gradient_of_its_equation_where_clips_bind_and_where_not(
    loss: str,
    aggregate: str,
    advantage: str,
    monkeypatch: pytest.MonkeyPatch,
    start: Naive,
    elsewhere: Naive,
    moved: Weights,
) -> None:
    learning = replace(LEARNING, loss=loss, aggregate=aggregate, advantage=advantage)
    assert_round_is_naive(learning, BATCH, monkeypatch, start, elsewhere, moved)


@pytest.mark.parametrize(
    ("loss", "aggregate"), [("grpo", "token"), ("grpo", "constant"), ("gspo", "sequence"), ("cispo", "token")]
)
def test_a_kl_term_pulls_every_completion_that_counts_towards_the_start_and_no_other(
    loss: str, aggregate: str, monkeypatch: pytest.MonkeyPatch, start: Naive, elsewhere: Naive, moved: Weights
) -> None:
    batch = [BATCH[0], replace(BATCH[1], left_out=frozenset({0})), *BATCH[2:]]
    learning = replace(LEARNING, loss=loss, aggregate=aggregate, kl_beta=0.7)
    assert_round_is_naive(learning, batch, monkeypatch, start, elsewhere, moved)


def test_at_the_start_the_kl_term_has_no_gradient() -> None:
    plain = learner(LEARNING).gradients({"me": BATCH})["me"]
    held = learner(replace(LEARNING, kl_beta=5.0)).gradients({"me": BATCH})["me"]
    assert_same(held, plain)


@pytest.mark.parametrize("off_policy", ["none", "damp"])
@pytest.mark.parametrize("loss", ["grpo", "cispo"])
def test_negative_advantages_count_what_the_settings_say(
    loss: str, off_policy: str, monkeypatch: pytest.MonkeyPatch, start: Naive, elsewhere: Naive, moved: Weights
) -> None:
    learning = replace(LEARNING, loss=loss, off_policy=off_policy, negative_weight=0.3, peer_negative_weight=0.6)
    assert_round_is_naive(learning, BATCH, monkeypatch, start, elsewhere, moved)


def with_said(scored: ScoredGroup, now: Naive, offsets: Sequence[float]) -> ScoredGroup:
    """The peer's group with what its writer says of it: so much above what the text's log-prob is here."""
    rollouts = []
    for rollout, offset in zip(scored.group.rollouts, offsets, strict=True):
        logp = now.logprobs(scored.group.question.prompt, naive_completion(rollout))
        rollouts.append(replace(rollout, said_logprob=sum(value.item() for value in logp) + offset))
    return replace(scored, group=replace(scored.group, rollouts=tuple(rollouts)))


@pytest.mark.parametrize("off_policy", ["none", "damp", "positive", "topr", "truncated"])
@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo"])
def test_peers_text_is_weighed_by_the_rule_and_the_nodes_own_is_not(loss: str, off_policy: str, start: Naive) -> None:
    """Among good and bad texts: likelier here than there by little and by much, and less likely by little and much."""
    # Advantages of the first group are -, -, +, +; of the second -, +, -, +.
    theirs = [with_said(THEIRS[0], start, (1.2, -0.4, 0.5, -3.0)), with_said(THEIRS[1], start, (-2.0, 0.9, 0.3, -0.5))]
    learning = replace(LEARNING, loss=loss, off_policy=off_policy, peer_negative_weight=0.35, negative_weight=0.8)
    ours = learner(learning).gradients({"me": [*OWN, *theirs]})["me"]
    assert_same(ours, start.gradients(naive_loss([*OWN, *theirs], learning, start)))


@pytest.mark.parametrize("off_policy", ["topr", "truncated"])
@pytest.mark.parametrize("said", [1e300, -1e300])
def test_a_preposterous_claim_about_a_texts_probability_silences_it_or_counts_as_the_cap(
    off_policy: str, said: float, start: Naive
) -> None:
    claimed = group("peer", "why,", ["ttttt</answer>", "t"], [0.0, 1.0], said=said)
    learning = replace(LEARNING, off_policy=off_policy)
    ours = learner(learning).gradients({"me": [OWN[0], claimed]})["me"]
    modest = group("peer", "why,", ["ttttt</answer>", "t"], [0.0, 1.0], said=math.copysign(300, said))
    assert_same(ours, start.gradients(naive_loss([OWN[0], modest], learning, start)))


@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
@pytest.mark.parametrize("advantage", ["std", "mean", "leave_one_out"])
def test_completions_left_out_are_neither_compared_nor_counted_nor_learned_from(
    advantage: str, aggregate: str, start: Naive
) -> None:
    batch = [
        replace(OWN[0], left_out=frozenset({1})),
        replace(OWN[1], left_out=frozenset({0, 1, 2})),  # one remains: nothing to compare it with
        replace(THEIRS[0], left_out=frozenset({0, 3})),
    ]
    learning = replace(LEARNING, advantage=advantage, aggregate=aggregate)
    ours = learner(learning).gradients({"me": batch})["me"]
    assert_same(ours, start.gradients(naive_loss(batch, learning, start)))


@pytest.mark.parametrize("off_policy", ["none", "topr", "truncated"])
def test_a_peers_text_less_likely_than_blind_chance_has_no_gradient_but_counts(off_policy: str, start: Naive) -> None:
    """Even where its writer says that it was less likely still, which would otherwise give it weight."""
    noise = group("peer", "1+2=", ["z)q", "5", "7"], [1.0, 0.5, 0.0], said=-60.0)
    learning = replace(LEARNING, off_policy=off_policy)
    logp = start.logprobs("1+2=", naive_completion(noise.group.rollouts[0]))
    assert sum(value.item() for value in logp) < -4 * math.log(52), "the text is as unlikely as this test needs"
    policy = learner(learning)
    ours = policy.gradients({"me": [OWN[0], noise]})["me"]
    assert_same(ours, start.gradients(naive_loss([OWN[0], noise], learning, start)))
    assert policy.update({"me": [OWN[0], noise]})["me"]["unlikely_texts"] == 1


def test_the_nodes_own_text_is_learned_from_however_unlikely_it_is(start: Naive) -> None:
    noise = group("me", "1+2=", ["z)q", "5", "7"], [1.0, 0.5, 0.0])
    policy = learner(LEARNING)
    ours = policy.gradients({"me": [noise]})["me"]
    assert_same(ours, start.gradients(naive_loss([noise], LEARNING, start)))
    assert policy.update({"me": [noise]})["me"]["unlikely_texts"] == 0


@pytest.mark.parametrize("node", ["me", "peer"])
def test_the_end_of_text_is_in_the_loss_and_a_cut_off_completion_has_none(node: str, start: Naive) -> None:
    batch = [group(node, "1+2=", ["4", "5~", "<answer>7</answer>", "6~"], [0.0, 0.7, 0.3, 1.0])]
    ours = learner(LEARNING).gradients({"me": batch})["me"]
    assert_same(ours, start.gradients(naive_loss(batch, LEARNING, start)))

    def without_end(rollout: Rollout) -> list[int]:
        return TOKENS.encode(rollout.text)

    def always_with_end(rollout: Rollout) -> list[int]:
        return [*TOKENS.encode(rollout.text), TOKENS.end]

    for read in (without_end, always_with_end):
        wrong = start.gradients(naive_loss(batch, LEARNING, start, read=read))
        name = "model.embed_tokens.weight"
        assert (ours[name] - wrong[name]).norm() > 0.05 * wrong[name].norm(), "the difference is not too small to see"


@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo"])
def test_the_second_update_of_a_round_compares_with_the_weights_the_round_began_with(
    loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above with Adam's own step between the two, and old log-probs that are the round's, not the beginning's."""
    learning = replace(LEARNING, loss=loss, learning_rate=3e-3, minibatches=2)
    policy = learner(learning)
    policy.update({"me": [FLAT[0], OWN[1], *THEIRS]})
    began = Naive(policy.node_weights("me"))
    (first,), (second,) = recorded_round(policy, {"me": BATCH}, monkeypatch)
    assert_same(first[1], began.gradients(naive_loss(BATCH[0::2], learning, began)), "first")
    now = Naive(second[0])
    clips = Counter[str]()
    loss_now = naive_loss(BATCH[1::2], learning, now, old=began, clips=clips)
    assert clips.total() > 0
    assert_same(second[1], now.gradients(loss_now), "second")


def test_nodes_side_by_side_have_their_own_ratios_clips_and_counts(
    monkeypatch: pytest.MonkeyPatch, start: Naive, elsewhere: Naive, moved: Weights
) -> None:
    """Two nodes with other groups, in other numbers, moved to other places, cut into small micro-batches."""
    here = learner(LEARNING).node_weights("me")
    far = {name: weight + 2 * (weight - here[name]) for name, weight in moved.items()}
    learning = replace(LEARNING, loss="grpo", kl_beta=0.2, minibatches=2, micro_batch_tokens=50)
    batches = {"me": BATCH, "you": [THEIRS[1], OWN[0]]}
    policy = learner(learning, ("me", "you"))
    for_you = Naive(far)
    first, second = recorded_round(policy, batches, monkeypatch, [moved, far])
    assert_same(first[0][1], start.gradients(naive_loss(BATCH[0::2], learning, start)), "me, first")
    assert_same(first[1][1], start.gradients(naive_loss([THEIRS[1]], learning, start, node="you")), "you, first")
    mine = naive_loss(BATCH[1::2], learning, elsewhere, old=start, start=start)
    yours = naive_loss([OWN[0]], learning, for_you, old=start, start=start, node="you")
    assert_same(second[0][1], elsewhere.gradients(mine), "me, second")
    assert_same(second[1][1], for_you.gradients(yours), "you, second")


def test_clips_of_nothing_at_all_still_let_the_first_update_through() -> None:
    plain = learner(LEARNING).gradients({"me": BATCH})["me"]
    for loss in ("grpo", "gspo", "cispo"):
        tight = learner(replace(LEARNING, loss=loss, clip_low=0.0, clip_high=0.0)).gradients({"me": BATCH})["me"]
        assert_same(tight, plain, loss)


# The pure functions


def random_tokens(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logp, old, advantage and real of 1 node, 4 completions, 5 positions, with ratios from 0.7 to 1.5."""
    generator = torch.Generator().manual_seed(seed)
    logp = -3 * torch.rand(1, 4, 5, generator=generator, dtype=torch.float64)
    old = logp + 0.8 * (torch.rand(1, 4, 5, generator=generator, dtype=torch.float64) - 0.5)
    advantage = torch.tensor([1.3, -0.7, 0.4, -2.0], dtype=torch.float64).view(1, 4, 1)
    lengths = torch.tensor([5, 3, 1, 4]).view(1, 4, 1)
    return logp, old, advantage, (torch.arange(5) < lengths).double()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo"])
def test_per_token_losses_and_their_gradients_equal_a_loop_at_any_ratio(loss: str, seed: int) -> None:
    logp, old, advantage, real = random_tokens(seed)
    logp.requires_grad_()
    losses, clipped = grpo.token_losses(loss, logp, old, advantage, real, LEARNING.clip_low, LEARNING.clip_high)
    upstream = torch.rand(losses.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * real
    (ours,) = torch.autograd.grad((losses * upstream).sum(), logp)
    twin = logp.detach().clone().requires_grad_()
    total, clips = torch.zeros((), dtype=torch.float64), Counter[str]()
    for s in range(4):
        length = int(real[0, s].sum())
        before = old[0, s, :length].tolist()
        expected = naive_token_losses(list(twin[0, s, :length]), before, float(advantage[0, s]), loss, clips)
        for t, one in enumerate(expected):
            assert losses[0, s, t].item() == pytest.approx(one.item(), rel=1e-12)
            total = total + one * upstream[0, s, t]
    (theirs,) = torch.autograd.grad(total, twin)
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=0)
    assert (clipped * real).sum().item() == clips.total()


def test_the_clip_decides_exactly_where_it_makes_the_objective_smaller() -> None:
    """By hand: (ratio, advantage, loss, clipped) with clips at 0.8 and 1.28."""
    cases = [
        (1.5, 1.0, -1.28, True),  # a good text already made likelier: no further
        (0.5, 1.0, -0.5, False),  # a good text made less likely: back, without limit
        (1.5, -1.0, 1.5, False),  # a bad text made likelier: down, without limit
        (0.5, -1.0, 0.8, True),  # a bad text already made less likely: no further
        (1.2, 1.0, -1.2, False),
        (0.9, -1.0, 0.9, False),
        (1.0, 1.0, -1.0, False),
        (5.0, 0.0, 0.0, False),
    ]
    ratio, advantage, loss, clips = (torch.tensor(column, dtype=torch.float64) for column in zip(*cases, strict=True))
    found, clipped = grpo.clipped_surrogate(ratio.log(), torch.zeros_like(ratio), advantage, 0.2, 0.28)
    assert torch.allclose(found, loss)
    assert torch.equal(clipped, clips.bool())


def test_the_clipped_surrogate_is_differentiated_rightly_away_from_its_kinks() -> None:
    ratios = torch.tensor([0.4, 0.7, 0.9, 1.1, 1.2, 1.4, 3.0], dtype=torch.float64)
    for advantage in (1.7, -0.6):
        strength = torch.full_like(ratios, advantage)

        def losses(logp: Tensor, strength: Tensor = strength) -> Tensor:
            return grpo.clipped_surrogate(logp, torch.zeros_like(logp), strength, 0.2, 0.28)[0]

        assert torch.autograd.gradcheck(losses, ratios.log().requires_grad_())


def test_the_sequence_surrogate_is_differentiated_rightly_and_has_one_ratio_for_all_tokens() -> None:
    logp, old, advantage, real = random_tokens(1)

    def losses(logp: Tensor) -> Tensor:
        return grpo.sequence_surrogate(logp, old, advantage, real, 0.2, 0.28)[0] * real

    assert torch.autograd.gradcheck(losses, logp.requires_grad_())
    for row, is_real in zip(losses(logp)[0].detach(), real[0], strict=True):
        assert len(set(row[is_real.bool()].tolist())) == 1
    # What stands at positions that are not real is of no account.
    noise = torch.where(real.bool(), logp, torch.full_like(logp, -50.0))
    assert torch.equal(losses(noise), losses(logp))


def test_clipped_importance_clips_the_weight_of_a_gradient_and_silences_no_token() -> None:
    ratio = torch.tensor([0.1, 0.8, 1.0, 1.28, 9.0, 9.0], dtype=torch.float64)
    advantage = torch.tensor([2.0, 2.0, -1.0, 2.0, -1.0, 0.0], dtype=torch.float64)
    old = torch.tensor([-2.0, -1.0, -0.5, -3.0, -2.0, -2.0], dtype=torch.float64)
    logp = (ratio.log() + old).requires_grad_()
    losses, clipped = grpo.clipped_importance(logp, old, advantage, 0.2, 0.28)
    (gradient,) = torch.autograd.grad(losses.sum(), logp)
    weight = torch.tensor([0.8, 0.8, 1.0, 1.28, 1.28, 1.28], dtype=torch.float64)
    assert torch.allclose(gradient, -weight * advantage)
    assert torch.allclose(losses, -weight * advantage * logp)
    assert clipped[[0, 4]].all() and not clipped[[2, 5]].any()  # without advantage there is nothing to decide


def test_the_divergence_is_never_negative_nothing_at_nothing_and_differentiated_rightly() -> None:
    generator = torch.Generator().manual_seed(0)
    logp = -4 * torch.rand(3, 7, generator=generator, dtype=torch.float64)
    reference = -4 * torch.rand(3, 7, generator=generator, dtype=torch.float64)
    found = grpo.divergence(logp, reference)
    for mine, its, value in zip(logp.flatten().tolist(), reference.flatten().tolist(), found.flatten(), strict=True):
        assert float(value) == pytest.approx(math.exp(its - mine) - (its - mine) - 1)
    assert bool((found > 0).all())
    assert torch.equal(grpo.divergence(logp, logp), torch.zeros_like(logp))
    assert torch.autograd.gradcheck(lambda logp: grpo.divergence(logp, reference), logp.requires_grad_())


def test_the_divergence_is_that_of_kullback_and_leibler_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    policy, reference = (torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    expected = (policy.exp() * (policy - reference)).sum()
    assert (policy.exp() * grpo.divergence(policy, reference)).sum() == pytest.approx(float(expected))


LENGTHS = [[3, 1, 4, 2], [2, 5, 0, 0]]  # of two nodes; the second has two empty rows


def real_of(lengths: Sequence[Sequence[int]], width: int = 5) -> Tensor:
    return (torch.arange(width) < torch.tensor(lengths)[..., None]).double()


@pytest.mark.parametrize(
    ("aggregate", "sums"),
    [
        ("token", [10 / 12, 7 / 7]),  # tokens with a pass, by all tokens
        ("sequence", [4 / 6, 2 / 2]),  # completions with a pass, by all completions
        ("constant", [10 / (8 * 6), 7 / (8 * 2)]),  # tokens with a pass, by the longest allowed times completions
    ],
)
def test_token_weights_sum_to_what_their_rule_says(aggregate: str, sums: list[float]) -> None:
    """The first node has two more completions, of one token each, that need no pass and count all the same."""
    real, tokens, completions = real_of(LENGTHS), torch.tensor([12, 7]), torch.tensor([6, 2])
    weights = grpo.token_weights(aggregate, real, tokens, completions, 8)
    assert weights.sum((1, 2)).tolist() == pytest.approx(sums)
    assert bool((weights[real == 0] == 0).all()) and bool((weights[real == 1] > 0).all())
    by_completion = weights.sum(-1)[0]
    if aggregate == "sequence":
        assert by_completion.tolist() == pytest.approx([1 / 6] * 4)
    else:
        assert (by_completion / by_completion[1]).tolist() == pytest.approx(LENGTHS[0])


@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
def test_token_weights_do_not_depend_on_cuts_and_padding(aggregate: str) -> None:
    tokens, completions = torch.tensor([10, 7]), torch.tensor([4, 2])
    whole = grpo.token_weights(aggregate, real_of(LENGTHS), tokens, completions, 8)
    for cut in (1, 2, 3):
        parts = [
            grpo.token_weights(aggregate, real_of([row[piece] for row in LENGTHS], 9), tokens, completions, 8)
            for piece in (slice(0, cut), slice(cut, 4))
        ]
        assert torch.equal(torch.cat(parts, 1)[..., :5], whole)


@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
def test_a_node_without_anything_has_weights_of_zero_and_no_division_by_it(aggregate: str) -> None:
    weights = grpo.token_weights(aggregate, real_of([[2], [0]]), torch.tensor([2, 0]), torch.tensor([1, 0]), 8)
    assert bool(weights.isfinite().all()) and float(weights[1].abs().sum()) == 0


def test_corrected_advantages_are_those_worked_out_by_hand() -> None:
    """pi / mu of 1/2, 3/2 and 4: capped at 1 for bad texts under topr, at 2 for all under truncated."""
    said = torch.full((3,), -7.0, dtype=torch.float64)
    logp = said + torch.tensor([0.5, 1.5, 4.0], dtype=torch.float64).log()
    advantage = torch.tensor([-1.0, 2.0, -1.0], dtype=torch.float64)
    # Weights 1/2, 3/2, 2: their mean of -1, 2, -1 is (-1/2 + 3 - 2) / 4 = 1/8.
    for rule, expected in {
        "topr": [-0.5, 2.0, -1.0],
        "truncated": [0.5 * -1.125, 1.5 * 1.875, 2.0 * -1.125],
        **{rule: [-1.0, 2.0, -1.0] for rule in ("none", "damp", "positive")},
    }.items():
        assert grpo.corrected(rule, advantage, logp, said).tolist() == pytest.approx(expected), rule


@pytest.mark.parametrize(("rule", "cap"), [("topr", 1.0), ("truncated", 2.0)])
def test_corrected_advantages_are_numbers_within_the_cap_whatever_is_said(rule: str, cap: float) -> None:
    said = torch.tensor([-1e30, -500.0, -20.0, -1.0, 0.0, 50.0, 1e30])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, -1.0])
    for logp in (-1000.0, -20.0, 0.0):
        found = grpo.corrected(rule, advantage, torch.full((7,), logp), said)
        assert bool(found.isfinite().all())
        assert float(found.abs().max()) <= cap * 2
        assert float(found[-1]) == 0.0, "a text that is said to have been certain says nothing"
    assert grpo.corrected("truncated", advantage, torch.full((7,), -1e4), torch.full((7,), 0.0)).tolist() == [0.0] * 7
    if rule == "truncated":
        assert float(grpo.corrected(rule, advantage, said * 0 - 3.0, said * 0 - 3.5).sum()) == pytest.approx(
            0, abs=1e-6
        )


def test_negative_weights_are_those_of_the_table() -> None:
    own, damped = 0.7, 0.2
    for rule, expected in {"none": own, "damp": damped, "positive": 0.0, "topr": 1.0, "truncated": 1.0}.items():
        assert grpo.negative_weight(rule, True, own, damped) == expected, rule
        assert grpo.negative_weight(rule, False, own, damped) == own, rule


def test_chance_is_one_over_the_vocabulary_for_each_token() -> None:
    lengths = torch.tensor([1.0, 1.0, 3.0, 3.0, 0.0])
    logp = torch.tensor([-3.9, -4.0, -11.8, -11.9, 0.0])  # log 52 is 3.9512; three times that is 11.854
    assert grpo.better_than_chance(logp, lengths, 52).tolist() == [True, False, True, False, True]
    assert not grpo.better_than_chance(torch.tensor(math.nan), torch.tensor(1.0), 52)


# Log-probs in chunks, and only where there is something to score


def scoring(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of 2 nodes at 7 positions, each node's own head over 11 tokens, targets."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(2, 7, 5, generator=generator).requires_grad_()
    head = torch.randn(2, 11, 5, generator=generator).requires_grad_()
    return hidden, head, torch.randint(11, (2, 7), generator=generator)


@pytest.mark.parametrize("most_numbers", [1, 22, 43, 44, 66, 22 * 6, 22 * 7, 10**9])
def test_log_probs_in_chunks_are_those_of_the_whole_and_so_are_their_gradients(most_numbers: int) -> None:
    hidden, head, targets = scoring()
    upstream = torch.randn(2, 7, generator=torch.Generator().manual_seed(1))
    largest = 0

    def score(part: Tensor) -> Tensor:
        nonlocal largest
        scores = part @ head.transpose(1, 2)
        largest = max(largest, scores.numel())
        return scores

    logp, entropy = chunked_logprobs(score, hidden, targets, 0.7, 11, most_numbers)
    found = torch.autograd.grad((logp * upstream).sum(), (hidden, head))
    assert largest <= max(22, most_numbers), "no more scores at a time than allowed, on the way back neither"
    whole, whole_entropy = token_logprobs(hidden @ head.transpose(1, 2), targets, 0.7)
    expected = torch.autograd.grad((whole * upstream).sum(), (hidden, head))
    assert torch.allclose(logp, whole, atol=1e-6) and torch.allclose(entropy, whole_entropy, atol=1e-6)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    with torch.no_grad():
        assert torch.allclose(chunked_logprobs(score, hidden, targets, 0.7, 11, most_numbers)[0], whole, atol=1e-6)


def test_log_prob_and_entropy_of_a_token_are_those_worked_out_by_hand() -> None:
    scores = torch.tensor([[0.0, math.log(3.0)]]) * 0.5  # at temperature 1/2: one to three
    logp, entropy = token_logprobs(scores, torch.tensor([1]), 0.5)
    assert logp.item() == pytest.approx(math.log(0.75))
    assert entropy.item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))


def siblings(prompt: int, *completions: int, group: int = 0) -> list[TrainingSequence]:
    """Completions of these lengths to one prompt, of tokens that are all different."""
    numbers = iter(range(100 * group + 1, 10_000))
    shared = [next(numbers) for _ in range(prompt)]
    return [TrainingSequence(shared, [next(numbers) for _ in range(c)], 1.0, group=group) for c in completions]


@pytest.mark.parametrize(
    "micro_batch",
    [
        [[siblings(2, 3), siblings(4, 1), siblings(1, 2)], [siblings(3, 1)]],
        [[siblings(1, 1)], [siblings(2, 4, 1), siblings(5, 5)]],
        [[siblings(2, 2, 3)], []],
        [[siblings(3, 4, 4), siblings(3, 4, 4)], [siblings(3, 4, 4), siblings(3, 4, 4)]],
    ],
)
@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("whole", [False, True])
def test_scores_at_real_positions_are_those_of_a_loop_and_zero_elsewhere(
    micro_batch: MicroBatch, multiple: int, whole: bool
) -> None:
    """The scorer gets the hidden state before each completion token, and that token; and returns telling numbers.

    With prompts shared, and with each sequence whole.
    """
    padded = pad(micro_batch, CPU, multiple)
    # Nodes' whole sequences are not equally long; what is added at their end nobody looks at.
    most = max(padded.whole(k)[0].numel() for k in range(2))
    rows = [padded.whole(k)[0].flatten(1) for k in range(2)]
    ids = torch.cat([F.pad(row, (0, most - row.shape[1])) for row in rows]) if whole else padded.tokens
    source = torch.cat([padded.whole(k)[1] for k in range(2)]) if whole else padded.source_KSC
    K, N = ids.shape
    # A hidden state that names its place.
    k, n = torch.meshgrid(torch.arange(K).double(), torch.arange(N).double(), indexing="ij")
    hidden = torch.stack((k, n), -1).requires_grad_()
    scored = 0

    def score(hidden_KND: Tensor, targets_KN: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal scored
        scored = targets_KN.shape[1]
        place = hidden_KND @ torch.tensor([1e6, 1e2], dtype=torch.float64)
        return place + targets_KN + 0.5, -place - targets_KN - 0.5

    logp, entropy = at_real_positions(score, hidden, source, padded.targets_KSC, padded.real_KSC)
    expected = torch.zeros(padded.real_KSC.shape, dtype=torch.float64)
    touched = torch.zeros_like(hidden)
    for node, groups in enumerate(micro_batch):
        for number, group in enumerate(groups):
            for s, sequence in enumerate(group, number * padded.siblings):
                before = sequence.prompt[-1]
                for position, token in enumerate(sequence.completion):
                    at = int(source[node, s, position])
                    assert int(ids[node, at]) == before, "the token before it is the one that scores it"
                    expected[node, s, position] = 1e6 * node + 1e2 * at + token + 0.5
                    touched[node, at] += torch.tensor([1e6, 1e2])
                    before = token
    assert torch.equal(logp, expected) and torch.equal(entropy, -expected)
    assert scored == max(sum(len(one.completion) for group in groups for one in group) for groups in micro_batch)
    (gradient,) = torch.autograd.grad(logp.sum(), hidden)
    assert torch.equal(gradient, touched)


def test_padding_keeps_every_sequence_and_marks_what_is_not_there() -> None:
    (short,), (long, other) = siblings(2, 1), siblings(3, 2, 1)
    long = replace(long, foreign=True, said_logprob=-3.5, old_logprobs=[-1.0, -2.0], advantage=-0.5)
    short = replace(short, sampled_logprobs=[-0.25])
    padded = pad([[[short], [long, other]], [[short]]], CPU)
    assert padded.prompts_KQP.tolist() == [[[1, 2, 0], [1, 2, 3]], [[1, 2, 0], [0, 0, 0]]]
    assert padded.lengths_KQ.tolist() == [[2, 3], [2, 0]]
    assert padded.targets_KSC.tolist() == [[[3, 0], [0, 0], [4, 5], [6, 0]], [[3, 0], [0, 0], [0, 0], [0, 0]]]
    assert padded.real_KSC.tolist() == [[[1, 0], [0, 0], [1, 1], [1, 0]], [[1, 0], [0, 0], [0, 0], [0, 0]]]
    assert padded.positions[0].tolist() == [0, 1, 2, 0, 1, 2, 2, 3, 2, 3, 3, 4, 3, 4]
    assert padded.advantage_KS1.tolist() == [[[1.0], [0.0], [-0.5], [1.0]], [[1.0], [0.0], [0.0], [0.0]]]
    assert padded.foreign_KS.tolist() == [[False, False, True, False], [False] * 4]
    assert padded.old_KSC[0, 2].tolist() == [-1.0, -2.0] and padded.old_KSC.isnan().sum() == 14
    assert padded.sampled_KSC[:, 0, 0].tolist() == [-0.25, -0.25] and padded.sampled_KSC.isnan().sum() == 14
    assert padded.whole(0)[0].tolist() == [[[1, 2, 3, 0, 0], [1, 2, 0, 0, 0], [1, 2, 3, 4, 5], [1, 2, 3, 6, 0]]]


@pytest.mark.parametrize("most_tokens", [1, 10, 17, 40, 100, 10_000])
def test_micro_batches_hold_every_sequence_once_and_keep_to_the_budget(most_tokens: int) -> None:
    rng = random.Random(most_tokens)
    for _ in range(20):
        batches = []
        for count in (rng.randint(1, 9), rng.randint(0, 9), rng.randint(0, 9)):
            batch = Batch()
            for group in range(count):
                lengths = [rng.randint(1, 6) for _ in range(rng.randint(1, 5))]
                batch.sequences += siblings(rng.randint(1, 6), *lengths, group=group)
            batches.append(batch)
        pieces = micro_batches(batches, most_tokens)
        for k, batch in enumerate(batches):
            visited = [id(one) for piece in pieces for group in piece[k] for one in group]
            assert sorted(visited) == sorted(map(id, batch.sequences))
        for piece in pieces:
            assert pad(piece, CPU).tokens.numel() == tokens_of(piece)
            assert all(len({one.group for one in group}) == 1 for node in piece for group in node)
            alone = max(sum(map(len, node)) for node in piece) == 1
            assert tokens_of(piece) <= most_tokens or alone


def test_micro_batches_are_no_smaller_than_they_must_be() -> None:
    def batch() -> Batch:
        return Batch([*siblings(3, 4, 4), *(one for group in (1, 2, 3) for one in siblings(2, 1, group=group))])

    def sizes(most_tokens: int) -> list[int]:
        return [sum(map(len, piece[0])) for piece in micro_batches([batch(), batch()], most_tokens)]

    assert sizes(2 * 3 * 3) == [3, 1, 1]
    assert sizes(2 * 11) == [3, 2]
    assert sizes(2 * 4 * 11) == [5]
    assert micro_batches([Batch(), Batch()], 100) == []
