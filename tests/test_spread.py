"""Nodes spread over several devices: each draws and learns as on one, errors arrive, and DEVICE says which devices."""

from __future__ import annotations

import gc
import math
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from swarms import FakeClock, ask, toy_experiment

from rl_swarm import settings
from rl_swarm.errors import CheckpointError, SettingsError
from rl_swarm.host import Host
from rl_swarm.models import PICO_FOLDER
from rl_swarm.policies import gpu_memory, learning_of, open_policy
from rl_swarm.policies.engine import Learning, pick_devices
from rl_swarm.policies.families.parts import Weights
from rl_swarm.policies.huggingface import huggingface_learner
from rl_swarm.policies.learner import Learner
from rl_swarm.policies.saving import read_saved_weights
from rl_swarm.policies.spread import Spread, divided, spread
from rl_swarm.policies.stacked import stacked_learner
from rl_swarm.policies.toy import ToyPolicy
from rl_swarm.protocols import CheckpointNote, Policy
from rl_swarm.simulate import simulate
from rl_swarm.stores.memory import MemoryStore
from rl_swarm.tasks import open_tasks
from rl_swarm.types import Question, Rollout, RolloutGroup, ScoredGroup, Step

pytestmark = pytest.mark.torch
torch.set_num_threads(1)

NODES = ["a", "b", "c", "d", "e"]
TWO = ["cpu", "cpu"]
NOTHING: dict[str, list[ScoredGroup]] = {node: [] for node in NODES}
LEARNING = Learning(learning_rate=1e-3, max_new_tokens=8, temperature=1.5)
# Nothing pico knows an answer to, of several lengths: siblings must differ, or their advantages cancel.
NONSENSE = ("what?", "why,", "gj%/-b", "*bc+ai/i", "he-jd=", "ifejdigha=", "*hhdd+*g.", "hj*")

Answers = dict[str, list[tuple[Rollout, ...]]]
Make = Callable[[Sequence[str], str], Policy]


def stacked(held: Sequence[str], device: str) -> Policy:
    return stacked_learner(held, PICO_FOLDER, LEARNING, device)


def transformed(held: Sequence[str], device: str) -> Policy:
    return huggingface_learner(held, PICO_FOLDER, LEARNING, device)


def toy(held: Sequence[str], device: str) -> Policy:
    return ToyPolicy(held, 0.5)


def questions(nodes: Sequence[str], round: int) -> dict[str, list[Question]]:
    return {node: ask(*random.Random(f"{node} {round}").sample(NONSENSE, 2)) for node in nodes}


def answers(policy: Policy, nodes: Sequence[str], round: int) -> Answers:
    return policy.generate(questions(nodes, round), 4, {node: ord(node) + round for node in nodes})


def scored(nodes: Sequence[str], round: int, answered: Answers) -> dict[str, list[ScoredGroup]]:
    """Made-up rewards, so that every group says something."""
    rngs = {node: random.Random(f"rewards {node} {round}") for node in nodes}
    return {
        node: [
            ScoredGroup(
                RolloutGroup(node, Step(round), str(number), question, rollouts),
                tuple(rngs[node].random() for _ in rollouts),
            )
            for number, (question, rollouts) in enumerate(zip(asked, answered[node], strict=True))
        ]
        for node, asked in questions(nodes, round).items()
    }


def trained(policy: Policy, nodes: Sequence[str], rounds: range = range(2)) -> list[Answers]:
    """The answers of each round, learned from."""
    given = []
    for round in rounds:
        given.append(answers(policy, nodes, round))
        policy.update(scored(nodes, round, given[-1]))
    return given


def tokens(given: Sequence[Answers], node: str) -> list[tuple[int, ...] | None]:
    return [rollout.token_ids for answered in given for rollouts in answered[node] for rollout in rollouts]


def weights_of(policy: Policy, node: str) -> Weights:
    return read_saved_weights(policy.save(node, {}))


def distance(one: Weights, other: Weights) -> float:
    return math.sqrt(sum(float((one[name] - other[name]).double().square().sum()) for name in one))


def is_same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# The same as on one device


@pytest.mark.parametrize("make", [stacked, transformed])
def test_nodes_on_two_devices_draw_and_learn_exactly_as_their_share_does_by_itself(make: Make) -> None:
    both = spread(NODES, TWO, make)
    given = trained(both, NODES)
    for held in (NODES[:3], NODES[3:]):
        share = make(held, "cpu")
        by_itself = trained(share, held)
        for node in held:
            assert all(one[node] == other[node] for one, other in zip(given, by_itself, strict=True)), node
            assert is_same(weights_of(both, node), weights_of(share, node)), node


@pytest.mark.parametrize("make", [stacked, transformed])
def test_nodes_on_two_devices_draw_and_learn_as_on_one_and_as_alone(make: Make) -> None:
    # Tokens are the same. Weights, in float32, are so to a thousandth of the way they went (to 1e-4 where this was
    # written): a program of another shape rounds its sums otherwise, and Adam makes whole steps of gradients near zero.
    both, one = spread(NODES, TWO, make), make(NODES, "cpu")
    before = weights_of(one, "a")
    given, on_one = trained(both, NODES), trained(one, NODES)
    for node in NODES:
        alone = make([node], "cpu")
        assert tokens(given, node) == tokens(on_one, node) == tokens(trained(alone, [node]), node)
        moved = distance(weights_of(both, node), before)
        assert moved > 0.1
        for other in (one, alone):
            assert distance(weights_of(both, node), weights_of(other, node)) < 1e-3 * moved, node


def test_a_greedy_answer_is_greedy_on_every_device() -> None:
    policy = spread(["a", "b"], TWO, stacked)
    first, second = (
        policy.generate(questions(["a", "b"], 0), 2, {"a": seed, "b": seed}, greedy=True) for seed in (1, 2)
    )
    assert first == second and list(first) == ["a", "b"]


def test_a_swarm_on_two_devices_has_the_rows_of_one_on_one() -> None:
    chosen = settings.load(
        {"model_name": "pico", "gdrive_path": "unused", "node_id": "host", "num_transplant_trees": 2, "eval_every": 2}
        | {"num_train_samples": 3, "num_generations": 4, "max_rounds": 2, "eval_questions": 4, "device": "cpu"}
        | {"rollout_publish_frequency": "generation", "adaptive_ij_enabled": True}
    )
    assert chosen.tasks is not None

    def rows(policy: Policy) -> list[dict[str, Any]]:
        experiment, task = toy_experiment(MemoryStore(), chosen), open_tasks(str(chosen.tasks), "default")
        host = Host(experiment, NODES, task, policy, chosen, FakeClock(), FakeClock())
        found = simulate(experiment, [host], chosen.max_rounds, chosen.max_stages)
        return [{name: value for name, value in row.items() if name not in ("run", "seconds")} for row in found]

    learning = learning_of(chosen, "cpu")
    one, two = (
        rows(spread(NODES, devices, lambda held, device: stacked_learner(held, PICO_FOLDER, learning, device)))
        for devices in (["cpu"], TWO)
    )
    assert len(one) == len(two) == 2 * len(NODES)
    for expected, found in zip(one, two, strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == (pytest.approx(value, abs=1e-4) if isinstance(value, float) else value), name


# Who holds whom


@pytest.mark.parametrize(
    ("count", "parts", "sizes"),
    [(5, 2, [3, 2]), (2, 2, [1, 1]), (8, 3, [3, 3, 2]), (7, 4, [2, 2, 2, 1]), (9, 8, [2, 1, 1, 1, 1, 1, 1, 1])],
)
def test_shares_are_in_order_and_as_even_as_can_be(count: int, parts: int, sizes: list[int]) -> None:
    nodes = [f"node_{number}" for number in range(count)]
    shares = divided(nodes, parts)
    assert sorted(map(len, shares), reverse=True) == sizes
    assert [node for share in shares for node in share] == nodes


@pytest.mark.parametrize("count", [2, 3, 5])
def test_every_number_of_nodes_is_answered_and_taught(count: int) -> None:
    nodes = NODES[:count]
    policy = spread(nodes, TWO, stacked)
    before = {node: weights_of(policy, node) for node in nodes}
    given = answers(policy, nodes, 0)
    assert list(given) == nodes and all(len(rollouts) == 4 for node in nodes for rollouts in given[node])
    rows = policy.update(scored(nodes, 0, given))
    assert list(rows) == nodes and all(row["updated"] == 1 for row in rows.values())
    assert not any(is_same(before[node], weights_of(policy, node)) for node in nodes)


def test_with_one_device_there_is_no_wrapper() -> None:
    assert type(spread(NODES, ["cpu"], stacked)) is Learner
    assert type(open_policy(settings.load({"model_name": "pico", "device": "cpu"}), NODES)) is Learner
    assert type(spread(NODES, TWO, stacked)) is Spread


def test_a_device_whose_nodes_have_nothing_to_learn_from_leaves_them_as_they_are() -> None:
    policy = spread(NODES, TWO, stacked)
    groups = scored(NODES, 0, trained(policy, NODES, range(1))[0])  # momentum to be tempted by
    before = {node: weights_of(policy, node) for node in NODES}
    flat = [ScoredGroup(groups["e"][0].group, (1.0,) * 4)]
    rows = policy.update(groups | {"d": [], "e": flat})
    assert [rows[node]["updated"] for node in NODES] == [1, 1, 1, 0, 0]
    assert [rows[node]["trained_tokens"] > 0 for node in NODES] == [True, True, True, False, True]
    assert [is_same(before[node], weights_of(policy, node)) for node in NODES] == [False, False, False, True, True]


def test_a_device_whose_nodes_have_no_questions_has_no_answers() -> None:
    policy = spread(NODES, TWO, stacked)
    seeds = {node: ord(node) for node in NODES}
    asked = questions(NODES, 0)
    given = policy.generate(asked | {"d": [], "e": []}, 4, seeds)
    assert given == policy.generate(asked, 4, seeds) | {"d": [], "e": []}


# Checkpoints, peers' text, memory


def test_a_node_saved_on_one_device_goes_on_on_another_as_if_it_had_never_stopped() -> None:
    note = {"run": "r", "node": "c"}
    policy = spread(NODES, TWO, stacked)
    trained(policy, NODES)
    saved = policy.save("c", note)
    trained(policy, NODES, range(2, 3))
    # It was the third of the first device's nodes; here it is alone on the second.
    other = spread(["x", "c"], TWO, stacked)
    assert other.load("c", saved, {"node": "c"}) == note
    assert other.save("c", note) == saved
    untouched = weights_of(other, "x")
    trained(other, ["x", "c"], range(2, 3))
    assert distance(weights_of(other, "c"), weights_of(policy, "c")) < 1e-3 * distance(
        weights_of(other, "c"), untouched
    )


def test_a_checkpoint_of_another_node_is_refused_and_nothing_changes() -> None:
    policy = spread(["a", "b"], TWO, stacked)
    saved, before = policy.save("a", {"node": "a"}), weights_of(policy, "b")
    with pytest.raises(CheckpointError, match="belongs to"):
        policy.load("b", saved, {"node": "b"})
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        policy.load("b", saved[:100], {})
    assert is_same(before, weights_of(policy, "b"))


def test_peers_text_fits_on_several_devices_where_it_fits_on_one() -> None:
    one, two = spread(NODES, ["cpu"], stacked), spread(NODES, TWO, stacked)
    (question,) = ask("1+1=")
    for text in ("7", "", "1234567", "12345678", "1" * 100):
        for truncated in (False, True):
            rollouts = [Rollout("7"), Rollout(text, truncated=truncated)]
            assert one.fits(question, rollouts) == two.fits(question, rollouts), text


def test_what_is_said_before_the_first_round_names_every_device() -> None:
    said = spread(NODES, TWO, stacked).about(2, 2, 4)
    assert said.startswith("nodes spread over 2 devices. cpu: 3 nodes as one program, float32 on cpu; memory")
    assert ". cpu: 2 nodes as one program, float32 on cpu; memory" in said


# At the same time, and errors


class Watched(ToyPolicy):
    """The toy policy, with something done before it generates or updates."""

    def __init__(self, nodes: Sequence[str], before: Callable[[], object]) -> None:
        super().__init__(nodes, 0.5)
        self._before = before

    def generate(
        self,
        questions: Mapping[str, Sequence[Question]],
        group_size: int,
        seeds: Mapping[str, int],
        *,
        greedy: bool = False,
    ) -> Answers:
        self._before()
        return super().generate(questions, group_size, seeds, greedy=greedy)

    def update(self, batches: Mapping[str, Sequence[ScoredGroup]]) -> dict[str, dict[str, float]]:
        self._before()
        return super().update(batches)

    def save(self, node: str, note: CheckpointNote) -> bytes:
        self._before()
        return super().save(node, note)

    def load(self, node: str, saved: bytes, expected: CheckpointNote) -> CheckpointNote:
        self._before()
        return super().load(node, saved, expected)

    def about(self, own: int, peers: int, group_size: int) -> str:
        self._before()
        return super().about(own, peers, group_size)


def test_all_devices_work_at_the_same_time() -> None:
    meeting = threading.Barrier(2, timeout=60)  # one after the other would never meet
    policy = spread(NODES, TWO, lambda held, device: Watched(held, meeting.wait))
    trained(policy, NODES)
    assert not meeting.broken


def fail(error: Exception) -> None:
    raise error


def work_a_while() -> None:
    sum(range(3_000_000))


def test_an_error_of_one_device_arrives_as_it_was_when_the_others_are_done() -> None:
    error = ZeroDivisionError("on the first")
    failed, done = threading.Event(), threading.Event()

    def first() -> None:
        failed.set()
        raise error

    def second() -> None:
        assert failed.wait(60)
        work_a_while()
        done.set()

    befores = iter([first, second])
    policy = spread(NODES, TWO, lambda held, device: Watched(held, next(befores)))
    with pytest.raises(ZeroDivisionError) as caught:
        policy.update(NOTHING)
    assert caught.value is error
    assert done.is_set(), "nothing goes on in the background"
    with pytest.raises(ZeroDivisionError):
        answers(policy, NODES, 0)


def test_of_several_errors_the_first_devices_is_raised() -> None:
    befores = iter([lambda: fail(ValueError("first")), lambda: fail(KeyError("second"))])
    policy = spread(NODES, TWO, lambda held, device: Watched(held, next(befores)))
    for _ in range(20):
        with pytest.raises(ValueError, match="first"):
            policy.update(NOTHING)


def test_a_real_update_that_fails_on_one_device_can_be_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Learner] = []

    def make(held: Sequence[str], device: str) -> Policy:
        made.append(stacked_learner(held, PICO_FOLDER, LEARNING, device))
        return made[-1]

    policy = spread(NODES, TWO, make)
    groups = scored(NODES, 0, answers(policy, NODES, 0))
    before = {node: weights_of(policy, node) for node in NODES}
    with monkeypatch.context() as patch:
        patch.setattr(made[1]._models, "logprobs", lambda *_: fail(RuntimeError("the device fell off the bus")))
        with pytest.raises(RuntimeError, match="fell off the bus"):
            policy.update(groups)
    assert [is_same(before[node], weights_of(policy, node)) for node in NODES] == [False] * 3 + [True] * 2
    policy.update(groups)
    assert not any(is_same(before[node], weights_of(policy, node)) for node in NODES)


def test_a_policy_that_is_dropped_takes_its_threads_along() -> None:
    others = set(threading.enumerate())
    policy = spread(NODES, TWO, stacked)
    trained(policy, NODES, range(1))
    threads = set(threading.enumerate()) - others
    assert len(threads) == 2
    del policy
    gc.collect()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


# GPUs, on a machine that has none


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int, *, mps: bool = False) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


@pytest.mark.parametrize(
    ("gpus", "wanted", "nodes", "expected"),
    [
        (0, "auto", 4, ["cpu"]),
        (0, "cpu", 4, ["cpu"]),
        (1, "auto", 4, ["cuda"]),
        (1, "cuda", 4, ["cuda"]),
        (1, "cuda:0", 4, ["cuda:0"]),
        (2, "auto", 1, ["cuda"]),
        (2, "auto", 2, ["cuda:0", "cuda:1"]),
        (2, "cuda", 5, ["cuda:0", "cuda:1"]),
        (4, "cuda", 3, ["cuda:0", "cuda:1", "cuda:2"]),
        (4, "cuda", 1, ["cuda"]),
        (4, "cuda:3", 8, ["cuda:3"]),
        (4, "cuda:0,cuda:2", 8, ["cuda:0", "cuda:2"]),
        (4, "cuda:3,cuda:1,cuda:0", 2, ["cuda:3", "cuda:1"]),
        (4, "cuda:3,cuda:1", 1, ["cuda:3"]),
        (4, "cpu", 8, ["cpu"]),
        (12, "cuda:10,cuda:11", 8, ["cuda:10", "cuda:11"]),
    ],
)
def test_devices_are_those_asked_for_and_never_more_than_nodes(
    gpus: int, wanted: str, nodes: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, gpus)
    assert pick_devices(settings.load({"device": wanted}).device, nodes) == expected


def test_auto_takes_cuda_then_mps_then_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 1, mps=True)
    assert pick_devices("auto", 3) == ["cuda"] and pick_devices("mps", 3) == ["mps"]
    with_gpus(monkeypatch, 0, mps=True)
    assert pick_devices("auto", 3) == ["mps"]


@pytest.mark.parametrize(
    ("gpus", "wanted", "there"),
    [
        (0, "cuda", "cpu"),
        (0, "cuda:0", "cpu"),
        (2, "cuda:9", "cuda:0, cuda:1, cpu"),
        (2, "cuda:1,cuda:2", "cuda:0, cuda:1, cpu"),
        (2, "mps", "cuda:0, cuda:1, cpu"),
    ],
)
def test_a_device_that_is_not_there_is_one_sentence(
    gpus: int, wanted: str, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, gpus)
    chosen = settings.load({"model_name": "pico", "device": wanted})
    with pytest.raises(SettingsError) as caught:
        open_policy(chosen, ["a"])
    assert str(caught.value) == (
        f"DEVICE={wanted!r} is not allowed: torch finds only {there} on this machine; use these or auto."
    )


def test_spaces_in_a_list_of_devices_do_not_matter() -> None:
    assert settings.load({"device": " cuda:0, cuda:2 "}).device == "cuda:0,cuda:2"
    assert settings.load({"device": " cpu"}).device == "cpu"


def test_gpus_that_can_compute_in_half_precision_do(monkeypatch: pytest.MonkeyPatch) -> None:
    generations = {"cuda": (9, 0), "cuda:0": (8, 0), "cuda:1": (7, 5)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: generations[str(device)])
    chosen = settings.load({"model_name": "pico"})
    found = [learning_of(chosen, device).dtype for device in (*generations, "cpu", "mps")]
    assert found == ["bfloat16", "bfloat16", "float32", "float32", "float32"]


def test_a_model_is_chosen_for_the_smallest_gpu_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"cuda": 80, "cuda:0": 80, "cuda:1": 24, "cuda:2": 40}

    class Properties:
        def __init__(self, device: str) -> None:
            self.total_memory = sizes[device]

    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    with_gpus(monkeypatch, 3)
    assert [gpu_memory("auto", nodes) for nodes in (1, 2, 3, 9)] == [80, 24, 24, 24]
    assert [gpu_memory(device, 9) for device in ("cuda:2", "cuda:0,cuda:2", "cpu")] == [40, 40, 0]
    with_gpus(monkeypatch, 0)
    assert gpu_memory("auto", 2) == 0


def test_whatever_a_policy_does_its_device_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    local = threading.local()
    seen: list[tuple[str, str]] = []

    @contextmanager
    def current(device: str) -> Iterator[None]:
        local.device = device
        yield
        local.device = "another"

    monkeypatch.setattr(torch.cuda, "device", current)

    def make(held: Sequence[str], device: str) -> Policy:
        assert local.device == device
        return Watched(held, lambda: seen.append((device, local.device)))

    policy = spread(NODES, ["cuda:1", "cuda:0"], make)
    trained(policy, NODES)
    for node in NODES:
        policy.load(node, policy.save(node, {}), {})
    assert policy.about(1, 1, 1) == (
        "nodes spread over 2 devices. cuda:1: the toy policy takes next to no memory. "
        "cuda:0: the toy policy takes next to no memory"
    )
    assert len(seen) == 2 * 4 + 2 * 5 + 2
    assert all(own == found for own, found in seen) and {own for own, _ in seen} == {"cuda:0", "cuda:1"}


def test_one_gpu_by_its_number_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert type(spread(NODES, ["cuda:1"], toy)) is ToyPolicy
    spread(NODES, ["cuda"], toy)
    assert chosen == ["cuda:1"]
