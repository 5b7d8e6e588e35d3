"""One experiment in a store: the only module that knows where things lie.

    experiments/EXP/
      experiment.json                        run id, settings: create-only
      state/current_state.json               the round: the coordinator's
      state/coordinator.json                 who the coordinator is: its lease
      peers/NODE.json                        who the node is, that it is alive, how far it has come: the node's lease
      rollouts/round_R/stage_S/NODE.json     published once, never changed; in parts: NODE.PART.json
      rewards/round_R/stage_S/NODE.json
      winners/round_R/NODE.json
      checkpoints/round_R/NODE.pt
      logs/NODE/metrics.jsonl  training_events.jsonl  stdout.log
    archives/EXP/rollouts/...

Every key has one writer. Records others wrote are decoded against a schema and under a size limit.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from rl_swarm import __version__, codec
from rl_swarm.errors import (
    ExperimentExists,
    ExperimentMissing,
    ExperimentReplaced,
    KeyExists,
    KeyMissing,
    MalformedRecord,
)
from rl_swarm.protocols import Store
from rl_swarm.records import Birth, MetricsRow, Peer, State, decode, encode
from rl_swarm.settings import check_name
from rl_swarm.types import ScoredGroup, Step

MAX_RECORD_BYTES = 2**20
MAX_LEASE_BYTES = 2**13
MAX_LOG_BYTES = 2**26

_START = "start"
_ROLLOUT_FILE = re.compile(r"(?P<node>.+?)(\.(?P<part>\d+))?\.json")


class Peers(NamedTuple):
    known: dict[str, Peer]
    malformed: list[str]


class PublishedFile(NamedTuple):
    key: str
    node: str
    step: Step
    part: int | None


class Log(NamedTuple):
    """The rows of a log, and how many of its lines could not be read."""

    rows: list[dict[str, Any]]
    unreadable: int


class Experiment:
    """An existing experiment. Made by `create_experiment` or `open_experiment`."""

    def __init__(self, store: Store, birth: Birth) -> None:
        self.store = store
        self.name = birth.name
        self.run = birth.run
        self.birth = birth
        self._root = f"experiments/{birth.name}/"

    # The clock

    def state(self) -> State | None:
        """The clock; None before there is one, or while what lies in its place is none of this run's."""
        try:
            state = decode(self.store.get(self._key("state/current_state.json"), MAX_RECORD_BYTES), State)
        except (KeyMissing, MalformedRecord):
            state = None
        if state is None or state.run != self.run:
            self.check_still_here()
            return None
        return state

    def write_state(self, state: State) -> None:
        self.store.put(self._key("state/current_state.json"), encode(state))

    def check_still_here(self) -> None:
        """Raise if the experiment was deleted or made anew under us."""
        if open_experiment(self.store, self.name).run != self.run:
            raise ExperimentReplaced(f"Experiment {self.name} was made anew by somebody: start this process again.")

    # Leases

    def peer_key(self, node: str) -> str:
        return self._key(f"peers/{check_name(node)}.json")

    def coordinator_key(self) -> str:
        return self._key("state/coordinator.json")

    def create_lease(self, key: str, peer: Peer) -> None:
        self.store.create(key, encode(peer))

    def write_lease(self, key: str, peer: Peer) -> None:
        self.store.put(key, encode(peer))

    def read_lease(self, key: str) -> Peer:
        return decode(self.store.get(key, MAX_LEASE_BYTES), Peer)

    def peers(self) -> Peers:
        known: dict[str, Peer] = {}
        malformed: list[str] = []
        for key in self.store.keys(self._key("peers/"), shallow=True):
            node = key.rpartition("/")[2].removesuffix(".json")
            try:
                peer = self.read_lease(self.peer_key(node))
                if peer.peer_id != node or peer.run != self.run:
                    raise MalformedRecord("wrong_owner", node)
                known[node] = peer
            except KeyMissing:
                continue  # it left between the listing and the reading
            except (MalformedRecord, ValueError):
                malformed.append(node)
        return Peers(known, malformed)

    # Rollouts

    def publish(
        self, node: str, step: Step, part: int | None, timestamp: float, model: str, groups: Sequence[ScoredGroup]
    ) -> None:
        """Publish groups once, in parts if they would be too large for any reader.

        A whole file already there is this node's own, from before it was restarted: it stays. Anything else in its
        place is replaced: the name is this node's, and its peers should not pay for what somebody put there.
        """
        data = codec.encode(self.run, node, step, timestamp, model, groups)
        if len(data) > codec.MAX_FILE_BYTES and part is None and len(groups) > 1:
            for number, group in enumerate(groups):
                self.publish(node, step, number, timestamp, model, [group])
            return
        name = node if part is None else f"{node}.{part}"
        file = PublishedFile(self._key(f"rollouts/round_{step.round}/stage_{step.stage}/{name}.json"), node, step, part)
        try:
            self.store.create(file.key, data)
        except KeyExists:
            try:
                self.read_rollouts(file)
            except MalformedRecord:
                self.store.put(file.key, data)

    def published(self, step: Step) -> list[PublishedFile | MalformedRecord]:
        """The rollout files of a step, by their names alone, in canonical order."""
        files: list[PublishedFile | MalformedRecord] = []
        for key in self.store.keys(self._key(f"rollouts/round_{step.round}/stage_{step.stage}/"), shallow=True):
            match = _ROLLOUT_FILE.fullmatch(key.rpartition("/")[2])
            try:
                if match is None:
                    raise ValueError("no rollout file")
                part = match["part"]
                files.append(PublishedFile(key, check_name(match["node"]), step, None if part is None else int(part)))
            except ValueError:
                files.append(MalformedRecord("bad_name", repr(key)))
        return files

    def read_rollouts(self, file: PublishedFile) -> codec.WireFile:
        """The file, if it is what its place says it is. Raises MalformedRecord or KeyMissing."""
        wire = codec.decode(self.store.get(file.key, codec.MAX_FILE_BYTES))
        codec.check_identity(wire, self.run, file.node, file.step)
        return wire

    def rollout_rounds(self) -> list[int]:
        return _numbers(self.store.keys(self._key("rollouts/"), shallow=True), "round_")

    def rollout_stages(self, round: int) -> list[int]:
        return _numbers(self.store.keys(self._key(f"rollouts/round_{round}/"), shallow=True), "stage_")

    def retire_rollouts(self, file: PublishedFile, archive: bool) -> None:
        """Remove a rollout file, or move it to the archive. Only its owner may."""
        if archive:
            self.store.move(file.key, file.key.replace("experiments/", "archives/", 1))
        else:
            self.store.delete(file.key)

    # Rewards and votes

    def write_reward(self, node: str, step: Step, reward: float, timestamp: float) -> None:
        record = {
            "round": step.round, "stage": step.stage, "reward": reward, "peer_id": node, "submitted_at": timestamp
        }  # fmt: skip
        self.store.put(self._reward_key(node, step), encode(record))

    def has_reward(self, node: str, step: Step) -> bool:
        return self._reward_key(node, step) in self.store.keys(self._reward_key(node, step))

    def _reward_key(self, node: str, step: Step) -> str:
        return self._key(f"rewards/round_{step.round}/stage_{step.stage}/{node}.json")

    def write_vote(self, node: str, step: Step, winner: str, scores: Mapping[str, float]) -> None:
        record = {"round": step.round, "voter": node, "winner": winner, "mean_rewards": dict(scores)}
        self.store.put(self._key(f"winners/round_{step.round}/{node}.json"), encode(record))

    # Logs

    def append_metrics(self, node: str, row: Mapping[str, Any]) -> None:
        self.store.append(self._key(f"logs/{node}/metrics.jsonl"), encode(row))

    def metrics(self, node: str) -> Log:
        """The rows this node wrote about itself. Other nodes read them too, so their kind is checked."""
        log = self._log(node, "metrics.jsonl")
        rows = [row for row in log.rows if _is_metrics_row(row, node) and row["run"] == self.run]
        return Log(rows, log.unreadable + len(log.rows) - len(rows))

    def append_event(self, node: str, event: Mapping[str, Any]) -> None:
        self.store.append(self._key(f"logs/{node}/training_events.jsonl"), encode({"run": self.run, **event}))

    def events(self, node: str) -> Log:
        log = self._log(node, "training_events.jsonl")
        return Log([event for event in log.rows if event.get("run") == self.run], log.unreadable)

    def append_start(self, node: str, settings: Mapping[str, Any], timestamp: float) -> None:
        """Note what a node is started with: it need not be what the experiment was made with."""
        self.append_event(node, {"event": _START, "timestamp": timestamp, "settings": dict(settings)})

    def last_start(self, node: str) -> dict[str, Any]:
        """The settings a node was last started with, as it noted them; nothing where it noted none."""
        starts = [event.get("settings") for event in self.events(node).rows if event.get("event") == _START]
        return starts[-1] if starts and isinstance(starts[-1], dict) else {}

    def append_output(self, node: str, line: str) -> None:
        self.store.append(self._key(f"logs/{node}/stdout.log"), line.encode())

    def logged_nodes(self) -> list[str]:
        names = (key.rstrip("/").rpartition("/")[2] for key in self.store.keys(self._key("logs/"), shallow=True))
        return [name for name in names if _is_name(name)]

    def _log(self, node: str, name: str) -> Log:
        try:
            data = self.store.get(self._key(f"logs/{check_name(node)}/{name}"), MAX_LOG_BYTES)
        except KeyMissing:
            return Log([], 0)
        except MalformedRecord:
            return Log([], 1)  # no file at all, or an endless one
        rows: list[dict[str, Any]] = []
        unreadable = 0
        # What follows the last newline is a line still being written.
        for line in data.split(b"\n")[:-1]:
            try:
                rows.append(msgspec.json.decode(line, type=dict[str, Any]))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                unreadable += 1
        return Log(rows, unreadable)

    # Checkpoints

    def write_checkpoint(self, node: str, round: int, data: bytes) -> None:
        self.store.put(self._key(f"checkpoints/round_{round}/{node}.pt"), data)

    def read_checkpoint(self, node: str, round: int) -> bytes:
        return self.store.get(self._key(f"checkpoints/round_{round}/{node}.pt"))

    def delete_checkpoint(self, node: str, round: int) -> None:
        self.store.delete(self._key(f"checkpoints/round_{round}/{node}.pt"))

    def checkpoint_rounds(self, node: str) -> list[int]:
        """The rounds this node has checkpoints of, oldest first."""
        name = f"{check_name(node)}.pt"
        found = [key for key in self.store.keys(self._key("checkpoints/")) if key.endswith("/" + name)]
        return _numbers((key.rpartition("/")[0] for key in found), "round_")

    def latest_checkpoint(self) -> str | None:
        rounds = _numbers(self.store.keys(self._key("checkpoints/"), shallow=True), "round_")
        return f"checkpoints/round_{rounds[-1]}" if rounds else None

    def delete(self) -> int:
        """Remove everything, with nodes possibly still running; returns how many keys.

        The birth record is marked first, so that running nodes notice and end instead of writing anew what was just
        removed, and removed last, so that an interrupted deletion can be repeated.
        """
        birth = self._key("experiment.json")
        self.store.put(birth, encode(msgspec.structs.replace(self.birth, deleted=True)))
        deleted = 0
        while keys := [*self.store.keys(self._root), *self.store.keys(f"archives/{self.name}/")]:
            rest = [key for key in keys if key != birth]
            for key in rest or [birth]:
                self.store.delete(key)
                deleted += 1
        return deleted

    def _key(self, rest: str) -> str:
        return self._root + rest


def create_experiment(
    store: Store, name: str, settings: Mapping[str, Any], timestamp: float, made_by: str = "init"
) -> Experiment:
    birth = Birth(secrets.token_hex(8), check_name(name), timestamp, __version__, dict(settings), made_by)
    try:
        store.create(_birth_key(name), encode(birth))
    except KeyExists:
        raise ExperimentExists(f"Experiment {name} exists already; delete it first or choose another name.") from None
    return Experiment(store, birth)


def open_experiment(store: Store, name: str) -> Experiment:
    if not _is_name(name):
        raise ExperimentMissing(f"{name!r} cannot be an experiment's name.")
    try:
        data = store.get(_birth_key(name), MAX_RECORD_BYTES)
    except KeyMissing:
        others = list_experiments(store)
        hint = f"there are: {', '.join(others[:8])}" if others else "there is none at all yet"
        raise ExperimentMissing(f"There is no experiment {name} in this store ({hint}).") from None
    # The folder's name counts: in a copied folder the record still has the old one, and would lead back to it.
    birth = msgspec.structs.replace(decode(data, Birth), name=name)
    if birth.deleted:
        raise ExperimentMissing(f"Experiment {name} is being deleted.")
    return Experiment(store, birth)


def list_experiments(store: Store) -> list[str]:
    names = (key.rstrip("/").rpartition("/")[2] for key in store.keys("experiments/", shallow=True))
    return [name for name in names if _is_name(name) and _birth_key(name) in store.keys(_birth_key(name))]


def _birth_key(name: str) -> str:
    return f"experiments/{name}/experiment.json"


def _is_metrics_row(row: Mapping[str, Any], node: str) -> bool:
    try:
        return msgspec.convert(row, MetricsRow).node_id == node
    except msgspec.ValidationError:
        return False


def _is_name(name: str) -> bool:
    try:
        check_name(name)
    except ValueError:
        return False
    return True


def _numbers(keys: Iterable[str], prefix: str) -> list[int]:
    names = (key.rstrip("/").rpartition("/")[2] for key in keys)
    digits = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
    return sorted(int(text) for text in digits if text.isascii() and text.isdigit())
