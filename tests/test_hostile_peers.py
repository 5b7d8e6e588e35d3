"""A swarm of a victim, an honest peer and one that publishes whatever it likes: its files are counted, and no more.

Whatever the third one plants, the victim must count it under its reason, train on none of it, go on using the honest
peer's groups, account for all of its J groups, and be there for the next round.
"""

from __future__ import annotations

import json
import os
import random
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from swarms import FakeClock, a_peer, accounted, toy_experiment, toy_host, toy_settings

from rl_swarm import codec
from rl_swarm.cli import main
from rl_swarm.coordinator import Coordinator
from rl_swarm.experiment import MAX_RECORD_BYTES, Experiment
from rl_swarm.gathering import score
from rl_swarm.host import Host
from rl_swarm.protocols import Task
from rl_swarm.stores.folder import FolderStore
from rl_swarm.tasks import open_tasks
from rl_swarm.tasks.text import is_held_out
from rl_swarm.types import Rollout, RolloutGroup, Step

ROUNDS = 2
OWN, G = 8, 8
WANTED = 64
EVIL = "evil"
TASKS = "arithmetic/bits,arithmetic/gcd"

JsonFile = dict[str, Any]


@dataclass
class Scene:
    root: Path
    experiment: Experiment
    victim: Host
    honest: Host

    def folder(self, step: Step) -> Path:
        return self.root / f"experiments/trial/rollouts/round_{step.round}/stage_{step.stage}"

    def play(self, plant: Callable[[Step], None]) -> list[dict[str, Any]]:
        """The victim's metrics rows. In every round `plant` comes after the sharing and before the learning."""
        rows = []
        for step in map(Step, range(ROUNDS)):
            shared, others = self.victim.share(step), self.honest.share(step)
            plant(step)
            rows.append(self.victim.learn(step, shared)["victim"])
            self.honest.learn(step, others)
        assert self.experiment.metrics("victim").rows == rows
        return rows


def make_scene(root: Path, **given: Any) -> Scene:
    counts = {"num_train_samples": OWN, "num_generations": G, "num_transplant_trees": WANTED}
    chosen = toy_settings(**{"max_rounds": ROUNDS, "tasks": TASKS, **counts, **given})
    experiment = toy_experiment(FolderStore(root, durable=False), chosen)
    return Scene(root, experiment, *(toy_host(experiment, [node], chosen) for node in ("victim", "honest")))


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return make_scene(tmp_path)


def fair_file(experiment: Experiment, task: Task, step: Step, texts: Sequence[str] | None = None) -> JsonFile:
    """Two groups nobody could object to, informative too: if the victim takes a file, it trains on these."""
    groups = []
    for number, question in enumerate(task.sample(2, random.Random(f"evil {step}"))):
        answers = texts or [f"<answer>{question.answer}</answer>", *["no idea"] * (G - 1)]
        rollouts = tuple(Rollout(text) for text in answers)
        groups.append(score(task, RolloutGroup(EVIL, step, str(number), question, rollouts)))
    data = codec.encode(experiment.run, EVIL, step, 0.0, "toy", groups)
    found: JsonFile = json.loads(data)
    return found


def check_rows(rows: list[dict[str, Any]], expected: dict[str, int]) -> None:
    assert len(rows) == ROUNDS
    assert rows[0]["rejected"] == expected
    for row in rows:
        assert set(row["rejected"]) == set(expected)
        assert row["external_missing"].get("rejected", 0) == sum(row["rejected"].values())
        assert list(row["external_from"]) == ["honest"]
        assert row["external_wanted"] == WANTED and accounted(row)


def test_a_fair_file_of_the_same_making_is_used(scene: Scene) -> None:
    def plant(step: Step) -> None:
        file = fair_file(scene.experiment, scene.victim.task, step)
        (scene.folder(step) / f"{EVIL}.json").write_text(json.dumps(file))

    for row in scene.play(plant):
        assert row["external_from"][EVIL] == 2
        assert row["external_from"]["honest"] > 0
        assert row["rejected"] == {} and accounted(row)


# What may be wrong inside a file


def changed(**changes: Any) -> Callable[[JsonFile], bytes]:
    return lambda file: json.dumps({**file, **changes}).encode()


def in_each_rollout(**changes: Any) -> Callable[[JsonFile], bytes]:
    def alter(file: JsonFile) -> bytes:
        for group in file["rollouts"].values():
            for rollout in group:
                rollout.update(changes)
        return json.dumps(file).encode()

    return alter


def in_each_question(**changes: Any) -> Callable[[JsonFile], bytes]:
    def alter(file: JsonFile) -> bytes:
        for question in file["questions"].values():
            question.update(changes)
        return json.dumps(file).encode()

    return alter


def resized(size: int) -> Callable[[JsonFile], bytes]:
    def alter(file: JsonFile) -> bytes:
        for group in file["rollouts"].values():
            group[:] = (group * size)[:size]
        return json.dumps(file).encode()

    return alter


def number_in_place_of_rewards(number: str) -> Callable[[JsonFile], bytes]:
    return lambda file: json.dumps(file).replace('"reward": 0.0', f'"reward": {number}').encode()


def held_out_questions(file: JsonFile) -> bytes:
    """The names of two held-out questions, with their true prompts and answers."""
    (question,) = open_tasks("arithmetic/bits", "default").sample(1, random.Random(2), held_out=True)
    assert is_held_out(question.prompt)
    for id, group in file["rollouts"].items():
        file["questions"][id] = question.name._asdict()
        for rollout in group:
            rollout["prompt"] = question.prompt
        group[0]["response"] = f"<answer>{question.answer}</answer>"
    return json.dumps(file).encode()


def of_another_question(file: JsonFile) -> bytes:
    """Names and prompts that do not belong together: the answers would be scored against the wrong question."""
    first, second = (file["questions"][id] for id in ("0", "1"))
    file["questions"] = {"0": second, "1": first}
    return json.dumps(file).encode()


def crowd(groups: int) -> Callable[[JsonFile], bytes]:
    def alter(file: JsonFile) -> bytes:
        for part in ("rollouts", "questions"):
            one = json.dumps(file[part]["0"])
            file[part] = "{" + ",".join(f'"{number}":{one}' for number in range(groups)) + "}"
        texts = (file.pop("rollouts"), file.pop("questions"))
        return (json.dumps(file)[:-1] + ',"rollouts":{},"questions":{}}}'.format(*texts)).encode()

    return alter


def endless_group(size: int) -> Callable[[JsonFile], bytes]:
    def alter(file: JsonFile) -> bytes:
        small = b'{"prompt":"","response":"","reward":0}'
        group = b"[" + b",".join([small] * size) + b"]"
        return json.dumps({**file, "rollouts": {"0": "HERE"}}).encode().replace(b'"HERE"', group)

    return alter


def with_text(text: bytes) -> Callable[[JsonFile], bytes]:
    return lambda file: json.dumps(file).encode().replace(b"no idea", text)


FILES: dict[str, tuple[Callable[[JsonFile], bytes], dict[str, int]]] = {
    "truncated": (lambda file: json.dumps(file).encode()[:-20], {"not_json": 1}),
    "empty": (lambda file: b"", {"empty": 1}),
    "no JSON": (lambda file: b"\x00\x01\x02 hello", {"not_json": 1}),
    "a pickle": (lambda file: b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.", {"not_json": 1}),
    "a list": (lambda file: json.dumps([file]).encode(), {"wrong_schema": 1}),
    "a later version": (changed(schema=2), {"wrong_schema": 1}),
    "no version": (changed(schema=None), {"wrong_schema": 1}),
    "a number as model": (changed(model=7), {"wrong_schema": 1}),
    "a list of groups": (changed(rollouts=[]), {"wrong_schema": 1}),
    "texts that are lists": (in_each_rollout(response=["<answer>1</answer>"]), {"wrong_schema": 1}),
    "a seed in words": (in_each_question(seed="seven"), {"wrong_schema": 1}),
    "another run": (changed(run="0123456789abcdef"), {"wrong_run": 1}),
    "another's name": (changed(peer_id="honest"), {"wrong_owner": 1}),
    "a name that climbs": (changed(peer_id="../../evil"), {"wrong_owner": 1}),
    "a name of 300 characters": (changed(peer_id="e" * 300), {"wrong_owner": 1}),
    "another round": (changed(round=7), {"wrong_step": 1}),
    "another stage": (changed(stage=1), {"wrong_step": 1}),
    "groups of one": (resized(1), {"group_size": 2}),
    "groups of none": (resized(0), {"group_size": 2}),
    "larger groups": (resized(2 * G), {"group_size": 2}),
    "an endless group": (endless_group(200_000), {"group_size": 1}),
    "a million completions": (endless_group(1_000_000), {"too_large": 1}),
    "too many groups": (crowd(codec.MAX_GROUPS + 1), {"too_many_groups": 1}),
    "more groups than bytes allow": (crowd(20_000), {"too_large": 1}),
    "an invented task": (in_each_question(task="arithmetic/telepathy"), {"unknown_task": 2}),
    "an invented family": (in_each_question(task="os.system"), {"unknown_task": 2}),
    "a task nobody here practises": (in_each_question(task="arithmetic/sum"), {"other_task": 2}),
    "an invented configuration": (in_each_question(config="v0"), {"unknown_config": 2}),
    "a task name of a megabyte": (in_each_question(task="t" * 2**20), {"long_name": 2}),
    "a seed below zero": (in_each_question(seed=-1), {"bad_question": 2}),
    "a seed of 100 digits": (in_each_question(seed=10**100), {"bad_question": 2}),
    "an index that names nothing": (in_each_question(index=1), {"bad_question": 2}),
    "altered prompts": (in_each_rollout(prompt="bits(1)="), {"altered_prompt": 2}),
    "questions exchanged": (of_another_question, {"altered_prompt": 2}),
    "held-out questions": (held_out_questions, {"held_out": 2}),
    "no questions": (changed(questions={}), {"no_question": 2}),
    "a long text": (in_each_rollout(response="x" * (codec.MAX_TEXT_CHARS + 1)), {"long_text": 2}),
    "NaN as reward": (number_in_place_of_rewards("NaN"), {"not_json": 1}),
    "Infinity as reward": (number_in_place_of_rewards("Infinity"), {"not_json": 1}),
    "1e999 as reward": (number_in_place_of_rewards("1e999"), {"wrong_schema": 1}),
    "null as reward": (number_in_place_of_rewards("null"), {"wrong_schema": 1}),
    "nothing but brackets": (lambda file: b"[" * 2**20, {"wrong_schema": 1}),
    "brackets in a field of their own": (lambda file: b'{"more":' + b"[" * 2**20, {"not_json": 1}),
    "invalid UTF-8": (with_text(b"\xff\xfe"), {"not_json": 1}),
    "half a surrogate pair": (with_text(b"\\ud800"), {"not_json": 1}),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_bad_file_is_counted_not_fatal(scene: Scene, kind: str) -> None:
    make, expected = FILES[kind]

    def plant(step: Step) -> None:
        data = make(fair_file(scene.experiment, scene.victim.task, step))
        assert (len(data) > codec.MAX_FILE_BYTES) == ("too_large" in expected), "the test tests another limit"
        (scene.folder(step) / f"{EVIL}.json").write_bytes(data)

    check_rows(scene.play(plant), expected)


def test_the_rewards_a_peer_claims_are_not_believed(scene: Scene) -> None:
    """Wrong answers with glowing rewards are groups without any advantage: never chosen, and counted as such."""

    def plant(step: Step) -> None:
        file = fair_file(scene.experiment, scene.victim.task, step, ["<answer>99</answer>"] * G)
        for group in file["rollouts"].values():
            for number, rollout in enumerate(group):
                rollout["reward"] = float(number % 2)
        (scene.folder(step) / f"{EVIL}.json").write_text(json.dumps(file))

    rows = scene.play(plant)
    check_rows(rows, {})
    for row in rows:
        # Nothing else was published: all of the honest peer's groups but those used, and the two of the other.
        assert row["external_missing"]["zero_advantage"] == OWN - row["external_used"] + 2


def test_the_same_question_twice_counts_once(scene: Scene) -> None:
    def plant(step: Step) -> None:
        file = fair_file(scene.experiment, scene.victim.task, step)
        for id in ("1", "2", "3"):
            file["rollouts"][id], file["questions"][id] = file["rollouts"]["0"], file["questions"]["0"]
        for name in (f"{EVIL}.json", f"{EVIL}.0.json", f"{EVIL}.1.json"):
            (scene.folder(step) / name).write_text(json.dumps(file))

    for row in scene.play(plant):
        assert row["external_from"][EVIL] == 1
        assert row["rejected"] == {"duplicate": 11}
        assert row["external_from"]["honest"] > 0 and accounted(row)


def test_one_bad_group_does_not_cost_a_peer_its_good_ones(scene: Scene) -> None:
    def plant(step: Step) -> None:
        file = fair_file(scene.experiment, scene.victim.task, step)
        del file["questions"]["0"]
        (scene.folder(step) / f"{EVIL}.json").write_text(json.dumps(file))

    for row in scene.play(plant):
        assert row["external_from"][EVIL] == 1
        assert row["rejected"] == {"no_question": 1} and accounted(row)


CODE = [
    "__import__('pathlib').Path({marker!r}).touch()",
    "open({marker!r}, 'w').close()",
    "[[open({marker!r}, 'w').close()]]",
    "exec(\"open({marker!r}, 'w')\")",
    "0 if open({marker!r}, 'w') else 1",
    "(lambda: open({marker!r}, 'w'))()",
    "{{open({marker!r}, 'w')}}",
    "print(1)\nopen({marker!r}, 'w')",
]


@pytest.mark.parametrize("task", ["arithmetic/bits", "binary_matrix"])
def test_an_answer_that_is_code_is_scored_not_run(tmp_path: Path, task: str) -> None:
    scene = make_scene(tmp_path, tasks=f"arithmetic/gcd,{task}", task_difficulty="easy")
    marker = tmp_path / "marker"
    texts = [f"<answer>{code.format(marker=str(marker))}</answer>" for code in CODE]
    assert len(texts) == G

    def plant(step: Step) -> None:
        file = fair_file(scene.experiment, open_tasks(task, "easy"), step, texts)
        (scene.folder(step) / f"{EVIL}.json").write_text(json.dumps(file))

    rows = scene.play(plant)
    assert not marker.exists()
    check_rows(rows, {})
    for row in rows:
        assert row["external_missing"]["zero_advantage"] >= 2


# What may be wrong with a file's name or kind


def planted_bytes(name: str | bytes) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        with open(os.path.join(os.fsencode(folder), os.fsencode(name)), "wb") as file:
            file.write(b"{}")

    return plant


def planted_huge(folder: Path) -> None:
    with open(folder / f"{EVIL}.json", "wb") as file:
        file.truncate(2**30)


def planted_link(folder: Path) -> None:
    """To a file that would be accepted from its true owner, under a name that its content does not know."""
    (folder / f"{EVIL}.json").symlink_to(folder / "honest.json")


PLANTS: dict[str, tuple[Callable[[Path], None], dict[str, int]]] = {
    "a sparse gigabyte": (planted_huge, {"too_large": 1}),
    "a link": (planted_link, {"not_a_file": 1}),
    "a pipe": (lambda folder: os.mkfifo(folder / f"{EVIL}.json"), {"not_a_file": 1}),
    "a folder": (lambda folder: (folder / f"{EVIL}.json").mkdir(), {"bad_name": 1}),
    "only dots": (planted_bytes("..json"), {"bad_name": 1}),
    "more dots": (planted_bytes("...json"), {"bad_name": 1}),
    "no node": (planted_bytes(".json"), {"bad_name": 1}),
    "a part of no node": (planted_bytes(".0.json"), {"bad_name": 1}),
    "a part of a part": (planted_bytes("evil.0.0.json"), {"bad_name": 1}),
    "another ending": (planted_bytes("evil.pkl"), {"bad_name": 1}),
    "a line break": (planted_bytes("evil\n.json"), {"bad_name": 1}),
    "an escape sequence": (planted_bytes("\x1b[2Jevil.json"), {"bad_name": 1}),
    "a backslash": (planted_bytes("..\\evil.json"), {"bad_name": 1}),
    "a blank in front": (planted_bytes(" evil.json"), {"bad_name": 1}),
    "bytes that are no text": (planted_bytes(b"\xff\xfe.json"), {"bad_name": 1}),
    "a name of 240 characters": (planted_bytes("e" * 240 + ".json"), {"bad_name": 1}),
    "a part number of 200 digits": (planted_bytes("evil." + "9" * 200 + ".json"), {"wrong_schema": 1}),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", PLANTS)
def test_a_bad_name_or_no_file_at_all_is_counted_not_fatal(scene: Scene, kind: str) -> None:
    plant, expected = PLANTS[kind]
    check_rows(scene.play(lambda step: plant(scene.folder(step))), expected)


def test_a_gigabyte_from_a_peer_takes_no_memory(scene: Scene) -> None:
    tracemalloc.start()
    try:
        scene.play(lambda step: planted_huge(scene.folder(step)))
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()


def test_a_flood_of_files_from_one_peer_is_cut_off(scene: Scene) -> None:
    def plant(step: Step) -> None:
        for number in range(codec.MAX_GROUPS + 10):
            (scene.folder(step) / f"{EVIL}.{number}.json").touch()

    for row in scene.play(plant):
        assert row["rejected"] == {"empty": codec.MAX_GROUPS, "too_many_files": 10}
        assert list(row["external_from"]) == ["honest"] and accounted(row)


def test_however_many_groups_a_peer_publishes_it_gets_its_share_and_no_more(scene: Scene) -> None:
    task = scene.victim.task
    rollouts = (Rollout("no idea"),) * G

    def plant(step: Step) -> None:
        drawn = task.sample(600, random.Random(f"evil {step}"))
        questions = list({question.prompt: question for question in drawn}.values())[: codec.MAX_GROUPS + 40]
        groups = [RolloutGroup(EVIL, step, str(id), question, rollouts) for id, question in enumerate(questions)]
        scored = [score(task, group) for group in groups]
        for part, some in enumerate((scored[:150], scored[150:])):
            scene.experiment.publish(EVIL, step, part, 0.0, "toy", some)

    for row in scene.play(plant):
        assert row["rejected"] == {"over_share": codec.MAX_GROUPS - WANTED, "too_many_groups": 40}
        assert list(row["external_from"]) == ["honest"] and accounted(row)


# Bad records of peers


def planted_record(make: Callable[[Experiment], object]) -> Callable[[Path, Experiment], None]:
    def plant(folder: Path, experiment: Experiment) -> None:
        (folder / f"{EVIL}.json").write_text(json.dumps(make(experiment)))

    return plant


def record(experiment: Experiment, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(a_peer(experiment, EVIL))
    return {**found, **changes}


RECORDS: dict[str, Callable[[Path, Experiment], None]] = {
    "empty": lambda folder, experiment: (folder / f"{EVIL}.json").touch(),
    "no JSON": lambda folder, experiment: void((folder / f"{EVIL}.json").write_bytes(b"hello")),
    "another ending": lambda folder, experiment: planted_bytes(f"{EVIL}.json\x1b")(folder),
    "invalid UTF-8": lambda folder, experiment: void((folder / f"{EVIL}.json").write_bytes(b'{"run": "\xff"}')),
    "brackets": lambda folder, experiment: void((folder / f"{EVIL}.json").write_bytes(b"[" * 100_000)),
    "a list": planted_record(lambda experiment: []),
    "a field missing": planted_record(lambda experiment: {"run": experiment.run, "peer_id": EVIL}),
    "a beat in words": planted_record(lambda experiment: record(experiment, beat="fast")),
    "steps that are none": planted_record(lambda experiment: record(experiment, learned=[1])),
    "another's name": planted_record(lambda experiment: record(experiment, peer_id="honest")),
    "another run": planted_record(lambda experiment: record(experiment, run="another")),
    "too large": planted_record(lambda experiment: record(experiment, model="m" * MAX_RECORD_BYTES)),
    "a link": lambda folder, experiment: (folder / f"{EVIL}.json").symlink_to("/dev/zero"),
    "a pipe": lambda folder, experiment: os.mkfifo(folder / f"{EVIL}.json"),
    "a folder": lambda folder, experiment: (folder / f"{EVIL}.json").mkdir(),
    "a bad name": lambda folder, experiment: planted_bytes("..json")(folder),
    "an escape sequence as name": lambda folder, experiment: planted_bytes("\x1b[2J.json")(folder),
    "bytes that are no text as name": lambda folder, experiment: planted_bytes(b"\xff.json")(folder),
}


def void(value: object) -> None:
    """For lambdas whose value nobody wants."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", RECORDS)
def test_a_malformed_peer_record_stops_nobody(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    scene = make_scene(tmp_path, rollout_cleanup_enabled=True, coordinator_pace="quorum", coordinator_join_grace=0)
    experiment, settings, timer = scene.experiment, scene.victim.settings, FakeClock()
    for node in ("victim", "honest"):
        experiment.write_lease(experiment.peer_key(node), a_peer(experiment, node, learned=(0, 0)))
    RECORDS[kind](tmp_path / "experiments/trial/peers", experiment)

    assert sorted(experiment.peers().known) == ["honest", "victim"]
    assert len(experiment.peers().malformed) == 1
    assert Coordinator(experiment, "clock", settings, FakeClock(), timer).tick().round == 1
    for row in scene.play(lambda step: None):
        assert row["external_from"]["honest"] > 0 and accounted(row)
    for verb in ("status", "peers", "list"):
        arguments = [verb, "trial"] if verb != "list" else [verb]
        assert main([*arguments, "--gdrive-path", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out and shown.err == ""
