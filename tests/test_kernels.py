"""Each kernel against plain torch, in float32. Triton's interpreter runs them on the CPU.

On a GPU, `TRITON_INTERPRET=0` runs the same tests compiled.

Shape letters: K nodes, M rows, S sequences, Q questions, D width, N outputs, H heads, G key-value heads, E head width,
P prompt positions, C completion positions, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: there are no kernels to test")

from rl_swarm.policies import adam, kernels, training_kernels
from rl_swarm.policies.adam import StackedAdam
from rl_swarm.policies.kernels import GATED_SILU, GELU, NO_ACTIVATION, Record, Stage, tiles_for
from rl_swarm.policies.sampling import nucleus, pick

pytestmark = pytest.mark.torch
torch.set_num_threads(1)

DEVICE = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"
NAN = float("nan")


@pytest.fixture(autouse=True)
def _on_one_device() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        yield


def numbers(values: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# Linear layers


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None, onto: Tensor | None, activation: int) -> Tensor:
    """In float64."""
    y = x.double() @ weight.double().transpose(1, 2)
    if bias is not None:
        y = y + bias.double()[:, None]
    if activation == GELU:
        y = F.gelu(y, approximate="tanh")
    if activation == GATED_SILU:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y if onto is None else y + onto.double()


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [(1, 16, 16), (5, 24, 40), (3, 7, 5), (17, 33, 130), (35, 70, 64), (2, 3, 1600)],
)
def test_linear_is_a_product_with_whatever_follows_it(rows: int, outputs: int, inputs: int) -> None:
    """Sizes that fill blocks of rows, outputs and inputs, and sizes that do not."""
    K = 2
    x = torch.randn(K, rows, inputs)
    for activation, biased, added in product((NO_ACTIVATION, GELU, GATED_SILU), (False, True), (False, True)):
        wide = outputs * (2 if activation == GATED_SILU else 1)
        weight = torch.randn(K, wide, inputs) * inputs**-0.5
        bias = torch.randn(K, wide) if biased else None
        onto = torch.randn(K, rows, outputs) if added else None
        found = kernels.linear(x, weight, bias, onto=onto, activation=activation)
        expected = plain_linear(x, weight, bias, onto, activation)
        assert found.shape == (K, rows, outputs) and found.dtype == torch.float32
        assert (found - expected).abs().max() < 1e-5, (activation, biased, added)


@pytest.mark.parametrize("activation", [NO_ACTIVATION, GATED_SILU])
def test_linear_reads_slices_of_larger_tensors_where_they_lie_and_nothing_around_them(activation: int) -> None:
    def slice_of_larger(*size: int) -> Tensor:
        larger = torch.full([length + 3 for length in size], NAN)
        inner = larger[tuple(slice(0 if axis == 0 else 1, -3 if axis == 0 else -2) for axis in range(len(size)))]
        return inner.copy_(torch.randn(size))

    rows, outputs, inputs = 5, 18, 20
    wide = outputs * (2 if activation == GATED_SILU else 1)
    x, weight, bias = slice_of_larger(2, rows, inputs), slice_of_larger(2, wide, inputs), slice_of_larger(2, wide)
    onto = slice_of_larger(2, rows, outputs)
    assert not weight.is_contiguous()
    found = kernels.linear(x, weight, bias, onto=onto, activation=activation)
    assert found.is_contiguous()
    assert (found - plain_linear(x, weight, bias, onto, activation)).abs().max() < 1e-4
    table = torch.cat((torch.randn(2, 37, inputs), torch.full((2, 27, inputs), NAN)), 1)
    found = kernels.linear(x, table[:, :37])
    assert (found - plain_linear(x, table[:, :37], None, None, NO_ACTIVATION)).abs().max() < 1e-4


def test_linear_sums_half_precision_in_float32_and_rounds_once() -> None:
    x, weight = torch.randn(2, 5, 96).half(), torch.randn(2, 24, 96).half()
    bias, onto = torch.randn(2, 24).half(), torch.randn(2, 5, 24).half()
    expected = plain_linear(x, weight, bias, onto, NO_ACTIVATION)
    found = kernels.linear(x, weight, bias, onto=onto, out_dtype=torch.float32)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 1e-4
    rounded = kernels.linear(x, weight, bias, onto=onto)
    assert rounded.dtype == torch.float16
    assert torch.equal(rounded, found.half())


def test_a_row_comes_out_the_same_bit_for_bit_whoever_else_is_there() -> None:
    x, weight = torch.randn(1, 40, 150), torch.randn(1, 20, 150)
    everyone = kernels.linear(x, weight, rows=40)
    for few in (1, 3, 20):
        assert torch.equal(kernels.linear(x[:, :few], weight, rows=40), everyone[:, :few])
    others = torch.cat((x[:, :1], torch.randn(1, 39, 150) * 100), 1)
    assert torch.equal(kernels.linear(others, weight)[:, :1], everyone[:, :1])


def test_the_hint_of_rows_decides_how_a_product_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def noted(nodes: int, rows: int, outputs: int, inputs: int, item: int, matrices: int) -> kernels.Tiles:
        asked.append(rows)
        return tiles_for(nodes, rows, outputs, inputs, item, matrices)

    monkeypatch.setattr(kernels, "tiles_for", noted)
    for rows in (0, 2, 40):
        kernels.linear(torch.randn(1, 3, 16), torch.randn(1, 16, 16), rows=rows)
    assert asked == [3, 3, 40]


def test_tiles_fit_into_shared_memory_and_sum_in_an_order_that_the_weights_alone_decide() -> None:
    sizes = product((1, 8, 37, 576, 8192, 50_257, 151_936), (1, 5, 33, 64, 576, 1536, 5120, 28_672))
    for outputs, inputs in sizes:
        orders = set()
        for nodes, rows, item, matrices in product((1, 8, 300), (1, 16, 17, 33, 5000), (2, 4), (1, 2)):
            tiles = tiles_for(nodes, rows, outputs, inputs, item, matrices)
            loaded = tiles.stages * tiles.inputs * (tiles.rows + matrices * tiles.outputs) * item
            assert loaded <= kernels.SHARED_MEMORY and tiles.stages >= 1
            assert all(size >= 16 and size & (size - 1) == 0 for size in (tiles.rows, tiles.outputs, tiles.inputs))
            orders.add(tiles.inputs)
        assert len(orders) == 1


# Norms


@pytest.mark.parametrize("width", [1, 5, 16, 40, 100])
@pytest.mark.parametrize("epsilon", [1e-6, 0.1])
def test_norms_are_those_of_torch_with_weights_for_each_node(width: int, epsilon: float) -> None:
    x, weight, bias = torch.randn(2, 3, width) + 2, torch.randn(2, width), torch.randn(2, width)
    layer = F.layer_norm(x, (width,), eps=epsilon) * weight[:, None] + bias[:, None]
    assert (kernels.norm(x, weight, bias, epsilon) - layer).abs().max() < 1e-5
    root = F.rms_norm(x, (width,), eps=epsilon) * weight[:, None]
    assert (kernels.norm(x, weight, None, epsilon) - root).abs().max() < 1e-5


def test_norms_take_some_of_the_rows_of_a_larger_tensor() -> None:
    x, weight, bias = torch.randn(3, 9, 24), torch.randn(2, 24), torch.randn(2, 24)
    some = x[1:, ::4]
    assert torch.equal(kernels.norm(some, weight, bias, 1e-5), kernels.norm(some.contiguous(), weight, bias, 1e-5))
    assert torch.equal(kernels.norm(some, weight, None, 1e-5), kernels.norm(some.contiguous(), weight, None, 1e-5))


# Attention


def plain_attend(
    qkv_X: Tensor,
    heads: int,
    prompt: Tensor,  # keys and values, (2, G, positions, E)
    own: Tensor,
    turns: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor, Tensor] | None,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """What one new token finds, (H*E), and its key and value, (G, E)."""
    G, E = prompt.shape[1], prompt.shape[3]
    queries, key, value = torch.split(qkv_X.view(-1, E), [heads, G, G])
    if norms is not None:
        queries, key = (F.rms_norm(x, (E,), w, epsilon) for x, w in zip((queries, key), norms, strict=True))
    if turns is not None:
        cos, sin = (torch.cat((turn, turn)) for turn in turns)
        queries, key = (x * cos + torch.cat((-x[:, E // 2 :], x[:, : E // 2]), 1) * sin for x in (queries, key))
    keys, values = (
        torch.cat((prompt[part], own[part], new[:, None]), 1).repeat_interleave(heads // G, 0)
        for part, new in enumerate((key, value))
    )
    return F.scaled_dot_product_attention(queries[:, None], keys, values).flatten(), key, value


@pytest.mark.parametrize(
    ("heads", "groups", "width", "rotary", "normed"),
    [(2, 2, 8, False, False), (2, 2, 16, True, False), (4, 2, 12, True, True), (3, 1, 16, False, True)],
)
def test_attention_looks_at_all_of_a_sequence_and_nothing_else(
    heads: int, groups: int, width: int, rotary: bool, normed: bool
) -> None:
    """Prompts of unequal length, nothing and several blocks written, rows in any order and rows for no one."""
    K, Q, siblings, P, C, epsilon = 2, 2, 2, 70, 68, 0.01
    slots = numbers([[0, 1, 2], [3, -1, 1]])
    lengths, written = numbers([[70, 4], [33, 1]]), numbers([[0, 67, 5, 9], [9, 0, 9, 64]])
    prompts, cache = torch.randn(2, K, Q, groups, P, width), torch.randn(2, K, 4, groups, C, width)
    for k, q in product(range(K), range(Q)):
        prompts[:, k, q, :, lengths[k, q] :] = NAN
    for k, s in product(range(K), range(4)):
        cache[:, k, s, :, written[k, s] :] = NAN
    qkv = torch.randn(K, 3, (heads + 2 * groups) * width)
    turns = (torch.randn(P + C, width // 2), torch.randn(P + C, width // 2)) if rotary else None
    norms = (torch.randn(K, width), torch.randn(K, width)) if normed else None
    prompts_before, cache_before, written_before = prompts.clone(), cache.clone(), written.clone()

    stage = Stage(slots, lengths, written, siblings)
    out = kernels.attend(qkv, stage, prompts, cache, heads, turns, norms, epsilon)

    expected_cache = cache_before.clone()
    for k, m in product(range(K), range(3)):
        slot = int(slots[k, m])
        if slot < 0:
            continue
        length, place = int(lengths[k, slot // siblings]), int(written[k, slot])
        expected, key, value = plain_attend(
            qkv[k, m],
            heads,
            prompts_before[:, k, slot // siblings, :, :length],
            cache_before[:, k, slot, :, :place],
            None if turns is None else (turns[0][length + place], turns[1][length + place]),
            None if norms is None else (norms[0][k], norms[1][k]),
            epsilon,
        )
        assert (out[k, m] - expected).abs().max() < 1e-5, (k, m)
        for part, new in enumerate((key, value)):
            found = cache[part, k, slot, :, place]
            assert (found - new).abs().max() < 1e-5, (k, m)
            expected_cache[part, k, slot, :, place] = found
    assert torch.equal(cache.nan_to_num(7.0), expected_cache.nan_to_num(7.0)), "nothing else is written"
    assert torch.equal(prompts.nan_to_num(7.0), prompts_before.nan_to_num(7.0))
    assert torch.equal(written, written_before)


def test_attention_to_very_unequal_scores_neither_overflows_nor_vanishes() -> None:
    stage = Stage(numbers([[0]]), numbers([[40]]), numbers([[40]]), 1)
    for where in ("prompt", "own", "new"):
        prompts, cache, qkv = torch.randn(2, 1, 1, 1, 40, 8), torch.randn(2, 1, 1, 1, 41, 8), torch.randn(1, 1, 24)
        query = qkv[0, 0, :8]
        place = {"prompt": prompts[0, 0, 0, 0, 35], "own": cache[0, 0, 0, 0, 35], "new": qkv[0, 0, 8:16]}[where]
        place.copy_(query * 1000)
        value = {"prompt": prompts[1, 0, 0, 0, 35], "own": cache[1, 0, 0, 0, 35], "new": qkv[0, 0, 16:]}[where]
        out = kernels.attend(qkv, stage, prompts, cache, 1, None, None, 1e-5)
        assert (out[0, 0] - value).abs().max() < 1e-5, where


# Embedding


@pytest.mark.parametrize("learned", [False, True])
def test_every_row_has_the_newest_token_of_its_sequence_at_its_position(learned: bool) -> None:
    slots = numbers([[0, 1, 2], [3, -1, 1]])
    lengths, written = numbers([[5, 2], [3, 1]]), numbers([[0, 1, 2, 3], [4, 3, 2, 1]])
    ids, tokens, positions = torch.randint(0, 11, (2, 4)), torch.randn(2, 11, 20), torch.randn(2, 8, 20)
    found = kernels.embed(Stage(slots, lengths, written, 2), ids, tokens, positions if learned else None)
    for k, m in product(range(2), range(3)):
        slot = int(slots[k, m])
        if slot >= 0:
            expected = tokens[k, ids[k, slot]]
            if learned:
                expected = expected + positions[k, lengths[k, slot // 2] + written[k, slot]]
            assert torch.equal(found[k, m], expected), (k, m)


def test_a_sequence_that_has_ended_looks_no_further_than_the_last_position() -> None:
    tokens, positions = torch.randn(1, 3, 4), torch.randn(1, 6, 4)
    stage = Stage(numbers([[0]]), numbers([[4]]), numbers([[2]]), 1)
    found = kernels.embed(stage, torch.tensor([[1]]), tokens, positions)
    assert torch.equal(found[0, 0], tokens[0, 1] + positions[0, 5])


# Choice


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small vocabularies have several."""
    monkeypatch.setattr(kernels, "VOCABULARY_BLOCK", 16)


def make_record(uniform_KSC: Tensor, ends: Sequence[int] = (), limit: int | None = None) -> Record:
    K, S, C = uniform_KSC.shape
    return Record(
        uniform_KSC=uniform_KSC,
        ends_A=torch.tensor([*ends, *[-1] * (kernels.MOST_ENDS - len(ends))]),
        ids_KS=torch.full((K, S), 99),
        chosen_KSC=torch.full((K, S, C), 99),
        logprobs_KSC=torch.full((K, S, C), 99.0),
        done_KS=torch.zeros(K, S, dtype=torch.int32),
        lengths_KS=torch.full((K, S), C, dtype=torch.int32),
        limit=C if limit is None else limit,
    )


def every_row(K: int, S: int, written: int = 0, siblings: int = 1) -> Stage:
    return Stage(
        torch.arange(S, dtype=torch.int32).repeat(K, 1),
        torch.ones(K, S // siblings, dtype=torch.int32),
        torch.full((K, S), written, dtype=torch.int32),
        siblings,
    )


def copy_of(record: Record) -> Record:
    return replace(
        record,
        **{one.name: getattr(record, one.name).clone() for one in fields(record) if one.name != "limit"},
    )


def chosen_for(scores_V: Tensor, uniform: Sequence[float], temperature: float, kept_V: Tensor | None = None) -> Record:
    """Tokens for each of these uniform numbers, from one row of scores."""
    S = len(uniform)
    record = make_record(torch.tensor(uniform)[None, :, None].repeat(1, 1, 3))
    scores, kept = (None if x is None else x.expand(1, S, -1).contiguous() for x in (scores_V, kept_V))
    assert scores is not None
    kernels.choose(scores, kept, every_row(1, S), record, temperature)
    return record


def test_a_survey_knows_every_block_of_the_vocabulary(small_blocks: None) -> None:
    scores = torch.randn(2, 3, 37) * 4
    scores[0, 1, 16:32] = -torch.inf
    most, total = kernels.survey(scores, 0.5)
    assert most.shape == total.shape == (6, 3)
    for row, block in product(range(6), range(3)):
        part = scores.view(6, 37)[row, 16 * block : 16 * block + 16] * 0.5
        assert most[row, block] == part.max()
        if part.max() > -torch.inf:
            assert torch.allclose(total[row, block], (part - part.max()).exp().sum())
        else:
            assert total[row, block] == 0


@pytest.mark.parametrize(("temperature", "vocabulary"), [(1.0, 37), (0.7, 16), (0.0, 37)])
def test_choices_are_those_of_the_plain_code(small_blocks: None, temperature: float, vocabulary: int) -> None:
    K, S, C, written = 2, 50, 4, 1
    scores, record = torch.randn(K, S, vocabulary) * 3, make_record(torch.rand(K, S, C))
    stage = every_row(K, S, written)
    kernels.choose(scores, None, stage, record, temperature)
    ids, logprobs = pick(scores, record.uniform_KSC[:, :, written + 1], temperature, 1.0)
    assert len(set(ids.flatten().tolist())) > 10
    assert torch.equal(record.chosen_KSC[:, :, written + 1], ids)
    assert torch.equal(record.ids_KS, ids)
    assert (record.logprobs_KSC[:, :, written + 1] - logprobs).abs().max() < 1e-5
    assert (stage.written_KS == written + 1).all() and (record.done_KS == 0).all()
    for kept, before in ((record.chosen_KSC, 99), (record.logprobs_KSC, 99.0)):
        assert (kept[:, :, [0, 1, 3]] == before).all(), "one place is written"


def test_choices_from_a_head_of_the_distribution_have_the_log_probs_of_all_of_it(small_blocks: None) -> None:
    scores, record = torch.randn(1, 50, 37) * 2, make_record(torch.rand(1, 50, 2))
    likely = nucleus(torch.softmax(scores / 0.8, -1), 0.6) > 0
    kernels.choose(scores, scores.masked_fill(~likely, -torch.inf), every_row(1, 50), record, 0.8)
    ids, logprobs = pick(scores, record.uniform_KSC[:, :, 1], 0.8, 0.6)
    assert torch.equal(record.ids_KS, ids)
    assert (record.logprobs_KSC[:, :, 1] - logprobs).abs().max() < 1e-5


def test_a_vocabulary_of_several_full_blocks_is_chosen_from_as_a_whole() -> None:
    V = 2 * kernels.VOCABULARY_BLOCK + 100
    scores, record = torch.randn(1, 12, V), make_record(torch.linspace(0.01, 0.99, 12)[None, :, None].repeat(1, 1, 2))
    kernels.choose(scores, None, every_row(1, 12), record, 1.0)
    ids, logprobs = pick(scores, record.uniform_KSC[:, :, 1], 1.0, 1.0)
    assert {int(token) // kernels.VOCABULARY_BLOCK for token in ids[0]} == {0, 1, 2}
    assert torch.equal(record.ids_KS, ids)
    assert (record.logprobs_KSC[:, :, 1] - logprobs).abs().max() < 1e-4


def test_the_first_of_the_likeliest_tokens_is_the_greedy_choice(small_blocks: None) -> None:
    scores = torch.zeros(1, 5, 40)
    for row, best in enumerate([(3, 9), (20, 39), (0, 16, 32), (39,), range(40)]):
        scores[0, row, list(best)] = 2.0
    record = make_record(torch.rand(1, 5, 2))
    kernels.choose(scores, None, every_row(1, 5), record, 0.0)
    assert record.ids_KS.tolist() == [[3, 20, 0, 39, 0]]


def test_the_ends_of_the_uniform_numbers_choose_the_first_and_the_last_token_of_any_weight(small_blocks: None) -> None:
    """Blocks of nothing but -inf in front, between and behind are stepped over."""
    scores = torch.full((72,), -torch.inf)
    below_one = 1 - 2**-24
    for possible in ([20, 22, 50, 52], [0, 71], [33], [17, 31, 48, 63], [5, 6]):
        row = scores.clone()
        row[possible] = torch.randn(len(possible))
        record = chosen_for(row, [0.0, below_one, 0.3, 0.7], 1.0)
        first, last, *others = record.ids_KS[0].tolist()
        assert (first, last) == (possible[0], possible[-1])
        assert set(others) <= set(possible)
        assert torch.allclose(record.logprobs_KSC[0, :, 1], torch.log_softmax(row, -1)[record.ids_KS[0]])
    even = chosen_for(torch.zeros(36), [0.0, below_one, *((v + 0.5) / 36 for v in range(36))], 1.0)
    assert even.ids_KS[0].tolist() == [0, 35, *range(36)]


def test_rounding_never_leads_beyond_the_last_token_of_any_weight() -> None:
    """A sum made one by one need not reach the total that was made in blocks."""
    scores = torch.randn(1, 16, 1500)
    scores[..., 1400:] = -torch.inf
    record = make_record(torch.full((1, 16, 2), 1 - 2**-24))
    kernels.choose(scores, None, every_row(1, 16), record, 1.0)
    assert all(1390 < token < 1400 for token in record.ids_KS[0].tolist())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, who plays the GPU
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_that_are_no_numbers_still_give_a_token_of_the_vocabulary(
    small_blocks: None, temperature: float
) -> None:
    """The next step looks it up in a table: any other would be read from beyond it."""
    for worst in (NAN, torch.inf, -torch.inf):
        record = chosen_for(torch.full((40,), float(worst)), [0.2, 0.999], temperature)
        assert all(0 <= token < 40 for token in record.ids_KS[0].tolist()), worst


def test_the_first_choice_is_made_from_the_scores_of_the_question(small_blocks: None) -> None:
    K, Q, siblings, V = 2, 3, 2, 37
    scores, record = torch.randn(K, Q, V) * 3, make_record(torch.rand(K, Q * siblings, 3))
    stage = every_row(K, Q * siblings, siblings=siblings)
    kernels.choose(scores, None, stage, record, 1.0, first=True)
    ids, logprobs = pick(scores.repeat_interleave(siblings, 1), record.uniform_KSC[:, :, 0], 1.0, 1.0)
    assert torch.equal(record.chosen_KSC[:, :, 0], ids) and torch.equal(record.ids_KS, ids)
    assert (record.logprobs_KSC[:, :, 0] - logprobs).abs().max() < 1e-5
    assert (stage.written_KS == 0).all(), "its key and value are still to come"
    assert (record.chosen_KSC[:, :, 1:] == 99).all()


def test_a_sequence_ends_at_any_of_its_ends_or_at_the_limit() -> None:
    scores = torch.full((1, 4, 20), -5.0)
    for row, token in enumerate((3, 7, 8, 3)):
        scores[0, row, token] = 9.0
    record = make_record(torch.rand(1, 4, 5), ends=[7, 3], limit=4)
    stage = every_row(1, 4)
    stage.written_KS.copy_(numbers([[0, 1, 2, 2]]))
    kernels.choose(scores, None, stage, record, 0.0)
    assert record.ids_KS.tolist() == [[3, 7, 8, 3]]
    assert record.done_KS.tolist() == [[1, 1, 2, 1]], "by itself, even at the limit; for want of room"
    assert record.lengths_KS.tolist() == [[2, 3, 5, 4]]
    assert stage.written_KS.tolist() == [[1, 2, 3, 3]]


def test_sequences_without_a_row_and_those_that_are_done_are_left_alone() -> None:
    record = make_record(torch.rand(2, 4, 3))
    record.done_KS.copy_(numbers([[0, 1, 0, 2], [0, 0, 1, 0]]))
    stage = Stage(numbers([[1, 3, 2], [-1, 3, 2]]), numbers([[1], [1]]), numbers([[0] * 4] * 2), 4)
    scores, before = torch.randn(2, 3, 30), copy_of(record)
    kernels.choose(scores, None, stage, record, 1.0)
    running = [(0, 2, 2), (1, 3, 1)]  # node, sequence, row
    for k, s, m in running:
        ids, _ = pick(scores[k, m], record.uniform_KSC[k, s, 1], 1.0, 1.0)
        assert record.ids_KS[k, s] == ids
        assert stage.written_KS[k, s] == 1
        for one in fields(record):
            if one.name.endswith(("KS", "KSC")):
                getattr(record, one.name)[k, s] = getattr(before, one.name)[k, s]
        stage.written_KS[k, s] = 0
    for one in fields(record):
        if one.name != "limit":
            assert torch.equal(getattr(record, one.name), getattr(before, one.name)), one.name
    assert (stage.written_KS == 0).all()


# Adam


def test_adam_in_one_kernel_is_the_stacked_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several steps; one node sits one out, one has a gradient that is no number, one is not clipped.

    The copies are in float16: the interpreter's bfloat16 cuts off where a GPU rounds.
    """
    start = {"w": torch.randn(3, 40, 30), "v": torch.randn(3, 5)}
    plain = StackedAdam({name: weight.clone() for name, weight in start.items()})
    plain._in_one_kernel = False
    monkeypatch.setattr(adam, "kernels_run_on", lambda device: True)
    quick = StackedAdam({name: weight.clone() for name, weight in start.items()})
    for one in (plain, quick):
        one.copies = {"w": one.weights["w"].to(torch.float16)}
    for step in range(4):
        before = [{name: part[name].clone() for name in part} for part in (quick.weights, quick.first, quick.second)]
        copied = quick.copies["w"].clone()
        gradients = {name: torch.randn_like(weight) for name, weight in start.items()}
        for name in gradients:
            gradients[name][2] *= 1e-3  # the others' norms are clipped, its own is not
        if step == 2:
            gradients["v"][0, 1] = NAN
        if step == 3:
            gradients["w"] = gradients["w"].half()
        active = torch.tensor([True, step != 1, True], device="cpu")
        rates = torch.tensor([0.01, 0.02, 0.03], dtype=torch.float64, device="cpu")
        twice = ({name: gradient.clone() for name, gradient in gradients.items()} for _ in range(2))
        norms, moved = plain.step(next(twice), active, rates, 1.0)
        norms_too, moved_too = quick.step(next(twice), active, rates, 1.0)
        assert torch.allclose(norms, norms_too, equal_nan=True)
        assert torch.equal(moved, moved_too)
        assert moved.tolist() == [step != 2, step != 1, True]
        for k in (~moved).nonzero().flatten().tolist():
            for part, old in zip((quick.weights, quick.first, quick.second), before, strict=True):
                assert all(torch.equal(part[name][k], old[name][k]) for name in part)
            assert torch.equal(quick.copies["w"][k], copied[k])
    for name in start:
        assert (plain.weights[name] - start[name]).abs().max() > 0.01
        assert torch.allclose(quick.weights[name], plain.weights[name], rtol=1e-5, atol=1e-6)
        assert torch.allclose(quick.first[name], plain.first[name], rtol=1e-5, atol=1e-8)
        assert torch.allclose(quick.second[name], plain.second[name], rtol=1e-5, atol=1e-10)
    assert torch.equal(quick.copies["w"], quick.weights["w"].to(torch.float16))


def test_adam_reads_gradients_however_they_lie_and_writes_no_copy_unasked() -> None:
    weight, gradient = torch.zeros(2, 3, 4), torch.randn(2, 4, 3).transpose(1, 2)
    first, second = torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)
    coefficients = torch.tensor([[1.0, 0.5], [0.1, 0.0], [0.001, 0.0], [1.0, 0.0], [1e-8, 1e-8]])
    training_kernels.adam(weight, first, second, gradient, None, coefficients)
    assert torch.allclose(first[0], 0.1 * gradient[0])
    assert torch.allclose(second[0], 0.001 * gradient[0] ** 2)
    assert torch.allclose(weight[0], -first[0] / (second[0].sqrt() + 1e-8))
    assert not weight[1].any() and not first[1].any() and not second[1].any()
