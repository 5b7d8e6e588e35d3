"""K nodes stacked into one program learn and write what each would alone, for every family."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from test_decoder import FAMILIES, PUBLISHED, name_as_published, save_random

from rl_swarm.policies import sampling
from rl_swarm.policies.batches import Siblings, TrainingSequence, pad
from rl_swarm.policies.engine import Learning
from rl_swarm.policies.families.parts import Weights
from rl_swarm.policies.stacked import StackedModels

pytestmark = pytest.mark.torch
torch.set_num_threads(1)

LEARNING = Learning(learning_rate=1e-2, max_new_tokens=8)
NODES = 3
PROMPTS = [[[5, 9, 2], [7]], [[1, 2, 3, 4], [8, 8]], [[60], [3] * 6]]
RATE, MOST_NORM = 0.01, 1.0


def texts(k: int) -> list[Siblings]:
    """Each node has its own, and not equally many."""
    generator = torch.Generator().manual_seed(k)

    def completion(length: int) -> list[int]:
        return torch.randint(0, 61, (length,), generator=generator).tolist()

    return [
        [TrainingSequence(prompt, completion(1 + q + r + k), (-1.0) ** r * (1 + r + q)) for r in range(1 + k)]
        for q, prompt in enumerate(PROMPTS[k][: 1 + k % 2])
    ]


def learn(models: StackedModels, micro_batch: list[list[Siblings]]) -> list[Weights]:
    """One pass and one update; returns the gradients."""
    padded = pad(micro_batch, torch.device("cpu"))
    logprobs, _ = models.logprobs(padded, 0.9)
    (logprobs * padded.advantage_KS1).sum().backward()  # type: ignore[no-untyped-call]
    gradients = [models.gradients(k) for k in range(len(micro_batch))]
    _, moved = models.step(torch.ones(len(micro_batch), dtype=torch.bool), RATE, MOST_NORM)
    assert moved.all()
    return gradients


def write(
    models: StackedModels, prompts: list[list[list[int]]], seeds: Sequence[int], temperature: float
) -> sampling.Sampled:
    uniform = sampling.draws(seeds, 4, 6)
    return models.sample(prompts, uniform, ends=[3, 4], temperature=temperature, top_p=0.95)


@pytest.mark.parametrize("family", FAMILIES)
def test_stacked_nodes_learn_and_write_what_each_would_alone(family: str, tmp_path: Path) -> None:
    """Different weights, different texts; one update of each, then texts from the new weights."""
    folders = [save_random(FAMILIES[family], tmp_path / str(seed), seed) for seed in range(NODES)]
    if family == PUBLISHED:
        folders = [name_as_published(folder) for folder in folders]
    together = StackedModels(NODES, folders[0], LEARNING, "cpu")
    alone = [StackedModels(1, folder, LEARNING, "cpu") for folder in folders]
    for k, single in enumerate(alone):
        together.load_state(k, single.state(0))
    before = [single.weights(0) for single in alone]
    gradients = learn(together, [texts(k) for k in range(NODES)])
    for k, single in enumerate(alone):
        (expected,) = learn(single, [texts(k)])
        size = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
        stacked, updated = together.weights(k), single.weights(0)
        for name, gradient in expected.items():
            assert (gradients[k][name] - gradient).norm() < 1e-6 * size, (k, name)
            # Adam turns the last bit of a gradient near zero into a whole step.
            clear = gradient.abs() > 1e-4 * size
            assert torch.allclose(stacked[name][clear], updated[name][clear], atol=1e-3 * RATE), (k, name)
            assert (updated[name] - before[k][name])[clear].abs().sum() > 0 or not clear.any()
        for temperature in (0.0, 1.0):
            found = write(together, PROMPTS, range(NODES), temperature)
            one = write(single, PROMPTS[k : k + 1], [k], temperature)
            assert torch.equal(found.lengths_KS[k], one.lengths_KS[0])
            for s, length in enumerate(one.lengths_KS[0].tolist()):
                assert torch.equal(found.ids_KSC[k, s, :length], one.ids_KSC[0, s, :length]), (k, s)


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_padding_beyond_a_models_last_position_changes_nothing(family: str, multiple: int, tmp_path: Path) -> None:
    """A long prompt beside a long completion of another: together they are longer than any sequence, and than 64."""
    long_prompt = [TrainingSequence([7] * 60, [5, 6, 9], 1.0)]
    long_completion = [TrainingSequence([8, 3], list(range(1, 61)), 1.0)]
    folder = save_random(FAMILIES[family], tmp_path, 1)
    models = StackedModels(2, folder, LEARNING, "cpu")
    together = pad([[long_prompt, long_completion], [long_completion, long_prompt]], torch.device("cpu"), multiple)
    found, _ = models.logprobs(together, 1.0)
    for q, siblings in enumerate((long_prompt, long_completion)):
        alone, _ = StackedModels(1, folder, LEARNING, "cpu").logprobs(pad([[siblings]], torch.device("cpu")), 1.0)
        length = len(siblings[0].completion)
        for k, place in ((0, q), (1, 1 - q)):
            assert torch.allclose(found[k, place, :length], alone[0, 0, :length], atol=1e-5)


def test_whole_sequences_are_no_longer_than_the_longest() -> None:
    long_prompt, long_completion = TrainingSequence([7] * 60, [5, 6], 1.0), TrainingSequence([8], [4] * 61, 1.0)
    padded = pad([[[long_prompt], [long_completion]]], torch.device("cpu"))
    ids, source = padded.whole(0)
    assert ids.shape == (1, 2, 62) and int(source.max()) < 2 * 62
    assert ids[0, 0, 60:].tolist() == [5, 6] and ids[0, 1].tolist() == [8, *[4] * 61]
