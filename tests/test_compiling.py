"""What is compiled computes what is not, and is compiled once for batches of every size.

Compiled for no machine: the graphs are made and differentiated as ever, and then run by torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_decoder import FAMILIES, save_random
from torch._dynamo.utils import counters

from rl_swarm.policies import compiling
from rl_swarm.policies.batches import Siblings, TrainingSequence, pad
from rl_swarm.policies.compiling import WORTH_COMPILING, is_worth_it
from rl_swarm.policies.engine import Learning
from rl_swarm.policies.families.parts import Weights
from rl_swarm.policies.stacked import StackedModels

pytestmark = pytest.mark.torch
torch.set_num_threads(1)

LEARNING = Learning(learning_rate=1e-2, max_new_tokens=8)


@pytest.fixture(autouse=True)
def _no_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True, backend="aot_eager")

    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(compiling, "_compiled", compiled)
    yield
    torch._dynamo.reset()


def batch(questions: int, siblings: int, prompt: int, completion: int) -> list[list[Siblings]]:
    generator = torch.Generator().manual_seed(questions + siblings + prompt + completion)

    def ids(length: int) -> list[int]:
        return torch.randint(0, 61, (length,), generator=generator).tolist()

    def group() -> Siblings:
        shared = ids(prompt)
        return [TrainingSequence(shared, ids(completion - r), 1.0 - 1.7 * r) for r in range(siblings)]

    return [[group() for _ in range(questions)] for _ in range(2)]


BATCHES = [batch(2, 2, 5, 6), batch(1, 3, 2, 7), batch(3, 2, 9, 4), batch(1, 1, 4, 3)]


def gradients(models: StackedModels, micro_batch: list[list[Siblings]]) -> tuple[torch.Tensor, Weights]:
    padded = pad(micro_batch, torch.device("cpu"))
    logprobs, entropies = models.logprobs(padded, 0.9)
    (logprobs * padded.advantage_KS1).sum().backward()  # type: ignore[no-untyped-call]
    found = models.gradients(1)
    models.drop_gradients()
    return torch.stack((logprobs.detach(), entropies)), found


@pytest.mark.parametrize("family", ["gpt2", "llama, grouped queries, untied", "qwen3"])
def test_compiled_passes_have_the_gradients_of_plain_ones_and_compile_once(family: str, tmp_path: Path) -> None:
    folder = save_random(FAMILIES[family], tmp_path, 1)
    plain = StackedModels(2, folder, Learning(1e-2, 8, compile="off"), "cpu")
    compiled = StackedModels(2, folder, Learning(1e-2, 8, compile="on"), "cpu")
    graphs = []
    for micro_batch in BATCHES:
        (found, ours), (expected, theirs) = gradients(compiled, micro_batch), gradients(plain, micro_batch)
        graphs.append(counters["stats"]["unique_graphs"])
        assert (found - expected).abs().max() < 1e-5
        for name, gradient in theirs.items():
            assert (ours[name] - gradient).norm() < 1e-5 * gradient.norm() + 1e-6, name
    # Before and after attention, heads (where they are turned or normed), log-probs.
    assert graphs == [3 if family == "gpt2" else 4] * len(BATCHES)


def test_without_being_asked_only_large_models_on_a_gpu_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(compiling, "kernels_run_on", lambda device: device == gpu)
    large, small = WORTH_COMPILING, WORTH_COMPILING - 1
    assert all(is_worth_it("on", numbers, device) for numbers in (1, large) for device in (cpu, gpu))
    assert not any(is_worth_it("off", numbers, device) for numbers in (1, large) for device in (cpu, gpu))
    assert [is_worth_it("auto", *one) for one in ((large, gpu), (small, gpu), (large, cpu))] == [True, False, False]
    gradients(StackedModels(2, save_random(FAMILIES["llama"], tmp_path, 1), LEARNING, "cpu"), BATCHES[0])
    assert counters["stats"]["unique_graphs"] == 0
