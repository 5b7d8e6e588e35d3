"""Generation by plain torch: sequences that have stopped leave, and prompts are shared, without a token changing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from test_decoder import FAMILIES, read_stacked, save_random
from torch import Tensor

from rl_swarm.policies import sampling
from rl_swarm.policies.families.parts import Shape, Weights
from rl_swarm.policies.sampling import Recorder, Sampled

pytestmark = pytest.mark.torch
torch.set_num_threads(1)

PROMPTS = [[[5, 9, 2], [7]], [[1, 2, 3, 4], [8, 8]]]


@pytest.fixture(params=["gpt2", "llama, grouped queries, untied", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Shape, Weights]:
    """Two nodes with different weights."""
    config = FAMILIES[request.param]
    return read_stacked([save_random(config, tmp_path / str(seed), seed) for seed in (7, 8)])


def sample(
    model: tuple[Shape, Weights], uniform: Tensor, ends: Sequence[int], prompts: Sequence[Sequence[Sequence[int]]]
) -> Sampled:
    return sampling.sample(*model, prompts, uniform, ends=ends, temperature=1.0, top_p=1.0)


def assert_alike(found: Sampled, expected: Sampled) -> None:
    """What comes after a completion's end does not count."""
    assert torch.equal(found.lengths_KS, expected.lengths_KS)
    assert torch.equal(found.stopped_KS, expected.stopped_KS)
    counts = torch.arange(expected.ids_KSC.shape[2]) < expected.lengths_KS[..., None]
    assert torch.equal(found.ids_KSC[counts], expected.ids_KSC[counts])
    assert (found.logprobs_KSC - expected.logprobs_KSC)[counts].abs().max() < 1e-5


def test_sequences_that_have_stopped_leave_and_change_nothing_for_those_that_run(
    model: tuple[Shape, Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    leave, rows = Recorder.leave, []

    def noted(recorder: Recorder) -> Tensor | None:
        stay = leave(recorder)
        rows.append(recorder.rows_KM.shape[1])
        return stay

    uniform, ends = sampling.draws([1, 2], 10, 20), range(20, 30)
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "leave", noted)
        found = sample(model, uniform, ends, PROMPTS)
    monkeypatch.setattr(Recorder, "leave", lambda recorder: None)
    expected = sample(model, uniform, ends, PROMPTS)
    assert rows[0] == 10 and len(set(rows)) > 2, "they left more than once"
    assert found.lengths_KS.max() > 10 and len({*found.lengths_KS[0].tolist()}) > 4
    assert_alike(found, expected)


def record_of(K: int, S: int, C: int = 9) -> Recorder:
    return Recorder(torch.full((K, S, C), 0.5), ends=[0], temperature=0.0, top_p=1.0)


def choose(recorder: Recorder, c: int, ended: Sequence[Sequence[bool]]) -> None:
    """Token 0, the end, for these of the present rows, 1 for the others."""
    recorder.choose(c, torch.tensor([[[1.0, 0.0] if end else [0.0, 1.0] for end in node] for node in ended]))


def test_nobody_leaves_before_half_of_every_nodes_rows_have_stopped() -> None:
    recorder = record_of(2, 4)
    choose(recorder, 0, [[True, False, True, True], [False, False, True, False]])
    assert recorder.leave() is None
    choose(recorder, 1, [[True, False, True, True], [True, False, True, False]])
    stay = recorder.leave()
    # The second node has two that run; the first keeps one for company.
    assert stay is not None and stay.tolist() == [[1, 0], [1, 3]]
    assert recorder.rows_KM.tolist() == [[1, 0], [1, 3]]


def test_rows_that_stay_are_known_by_their_first_number_and_company_is_not_recorded_twice() -> None:
    recorder = record_of(1, 6)
    choose(recorder, 0, [[True, True, True, True, False, False]])
    stay = recorder.leave()
    assert stay is not None and stay.tolist() == [[4, 5]]
    choose(recorder, 1, [[True, False]])
    stay = recorder.leave()
    assert stay is not None and stay.tolist() == [[1]], "a row among those present"
    assert recorder.rows_KM.tolist() == [[5]]
    choose(recorder, 2, [[False]])
    assert recorder.leave() is None, "the last one stays"
    sampled = recorder.sampled
    assert sampled.lengths_KS.tolist() == [[1, 1, 1, 1, 2, 9]]
    assert sampled.stopped_KS.tolist() == [[True] * 5 + [False]]
    assert sampled.ids_KSC[0, 5, :3].tolist() == [1, 1, 1]
    two = record_of(2, 2)
    choose(two, 0, [[True, False], [True, True]])
    two.leave()
    choose(two, 1, [[False], [True]])
    assert two.sampled.lengths_KS.tolist() == [[1, 9], [1, 1]], "company has stopped once and for all"


def test_completions_of_one_prompt_are_those_of_as_many_prompts_alike(model: tuple[Shape, Weights]) -> None:
    """A prompt is passed and kept once for all of its completions."""
    siblings = 3
    uniform = sampling.draws([1, 2], 2 * siblings, 6)
    separate = [[prompt for prompt in node for _ in range(siblings)] for node in PROMPTS]
    for ends in ([-1], range(20, 40)):
        assert_alike(sample(model, uniform, ends, PROMPTS), sample(model, uniform, ends, separate))
