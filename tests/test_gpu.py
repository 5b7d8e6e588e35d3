"""What only a GPU can show: graphs, kernels as compiled, half precision. Run it there with

    TRITON_INTERPRET=0 python -m pytest tests/test_gpu.py -q -rs

Without a GPU it is skipped; the same code runs on a CPU in test_kernels, test_decoding and test_arranging.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_decoder import FAMILIES, read_stacked, save_random

from rl_swarm.models import PICO_FOLDER
from rl_swarm.policies import sampling
from rl_swarm.policies.decoder import forward
from rl_swarm.policies.engine import Learning
from rl_swarm.policies.families.parts import Shape, Weights
from rl_swarm.policies.stacked import StackedModels, stacked_learner
from rl_swarm.types import Question, QuestionName, Rollout, RolloutGroup, ScoredGroup, Step

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU"),
]

PROMPTS = [[[5, 9, 2], [7] * 30, [3] * 11], [[1, 2, 3, 4], [8, 8], [6] * 40]]
HALF, FULL = torch.bfloat16, torch.float32


@pytest.fixture(params=["gpt2", "llama, grouped queries, untied", "qwen2", "qwen3"])
def models(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Shape, Weights]:
    """Two nodes of different weights."""
    return read_stacked([save_random(FAMILIES[request.param], tmp_path / str(seed), seed) for seed in (7, 8)])


def decode(
    shape: Shape, weights: Weights, prompts: list[list[list[int]]], seeds: list[int], *, graphs: bool = True
) -> sampling.Sampled:
    from rl_swarm.policies.decoding import Decoding

    uniform_KSC = sampling.draws(seeds, 24, 24)
    decoding = Decoding(shape, weights, graphs=graphs)
    return decoding.sample(prompts, uniform_KSC, ends=[3, 8], temperature=0.8, top_p=1.0)


def on_gpu(weights: Weights, dtype: torch.dtype) -> Weights:
    return {name: weight.to("cuda", dtype) for name, weight in weights.items()}


@pytest.mark.parametrize("dtype", [FULL, HALF])
def test_graphs_change_nothing(models: tuple[Shape, Weights], dtype: torch.dtype) -> None:
    shape, weights = models[0], on_gpu(models[1], dtype)
    one, other = (decode(shape, weights, PROMPTS, [1, 2], graphs=graphs) for graphs in (True, False))
    assert torch.equal(one.ids_KSC, other.ids_KSC) and torch.equal(one.logprobs_KSC, other.logprobs_KSC)
    assert torch.equal(one.lengths_KS, other.lengths_KS) and len(set(one.lengths_KS.flatten().tolist())) > 2


@pytest.mark.parametrize("dtype", [FULL, HALF])
def test_sampled_log_probs_are_those_of_a_plain_pass_in_float32(
    models: tuple[Shape, Weights], dtype: torch.dtype
) -> None:
    shape, weights = models
    # What half precision does to the weights is no fault of the pass.
    exact = {name: weight.to(dtype).float() for name, weight in weights.items()}
    sampled = decode(shape, on_gpu(weights, dtype), PROMPTS, [1, 2]).cpu()
    worst = 0.0
    for k in range(2):
        for s in range(24):
            prompt, length = PROMPTS[k][s // 8], int(sampled.lengths_KS[k, s])
            ids = torch.tensor([*prompt, *sampled.ids_KSC[k, s, :length].tolist()])[None, None]
            node = {name: weight[k : k + 1] for name, weight in exact.items()}
            scores = forward(shape, node, ids, torch.arange(ids.shape[2])[None, None])[0, 0, len(prompt) - 1 : -1]
            expected = torch.log_softmax(scores / 0.8, -1).gather(1, ids[0, 0, len(prompt) :, None])[:, 0]
            worst = max(worst, float((sampled.logprobs_KSC[k, s, :length] - expected).abs().max()))
    print(f"{shape.family} {dtype}: {worst:.1e}")
    assert worst < (1e-4 if dtype == FULL else 0.3)


@pytest.mark.parametrize("dtype", [FULL, HALF])
def test_a_nodes_tokens_do_not_change_with_another_nodes_weights_prompts_and_seed(
    models: tuple[Shape, Weights], dtype: torch.dtype
) -> None:
    shape, weights = models[0], on_gpu(models[1], dtype)
    company = {name: torch.stack((weight[0], weight[1] * 1.3)) for name, weight in weights.items()}
    before = decode(shape, weights, PROMPTS, [1, 2])
    after = decode(shape, company, [PROMPTS[0], [[4] * 20, [5] * 64, [6]]], [1, 77])
    assert torch.equal(before.ids_KSC[0], after.ids_KSC[0])
    assert torch.equal(before.logprobs_KSC[0], after.logprobs_KSC[0])
    assert not torch.equal(before.ids_KSC[1], after.ids_KSC[1])


def groups(node: str, seed: int, completion: int = 20) -> list[ScoredGroup]:
    rng = random.Random(seed)
    made = []
    for number in range(3):
        question = Question(QuestionName("none", "", seed, number), "".join(rng.choices("0123456789", k=12)), "")
        rollouts = tuple(Rollout("", tuple(rng.choices(range(2, 50), k=completion)), truncated=True) for _ in range(4))
        group = RolloutGroup(node, Step(0), str(number), question, rollouts)
        made.append(ScoredGroup(group, (1.0, 0.0, 1.0, 0.0)))
    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("compile", ["on", "off"])
def test_a_nodes_update_does_not_change_with_another_nodes_weights_and_data(dtype: str, compile: str) -> None:
    learning = Learning(1e-4, 32, dtype=dtype, compile=compile)
    found = []
    for seed, completion in ((1, 20), (2, 20), (3, 9)):
        learner = stacked_learner(["a", "b"], PICO_FOLDER, learning, "cuda")
        learner.update({"a": [], "b": groups("b", seed, completion)})  # other weights
        learner.update({"a": groups("a", 0), "b": groups("b", seed + 10, completion)})
        found.append(learner.node_weights("a"))
    same, like = (
        max(float((found[0][name] - other[name]).abs().max()) for name in other) for other in (found[1], found[2])
    )
    print(f"{dtype}, compile {compile}: {same:.1e} with data of the same sizes, {like:.1e} with others")
    assert same == 0.0
    # Another size of the batch may round sums otherwise; the first step of Adam is at most the rate either way.
    assert like <= 2.1e-4


def test_stacked_nodes_learn_on_a_gpu_what_they_learn_on_a_cpu() -> None:
    learning = Learning(1e-4, 32)
    batches = {"a": groups("a", 1), "b": groups("b", 2, 11)}
    gpu, cpu = (
        stacked_learner(["a", "b"], PICO_FOLDER, replace(learning, compile=compile), device).gradients(batches)
        for device, compile in (("cuda", "on"), ("cpu", "off"))
    )
    for node in batches:
        for name, gradient in cpu[node].items():
            assert torch.allclose(gpu[node][name].cpu(), gradient, atol=1e-5, rtol=1e-3), name


def test_memory_does_not_grow_over_200_rounds() -> None:
    nodes = [f"n{number}" for number in range(8)]
    learner = stacked_learner(nodes, PICO_FOLDER, Learning(1e-5, 24, dtype="bfloat16"), "cuda")
    rng = random.Random(0)
    taken: list[int] = []
    for number in range(200):
        asked = {
            node: [Question(QuestionName("none", "", number, q), "7" * rng.randint(3, 60), "") for q in range(4)]
            for node in nodes
        }
        answers = learner.generate(asked, 8, {node: number * 8 + k for k, node in enumerate(nodes)})
        if number % 20 == 0:  # as an evaluation does
            learner.generate({node: asked[node][:1] * 16 for node in nodes}, 1, dict.fromkeys(nodes, 1), greedy=True)
        learner.update(
            {
                node: [
                    ScoredGroup(RolloutGroup(node, Step(number), str(q), asked[node][q], group), (1.0, 0.0) * 4)
                    for q, group in enumerate(answers[node])
                ]
                for node in nodes
            }
        )
        taken.append(torch.cuda.memory_allocated())
    print(f"allocated after 30 rounds {max(taken[:30]) / 2**20:.1f} MiB, after 200 {max(taken[-30:]) / 2**20:.1f} MiB")
    assert max(taken[-30:]) <= max(taken[:30]) + 2**20


def test_models_of_a_large_vocabulary_decode_from_padded_tables(tmp_path: Path) -> None:
    config = FAMILIES["gpt2"].__class__(vocab_size=5003, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    models = StackedModels(2, save_random(config, tmp_path, 1), Learning(1e-4, 8), "cuda")
    sampled = models.sample([[[5, 6]], [[7]]], sampling.draws([1, 2], 4, 8), ends=[-1], temperature=1.0, top_p=0.9)
    assert int(sampled.ids_KSC.max()) < 5003
