"""Generation by kernels chooses the tokens of the plain code, for every family; nodes do not see each other.

Triton's interpreter runs the kernels on the CPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_decoder import FAMILIES, GPT2, PUBLISHED, SMALL, read_stacked, save_random
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: there are no kernels to test")

from rl_swarm.policies import decoding, kernels, sampling
from rl_swarm.policies.decoding import Decoding
from rl_swarm.policies.families.parts import Shape, Weights
from rl_swarm.policies.kernels import Stage
from rl_swarm.policies.sampling import Sampled

pytestmark = pytest.mark.torch
torch.set_num_threads(1)

PROMPTS = [[[5, 9, 2], [7]], [[1, 2, 3, 4], [8, 8]]]
NEVER = [-5]
# One layer and one head are the quickest to interpret.
LITTLE = transformers.LlamaConfig(
    **SMALL | {"num_hidden_layers": 1, "num_attention_heads": 2}, num_key_value_heads=1, tie_word_embeddings=True
)


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room in small steps, frequent looks; and wide tiles, of which there are few."""
    monkeypatch.setattr(decoding, "PROMPT_STEP", 4)
    monkeypatch.setattr(decoding, "LOOK_EVERY", 2)
    monkeypatch.setattr(kernels, "BUSY", 1)


def two_nodes(config: Any, folder: Path) -> tuple[Shape, Weights]:
    return read_stacked([save_random(config, folder / str(seed), seed) for seed in (7, 8)])


@pytest.fixture
def little(tmp_path: Path) -> tuple[Shape, Weights]:
    return two_nodes(LITTLE, tmp_path)


class RowsSeen:
    """Notes how many rows each step has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[int] = []
        embed = kernels.embed

        def noted(stage: Stage, ids_KS: Tensor, tokens_KVD: Tensor, positions_KTD: Tensor | None) -> Tensor:
            self.steps.append(stage.slots_KM.shape[1])
            return embed(stage, ids_KS, tokens_KVD, positions_KTD)

        monkeypatch.setattr(kernels, "embed", noted)


def assert_alike(found: Sampled, expected: Sampled) -> None:
    """What comes after a completion's end does not count."""
    assert torch.equal(found.lengths_KS, expected.lengths_KS)
    assert torch.equal(found.stopped_KS, expected.stopped_KS)
    counts = torch.arange(expected.ids_KSC.shape[2]) < expected.lengths_KS[..., None]
    assert torch.equal(found.ids_KSC[counts], expected.ids_KSC[counts])
    assert (found.logprobs_KSC - expected.logprobs_KSC)[counts].abs().max() < 1e-4


def check(
    shape: Shape,
    weights: Weights,
    by_kernels: Decoding,
    prompts: Sequence[Sequence[Sequence[int]]] = PROMPTS,
    *,
    siblings: int = 2,
    new_tokens: int = 3,
    seeds: Sequence[int] = (1, 2),
    ends: Sequence[int] = NEVER,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> Sampled:
    """By kernels as by the plain code."""
    uniform = sampling.draws(seeds, len(prompts[0]) * siblings, new_tokens)
    found = by_kernels.sample(prompts, uniform, ends=ends, temperature=temperature, top_p=top_p)
    expected = sampling.sample(shape, weights, prompts, uniform, ends=ends, temperature=temperature, top_p=top_p)
    assert_alike(found, expected)
    return found


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != PUBLISHED])
def test_kernels_choose_the_tokens_of_the_plain_code(family: str, tmp_path: Path) -> None:
    shape, weights = two_nodes(FAMILIES[family], tmp_path)
    sampled = check(shape, weights, Decoding(shape, weights, graphs=False), siblings=1)
    assert not torch.equal(sampled.ids_KSC[0], sampled.ids_KSC[1]), "nodes with different weights"


@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 0.9), (2.0, 0.4), (0.0, 1.0), (0.0, 0.9)])
def test_so_they_do_at_any_temperature_and_from_a_head(
    temperature: float, top_p: float, little: tuple[Shape, Weights]
) -> None:
    shape, weights = little
    check(shape, weights, Decoding(shape, weights, graphs=False), temperature=temperature, top_p=top_p)


def test_a_large_vocabulary_filled_up_with_zeros_is_chosen_from_without_them(tmp_path: Path) -> None:
    config = transformers.GPT2Config(**GPT2 | {"vocab_size": 4099, "n_layer": 1, "n_head": 1})
    shape, weights = two_nodes(config, tmp_path)
    assert weights["embed"].shape[1] == 4160
    # So hot that every token is as likely as any other; the last number falls on the very last tokens.
    uniform = torch.tensor([0.01, 0.5, 1 - 2**-20, 0.9999]).view(1, 1, 4).repeat(2, 1, 1)
    prompts = [[[4098, 2]], [[3]]]
    found = Decoding(shape, weights, graphs=False).sample(prompts, uniform, ends=NEVER, temperature=1e4, top_p=1.0)
    expected = sampling.sample(shape, weights, prompts, uniform, ends=NEVER, temperature=1e4, top_p=1.0)
    assert_alike(found, expected)
    assert found.ids_KSC.max() == 4098


def test_rows_that_have_stopped_leave_and_change_nothing_for_those_that_run(
    little: tuple[Shape, Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, weights = little
    seen = RowsSeen(monkeypatch)
    ends = range(20, 36)
    sampled = check(shape, weights, Decoding(shape, weights, graphs=False), siblings=3, new_tokens=8, ends=ends)
    assert seen.steps[:2] == [6, 6]
    assert seen.steps == sorted(seen.steps, reverse=True) and seen.steps[-1] < 4
    assert not sampled.stopped_KS.all(), "someone was still running"
    by_node = [sorted(lengths) for lengths in sampled.lengths_KS.tolist()]
    assert by_node[0] != by_node[1], "nodes keep each other company"


def test_generation_ends_when_nobody_runs_any_more(
    little: tuple[Shape, Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, weights = little
    seen = RowsSeen(monkeypatch)
    everything_likely = [5, 9, 2, 7]
    weights["embed"][:, everything_likely] *= 20
    sampled = check(
        shape, weights, Decoding(shape, weights, graphs=False), siblings=1, new_tokens=30, ends=everything_likely
    )
    assert sampled.stopped_KS.all()
    assert len(seen.steps) < sampled.lengths_KS.max() + 1


def test_one_new_token_takes_no_step(little: tuple[Shape, Weights], monkeypatch: pytest.MonkeyPatch) -> None:
    shape, weights = little
    seen = RowsSeen(monkeypatch)
    check(shape, weights, Decoding(shape, weights, graphs=False), new_tokens=1)
    assert seen.steps == []


def test_buffers_serve_prompts_of_any_length_and_any_number_of_questions(little: tuple[Shape, Weights]) -> None:
    """Longer ones get more room, shorter ones find nothing of what was there before."""
    shape, weights = little
    by_kernels = Decoding(shape, weights, graphs=False)
    longer = [[[5] * 11, [7]], [[1, 2, 3, 4], [8, 8, 60, 2, 1]]]
    other = [[[9, 9]], [[3]]]
    for prompts, siblings, rooms in (
        (PROMPTS, 1, [(2, 2, 2)]),
        (longer, 1, [(2, 2, 2)]),
        (other, 1, [(2, 2, 2), (1, 1, 2)]),
        (PROMPTS, 1, [(1, 1, 2), (2, 2, 2)]),
        (other, 2, [(2, 2, 2), (1, 2, 2)]),
    ):
        check(shape, weights, by_kernels, prompts, siblings=siblings, new_tokens=2)
        assert list(by_kernels._rooms) == rooms, "those used last"


def test_a_second_call_owes_nothing_to_the_first(little: tuple[Shape, Weights]) -> None:
    shape, weights = little
    by_kernels = Decoding(shape, weights, graphs=False)
    check(shape, weights, by_kernels, siblings=1, ends=range(16))
    kept = check(shape, weights, by_kernels, siblings=1, seeds=(5, 6), ends=[3])
    before = kept.ids_KSC.clone()
    check(shape, weights, by_kernels, PROMPTS[::-1], siblings=1, seeds=(8, 9), temperature=0.5)
    assert torch.equal(kept.ids_KSC, before), "what was handed out stays as it was"


def test_weights_changed_in_place_are_seen(tmp_path: Path) -> None:
    config = transformers.Qwen2Config(**SMALL | {"num_attention_heads": 2}, num_key_value_heads=1)
    shape, weights = two_nodes(config, tmp_path)
    by_kernels = Decoding(shape, weights, graphs=False)
    before = check(shape, weights, by_kernels, siblings=1)
    for weight in weights.values():
        weight.add_(0.3 * torch.randn(weight.shape))
    after = check(shape, weights, by_kernels, siblings=1)
    assert not torch.equal(before.ids_KSC, after.ids_KSC)


@pytest.mark.filterwarnings("ignore:overflow")  # numpy's, who plays the GPU
def test_a_nodes_tokens_and_log_probs_are_the_same_bits_whatever_its_neighbour_does(
    little: tuple[Shape, Weights],
) -> None:
    """Another neighbour has other weights, prompts and draws, and stops at other times."""
    shape, weights = little
    uniform, ends = sampling.draws([1, 2], 4, 4), range(20, 30)

    def sample(weights: Weights, prompts: Sequence[Sequence[Sequence[int]]], uniform: Tensor) -> Sampled:
        by_kernels = Decoding(shape, weights, graphs=False)
        return by_kernels.sample(prompts, uniform, ends=ends, temperature=1.0, top_p=0.95)

    one = sample(weights, PROMPTS, uniform)
    others = {name: torch.stack((weight[0], 100 * torch.randn(weight[1].shape))) for name, weight in weights.items()}
    other_uniform = torch.stack((uniform[0], sampling.draws([77], 4, 4)[0]))
    two = sample(others, [PROMPTS[0], [[60], [3] * 6]], other_uniform)
    assert not torch.equal(one.lengths_KS[1], two.lengths_KS[1]), "rows left at other times"
    assert torch.equal(one.lengths_KS[0], two.lengths_KS[0])
    for s, length in enumerate(one.lengths_KS[0].tolist()):
        assert torch.equal(one.ids_KSC[0, s, :length], two.ids_KSC[0, s, :length])
        assert torch.equal(one.logprobs_KSC[0, s, :length], two.logprobs_KSC[0, s, :length])


def test_a_context_shorter_than_the_room_for_prompts_is_enough(tmp_path: Path) -> None:
    config = transformers.GPT2Config(**GPT2 | {"n_positions": 3, "n_layer": 1, "n_head": 1})
    shape, weights = two_nodes(config, tmp_path)
    check(shape, weights, Decoding(shape, weights, graphs=False), [[[4, 2]], [[3]]], siblings=1, new_tokens=1)


def test_out_of_memory_gives_all_buffers_up_and_a_smaller_call_goes_on(
    little: tuple[Shape, Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, weights = little
    by_kernels = Decoding(shape, weights, graphs=False)
    check(shape, weights, by_kernels, siblings=1, new_tokens=2)
    (room,) = by_kernels._rooms.values()
    cache = weakref.ref(room.completions)
    del room
    really = Decoding._make_room

    def make_room(self: Decoding, questions: int, *sizes: int) -> Any:
        if questions > 2:
            raise torch.OutOfMemoryError("out of memory")
        return really(self, questions, *sizes)

    monkeypatch.setattr(Decoding, "_make_room", make_room)
    with pytest.raises(torch.OutOfMemoryError):
        check(shape, weights, by_kernels, [[[5], [6], [7]], [[1], [2], [3]]])
    assert not by_kernels._rooms
    assert cache() is None, "nothing else holds on to what was given up"
    check(shape, weights, by_kernels, siblings=1, new_tokens=2)
