"""The small records of an experiment, as they stand in the store: schema-checked, with bounds on every number."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from rl_swarm.errors import MalformedRecord
from rl_swarm.types import Step

# Numbers that others write stay where one can count with them and put them into a file's name.
Number = Annotated[int, msgspec.Meta(ge=0, le=10**9)]
Moment = Annotated[float, msgspec.Meta(ge=0, le=1e11)]

_Record = TypeVar("_Record")


class Birth(msgspec.Struct, frozen=True):
    """experiment.json. The run id tells this experiment from an earlier one of the same name."""

    run: str
    name: str
    created: Moment
    version: str
    settings: dict[str, Any]
    made_by: str = "init"
    deleted: bool = False


class State(msgspec.Struct, frozen=True):
    """The swarm's clock, written by the coordinator alone."""

    run: str
    round: Number
    stage: Number
    updated_at: float
    updated_by: str
    finished: bool = False

    @property
    def step(self) -> Step:
        return Step(self.round, self.stage)


class Process(msgspec.Struct, frozen=True):
    """Which process of which machine: enough to tell, on that machine, whether it still runs."""

    host: str
    boot: str
    pid: int
    started: str


class Peer(msgspec.Struct, frozen=True):
    """A node's lease: `beat` grows while it lives. `shared` and `learned` are the last steps it finished a half of."""

    run: str
    peer_id: str
    node_role: str
    model: str
    version: str
    registered_at: float
    token: str
    process: Process
    lease_seconds: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 20.0
    beat: Number = 0
    shared: tuple[Number, Number] | None = None
    learned: tuple[Number, Number] | None = None
    left: bool = False

    @property
    def shared_step(self) -> Step | None:
        return None if self.shared is None else Step(*self.shared)

    @property
    def learned_step(self) -> Step | None:
        return None if self.learned is None else Step(*self.learned)


class MetricsRow(msgspec.Struct, frozen=True):
    """What readers rely on in a metrics row; there is more in it. A line without this counts as unreadable."""

    run: str
    round: Number
    stage: Number
    node_id: str
    my_reward: float
    external_wanted: int
    external_used: int
    external_missing: dict[str, int]
    eval_reward: float | None = None


def encode(record: object) -> bytes:
    return msgspec.json.encode(record)


def decode(data: bytes, type: type[_Record]) -> _Record:
    """The record, or MalformedRecord: what stands in a store may be anyone's."""
    try:
        return msgspec.json.decode(data, type=type)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedRecord("wrong_schema", str(error)) from None
