"""Rollout files <-> values: schema-checked JSON with a limit on every size.

A file is checked from the outside in: bytes, JSON and schema, identity (run, owner, step), then each group by itself.
What fails is raised as MalformedRecord with a one-word reason, for the reader to count. Nothing received is executed. A
peer's reward is for display only: the receiver scores for itself. Its log-prob says how much its own text should count
under some rules (OFF_POLICY).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from rl_swarm.errors import MalformedRecord
from rl_swarm.types import QuestionName, Rollout, ScoredGroup, Step

SCHEMA = 1
MAX_FILE_BYTES = 8 * 2**20
MAX_GROUPS = 256
MAX_GROUP_SIZE = 256
MAX_TEXT_CHARS = 65_536
MAX_NAME_CHARS = 256


class WireRollout(msgspec.Struct, frozen=True):
    prompt: str
    response: str
    reward: float
    logprob: float | None = None
    tokens: int = 0
    truncated: bool = False


class WireQuestion(msgspec.Struct, frozen=True):
    task: str
    config: str
    seed: int
    index: int


class WireFile(msgspec.Struct, frozen=True):
    schema: int
    run: str
    peer_id: str
    round: int
    stage: int
    timestamp: float
    model: str
    rollouts: dict[str, list[WireRollout]]
    questions: dict[str, WireQuestion]


class ReceivedGroup(msgspec.Struct, frozen=True):
    """A group as a peer claims it to be: the question only by name, to be rebuilt before anything is believed."""

    id: str
    name: QuestionName
    prompt: str
    rollouts: tuple[Rollout, ...]


_decoder = msgspec.json.Decoder(WireFile)
_encoder = msgspec.json.Encoder()


def encode(run: str, node: str, step: Step, timestamp: float, model: str, groups: Sequence[ScoredGroup]) -> bytes:
    """A whole rollout file for one node's groups."""
    return _encoder.encode(
        WireFile(
            schema=SCHEMA,
            run=run,
            peer_id=node,
            round=step.round,
            stage=step.stage,
            timestamp=timestamp,
            model=model,
            rollouts={scored.group.id: _wire_rollouts(scored) for scored in groups},
            questions={scored.group.id: WireQuestion(*scored.group.question.name) for scored in groups},
        )
    )


def _wire_rollouts(scored: ScoredGroup) -> list[WireRollout]:
    return [
        WireRollout(
            prompt=scored.group.question.prompt,
            response=rollout.text,
            reward=reward,
            logprob=None if rollout.logprobs is None else math.fsum(rollout.logprobs),
            tokens=rollout.tokens,
            truncated=rollout.truncated,
        )
        for rollout, reward in zip(scored.group.rollouts, scored.rewards, strict=True)
    ]


def decode(data: bytes) -> WireFile:
    """The file as written. For readers that only look, such as a dashboard."""
    if len(data) > MAX_FILE_BYTES:
        raise MalformedRecord("too_large", f"{len(data)} bytes")
    if not data:
        raise MalformedRecord("empty")
    try:
        file = _decoder.decode(data)
    except msgspec.ValidationError as error:
        raise MalformedRecord("wrong_schema", str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedRecord("not_json", str(error)) from None
    if file.schema != SCHEMA:
        raise MalformedRecord("wrong_schema", f"schema {file.schema}")
    return file


def check_identity(file: WireFile, run: str, node: str, step: Step) -> None:
    """The file must say of itself what its place in the store says."""
    if file.run != run:
        raise MalformedRecord("wrong_run", file.run[:MAX_NAME_CHARS])
    if file.peer_id != node:
        raise MalformedRecord("wrong_owner", file.peer_id[:MAX_NAME_CHARS])
    if (file.round, file.stage) != step:
        raise MalformedRecord("wrong_step", f"{file.round}/{file.stage}")
    if len(file.rollouts) > MAX_GROUPS:
        raise MalformedRecord("too_many_groups", str(len(file.rollouts)))


def groups_of(file: WireFile, group_size: int) -> Iterable[ReceivedGroup | MalformedRecord]:
    """Each group of the file, or what is wrong with it: one bad group does not spoil its neighbours."""
    for id, rollouts in file.rollouts.items():
        try:
            yield _group(file, id, rollouts, group_size)
        except MalformedRecord as error:
            yield error


def _group(file: WireFile, id: str, rollouts: list[WireRollout], group_size: int) -> ReceivedGroup:
    question = file.questions.get(id)
    if question is None:
        raise MalformedRecord("no_question", id[:MAX_NAME_CHARS])
    if len(id) > MAX_NAME_CHARS or len(question.task) > MAX_NAME_CHARS or len(question.config) > MAX_NAME_CHARS:
        raise MalformedRecord("long_name")
    # Also the filter against groups of other nodes' G: advantages of unlike group sizes do not mix in one batch.
    if len(rollouts) != group_size or len(rollouts) > MAX_GROUP_SIZE:
        raise MalformedRecord("group_size", str(len(rollouts)))
    if any(len(rollout.response) > MAX_TEXT_CHARS or len(rollout.prompt) > MAX_TEXT_CHARS for rollout in rollouts):
        raise MalformedRecord("long_text")
    if any(rollout.prompt != rollouts[0].prompt for rollout in rollouts):
        raise MalformedRecord("altered_prompt", "siblings differ")
    if not all(math.isfinite(rollout.reward) and math.isfinite(rollout.logprob or 0.0) for rollout in rollouts):
        raise MalformedRecord("not_finite")
    return ReceivedGroup(
        id=id,
        name=QuestionName(question.task, question.config, question.seed, question.index),
        prompt=rollouts[0].prompt,
        rollouts=tuple(
            Rollout(text=rollout.response, truncated=rollout.truncated, said_logprob=rollout.logprob)
            for rollout in rollouts
        ),
    )
