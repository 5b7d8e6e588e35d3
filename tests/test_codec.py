"""Rollout files: what goes out comes back, and of what comes in every size, type and name is checked."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from rl_swarm import codec
from rl_swarm.codec import ReceivedGroup, check_identity, decode, encode, groups_of
from rl_swarm.errors import MalformedRecord
from rl_swarm.gathering import score
from rl_swarm.tasks.arithmetic import Arithmetic
from rl_swarm.types import Rollout, RolloutGroup, ScoredGroup, Step

STEP = Step(5, 1)
TEXTS = ("<answer>1</answer>", 'quoted "text"\nand more', "<answer>√2 \U0001f40d</answer>", "")


def scored_groups(count: int = 2) -> list[ScoredGroup]:
    task = Arithmetic()
    rollouts = tuple(Rollout(text, (1, 2, 3), (-0.5, -1.0, -0.25), truncated=text == "") for text in TEXTS)
    questions = task.sample(count, random.Random(1))
    groups = [RolloutGroup("ada", STEP, str(number), question, rollouts) for number, question in enumerate(questions)]
    return [score(task, group) for group in groups]


def encoded(count: int = 2) -> bytes:
    return encode("run", "ada", STEP, 12.5, "toy", scored_groups(count))


def altered(**changes: Any) -> bytes:
    return json.dumps({**json.loads(encoded()), **changes}).encode()


def reason_of(data: bytes) -> str:
    """What is wrong with a file as a whole, or "fine"."""
    try:
        check_identity(decode(data), "run", "ada", STEP)
    except MalformedRecord as error:
        return error.reason
    return "fine"


def group_reasons(data: bytes) -> list[str]:
    """Of each group what is wrong with it, or "fine"."""
    found = groups_of(decode(data), len(TEXTS))
    return [group.reason if isinstance(group, MalformedRecord) else "fine" for group in found]


def test_groups_come_back_as_they_were_sent_without_what_only_their_owner_has() -> None:
    sent = scored_groups()
    file = decode(encoded())
    check_identity(file, "run", "ada", STEP)
    received = list(groups_of(file, len(TEXTS)))
    assert len(received) == len(sent)
    for group, scored in zip(received, sent, strict=True):
        assert isinstance(group, ReceivedGroup)
        assert (group.id, group.name) == (scored.group.id, scored.group.question.name)
        assert group.prompt == scored.group.question.prompt
        for came, rollout in zip(group.rollouts, scored.group.rollouts, strict=True):
            said = None if rollout.logprobs is None else sum(rollout.logprobs)
            assert came == Rollout(rollout.text, truncated=rollout.truncated, said_logprob=said)


def test_a_file_reads_as_documented() -> None:
    file = json.loads(encoded(1))
    scored = scored_groups(1)[0]
    assert {name: file[name] for name in ("schema", "run", "peer_id", "round", "stage", "timestamp", "model")} == {
        "schema": 1, "run": "run", "peer_id": "ada", "round": 5, "stage": 1, "timestamp": 12.5, "model": "toy"
    }  # fmt: skip
    assert file["rollouts"]["0"][0] == {
        "prompt": scored.group.question.prompt,
        "response": TEXTS[0],
        "reward": scored.rewards[0],
        "logprob": -1.75,
        "tokens": 3,
        "truncated": False,
    }
    assert file["questions"]["0"] == scored.group.question.name._asdict()
    assert set(file["rollouts"]) == set(file["questions"]) == {"0"}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b" ", "not_json"),
        (b"hello", "not_json"),
        (b"\xff\xfe", "not_json"),
        (b"\x80\x04\x95.", "not_json"),
        (encoded()[:-1], "not_json"),
        (encoded()[: len(encoded()) // 2], "not_json"),
        (encoded() + b"x", "not_json"),
        (encoded().replace(b"quoted", b"\xff"), "not_json"),
        (encoded().replace(b"quoted", b"\\ud800"), "not_json"),
        (b"[" * 1_000_000, "wrong_schema"),
        (b'{"more": ' + b"[" * 1_000_000, "not_json"),
        (b'{"run": ' + b'{"a":' * 1_000_000, "wrong_schema"),
        (b" " * (codec.MAX_FILE_BYTES + 1), "too_large"),
        (b"null", "wrong_schema"),
        (b"[]", "wrong_schema"),
        (b"{}", "wrong_schema"),
        (altered(schema=2), "wrong_schema"),
        (altered(schema="1"), "wrong_schema"),
        (altered(schema=True), "wrong_schema"),
        (altered(round="5"), "wrong_schema"),
        (altered(round=None), "wrong_schema"),
        (altered(rollouts=[]), "wrong_schema"),
        (altered(rollouts={"0": {}}), "wrong_schema"),
        (altered(questions={"0": {"task": 1, "config": "", "seed": 1, "index": 0}}), "wrong_schema"),
        (altered(run="another"), "wrong_run"),
        (altered(peer_id="bob"), "wrong_owner"),
        (altered(peer_id="../../ada"), "wrong_owner"),
        (altered(peer_id="a" * 1_000_000), "wrong_owner"),
        (altered(round=4), "wrong_step"),
        (altered(stage=0), "wrong_step"),
        (altered(rollouts={str(number): [] for number in range(codec.MAX_GROUPS + 1)}), "too_many_groups"),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(value[:30]),
)
def test_a_file_that_cannot_be_accepted_is_refused_for_its_reason(data: bytes, reason: str) -> None:
    assert reason_of(data) == reason


def test_the_reason_is_a_word_and_the_detail_is_short() -> None:
    with pytest.raises(MalformedRecord) as caught:
        check_identity(decode(altered(peer_id="a" * 1_000_000)), "run", "ada", STEP)
    assert len(str(caught.value)) < 300


def test_a_file_of_as_many_groups_as_allowed_is_accepted() -> None:
    rollouts = {str(number): json.loads(encoded(1))["rollouts"]["0"] for number in range(codec.MAX_GROUPS)}
    check_identity(decode(altered(rollouts=rollouts)), "run", "ada", STEP)


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity"])
def test_a_reward_that_json_does_not_know_makes_the_file_no_json(number: bytes) -> None:
    assert reason_of(encoded().replace(b'"reward":0.0', b'"reward":' + number)) == "not_json"


@pytest.mark.parametrize("number", [b"1e999", b"-1e999", b"null", b'"1"', b"[]", b"true"])
def test_a_reward_that_is_no_finite_number_makes_the_schema_wrong(number: bytes) -> None:
    assert reason_of(encoded().replace(b'"reward":0.0', b'"reward":' + number)) == "wrong_schema"


@pytest.mark.parametrize("field", ["reward", "logprob"])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_no_reader_of_whatever_format_lets_such_a_number_through(field: str, number: float) -> None:
    file = decode(encoded(1))
    file.rollouts["0"][1] = msgspec.structs.replace(file.rollouts["0"][1], **{field: number})
    (group,) = groups_of(file, len(TEXTS))
    assert isinstance(group, MalformedRecord) and group.reason == "not_finite"


def test_one_bad_group_does_not_spoil_its_neighbours() -> None:
    file = json.loads(encoded(3))
    file["rollouts"]["1"] = file["rollouts"]["1"][:1]
    assert group_reasons(json.dumps(file).encode()) == ["fine", "group_size", "fine"]
    del file["questions"]["2"]
    assert group_reasons(json.dumps(file).encode()) == ["fine", "group_size", "no_question"]


def with_rollouts(*responses: str, prompt: str | None = None) -> bytes:
    file = json.loads(encoded(1))
    for rollout, response in zip(file["rollouts"]["0"], responses, strict=True):
        rollout["response"] = response
    if prompt is not None:
        file["rollouts"]["0"][-1]["prompt"] = prompt
    return json.dumps(file).encode()


@pytest.mark.parametrize("size", [0, 1, len(TEXTS) - 1, len(TEXTS) + 1, 1000])
def test_a_group_of_another_size_than_the_readers_is_refused(size: int) -> None:
    file = json.loads(encoded(1))
    file["rollouts"]["0"] = file["rollouts"]["0"][:1] * size
    assert group_reasons(json.dumps(file).encode()) == ["group_size"]


def test_a_long_text_is_refused_and_one_at_the_limit_is_not() -> None:
    assert group_reasons(with_rollouts("x" * codec.MAX_TEXT_CHARS, "", "", "")) == ["fine"]
    assert group_reasons(with_rollouts("", "", "", "x" * (codec.MAX_TEXT_CHARS + 1))) == ["long_text"]
    assert group_reasons(with_rollouts("", "", "", "", prompt="x" * (codec.MAX_TEXT_CHARS + 1))) == ["long_text"]


def test_siblings_must_answer_one_question() -> None:
    assert group_reasons(with_rollouts("", "", "", "", prompt="another")) == ["altered_prompt"]


@pytest.mark.parametrize("part", ["id", "task", "config"])
def test_a_long_name_is_refused(part: str) -> None:
    file, long = json.loads(encoded(1)), "x" * (codec.MAX_NAME_CHARS + 1)
    if part == "id":
        file["rollouts"], file["questions"] = {long: file["rollouts"]["0"]}, {long: file["questions"]["0"]}
    else:
        file["questions"]["0"][part] = long
    assert group_reasons(json.dumps(file).encode()) == ["long_name"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("ab0\0\ud800é", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab0", max_size=2), inner, max_size=3),
    max_leaves=8,
)
PATHS = [(name,) for name in json.loads(encoded())] + [
    ("rollouts", "0"),
    ("rollouts", "0", 0),
    ("rollouts", "0", 1, "tokens"),
    ("questions", "0"),
    ("questions", "0", "seed"),
]


@hypothesis_settings(max_examples=150, deadline=None, derandomize=True)
@given(path=st.sampled_from(PATHS), value=JSON)
def test_whatever_stands_in_a_file_is_read_or_refused_with_a_reason(path: tuple[Any, ...], value: Any) -> None:
    file = json.loads(encoded())
    place = file
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    data = json.dumps(file).encode()
    reason = reason_of(data)
    assert reason in {"fine", "not_json", "wrong_schema", "wrong_run", "wrong_owner", "wrong_step"}
    if reason == "fine":
        for group in groups_of(decode(data), len(TEXTS)):
            if isinstance(group, ReceivedGroup):
                assert len(group.rollouts) == len(TEXTS)
                msgspec.json.encode(group)


@hypothesis_settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.binary(max_size=60), at=st.integers(0, len(encoded(1))), cut=st.integers(0, 20))
def test_bytes_that_went_wrong_on_the_way_are_read_or_refused(data: bytes, at: int, cut: int) -> None:
    whole = encoded(1)
    reason = reason_of(whole[:at] + data + whole[at + cut :])
    assert reason in {"fine", "not_json", "wrong_schema", "wrong_run", "wrong_owner", "wrong_step"}
