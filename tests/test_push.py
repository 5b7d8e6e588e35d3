"""`rl-swarm push` and the model card, with the real command, the real library and a Hub on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from fake_hub import ORGANISATION, USER, FakeHub, running_hub
from swarms import toy_run

from rl_swarm.card import model_card
from rl_swarm.cli import main
from rl_swarm.models.hub_ids import is_hub_id
from rl_swarm.stores.memory import MemoryStore

pytestmark = pytest.mark.torch

COMMAND = [sys.executable, "-m", "rl_swarm.cli"]
REPO = f"{USER}/first"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two nodes of pico after two rounds, a checkpoint of each."""
    root = tmp_path_factory.mktemp("swarm")
    counts = ["--nodes", "2", "--max-rounds", "2", "--checkpoint-interval", "1", "--eval-every", "1"]
    counts += ["--num-train-samples", "2", "--num-generations", "4", "--num-transplant-trees", "1"]
    who = ["--node-id", "box", "--model-name", "pico", "--experiment-name", "trial", "--learning-rate", "1e-3"]
    where = ["--gdrive-path", str(root), "--eval-questions", "4"]
    subprocess.run([*COMMAND, "host", *counts, *who, *where], check=True, capture_output=True, timeout=240)
    return root


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with running_hub() as hub:
        yield hub


class Shell:
    """Runs `push` as its user does, in surroundings of its own, and looks at what every run must keep to."""

    def __init__(self, root: Path, hub: FakeHub, home: Path) -> None:
        self.root, self.hub, self.home = root, hub, home
        (home / "tmp").mkdir(parents=True)

    def __call__(self, *words: str, code: int = 0, **given: str) -> str:
        surroundings = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))},
            "HF_ENDPOINT": self.hub.url,
            "HF_HOME": str(self.home / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "TMPDIR": str(self.home / "tmp"),
            "HUGGINGFACE_ACCESS_TOKEN": self.hub.token,
            **given,
        }
        command = [*COMMAND, "push", "trial", "--gdrive-path", str(self.root), *words]
        done = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=240)
        assert done.returncode == code, done.stderr
        for token in (self.hub.token, surroundings["HUGGINGFACE_ACCESS_TOKEN"]):
            assert token == "None" or token not in done.stdout + done.stderr
        assert done.stderr.count("\n") == (code != 0), done.stderr
        assert list((self.home / "tmp").iterdir()) == [], "the temporary folder is removed"
        return done.stderr if code else done.stdout


@pytest.fixture
def push(root: Path, hub: FakeHub, tmp_path: Path) -> Shell:
    return Shell(root, hub, tmp_path / "home")


def exported(root: Path, out: Path, *words: str) -> Path:
    assert main(["export", "trial", "--gdrive-path", str(root), "--out", str(out), *words]) == 0
    return out


# What arrives


def test_a_pushed_node_loads_in_transformers_and_is_the_exported_one(
    push: Shell, hub: FakeHub, root: Path, tmp_path: Path
) -> None:
    import transformers
    from safetensors.torch import load_file

    said = push("--node", "box_1", "--repo", REPO)
    assert "box_1 of trial after round 1" in said and "model.safetensors" in said and f"{hub.url}/{REPO}" in said
    received = hub.repositories[REPO]
    assert received.messages == ["trial: box_1 after round 1"], "one commit that says what it is"
    assert received.large == {"model.safetensors"} and not received.private

    arrived, out = tmp_path / "arrived", exported(root, tmp_path / "out", "--node", "box_1")
    arrived.mkdir()
    for name, data in received.files.items():
        (arrived / name).write_bytes(data)
    assert {path.name for path in out.iterdir()} == set(received.files)
    for path in out.iterdir():
        if path.name != "README.md":
            assert path.read_bytes() == received.files[path.name], path.name
    card = (out / "README.md").read_text()
    assert received.files["README.md"].decode() == card.replace('from_pretrained(".")', f'from_pretrained("{REPO}")')

    model = transformers.AutoModelForCausalLM.from_pretrained(arrived)
    tokenizer = transformers.AutoTokenizer.from_pretrained(arrived)
    assert (model.model.norm.weight == load_file(out / "model.safetensors")["model.norm.weight"]).all()
    ids = tokenizer("12+7=", return_tensors="pt")
    assert model.generate(**ids, max_new_tokens=4, do_sample=False).shape[1] > ids.input_ids.shape[1]


def test_an_earlier_round_in_private_with_the_hubs_own_login(
    push: Shell, hub: FakeHub, root: Path, tmp_path: Path
) -> None:
    (push.home / "hf").mkdir()
    (push.home / "hf" / "token").write_text(hub.token)
    repo = f"{ORGANISATION}/early"
    push("--node", "box_0", "--repo", repo, "--round", "0", "--private", HUGGINGFACE_ACCESS_TOKEN="None")
    early = hub.repositories[repo]
    assert early.private and early.messages == ["trial: box_0 after round 0"]
    assert "| rounds learned | 1 |" in early.files["README.md"].decode()
    for words, same in ((["--round", "0"], True), ([], False)):
        out = exported(root, tmp_path / str(same), "--node", "box_0", *words)
        assert ((out / "model.safetensors").read_bytes() == early.files["model.safetensors"]) == same


def test_pushing_again_commits_no_change_and_makes_nothing_public_that_was_meant_to_be_private(
    push: Shell, hub: FakeHub
) -> None:
    push("--node", "box_0", "--repo", REPO)
    push("--node", "box_0", "--repo", REPO)
    assert "is there already and public" in push("--node", "box_1", "--repo", REPO, "--private", code=1)
    assert hub.repositories[REPO].messages == ["trial: box_0 after round 1"]


def test_a_dry_run_needs_no_token_and_asks_nobody(push: Shell, hub: FakeHub) -> None:
    said = push("--node", "box_0", "--repo", REPO, "--dry-run", HUGGINGFACE_ACCESS_TOKEN="None")
    assert "README.md" in said and "tokenizer.json" in said and "Nothing was uploaded" in said
    assert hub.requests == []


# Tokens


def test_without_a_token_it_says_where_to_get_one_before_any_work(push: Shell, hub: FakeHub) -> None:
    told = push("--node", "box_0", "--repo", REPO, code=1, HUGGINGFACE_ACCESS_TOKEN="None")
    assert f"{hub.url}/settings/tokens" in told and "HUGGINGFACE_ACCESS_TOKEN" in told and "hf auth login" in told
    assert hub.requests == []


def test_a_token_that_cannot_be_one_is_not_sent_and_not_shown(push: Shell, hub: FakeHub) -> None:
    for token in ("hf_two\nlines", "hf_\xe9"):
        assert "is no token" in push("--node", "box_0", "--repo", REPO, code=1, HUGGINGFACE_ACCESS_TOKEN=token)
    assert hub.requests == []


def test_a_wrong_token_is_known_before_the_export(push: Shell, hub: FakeHub) -> None:
    told = push("--node", "box_0", "--repo", REPO, code=1, HUGGINGFACE_ACCESS_TOKEN="hf_wrong")
    assert "does not know this token" in told
    assert hub.requests == ["GET /api/whoami-v2"]


# What goes wrong


def test_a_place_the_hub_refuses_is_one_sentence(push: Shell, hub: FakeHub) -> None:
    assert "may not write to somebody/first" in push("--node", "box_0", "--repo", "somebody/first", code=1)
    forbidden = f"{USER}/is-forbidden"
    assert "Invalid repository name is-forbidden" in push("--node", "box_0", "--repo", forbidden, code=1)
    assert hub.repositories == {}


def test_each_refusal_of_the_hub_has_its_sentence(push: Shell, hub: FakeHub) -> None:
    for status, told in ((403, "may not write"), (404, f"has no {REPO}"), (429, "fewer requests"), (502, "own (502)")):
        hub.fail("whoami", status)
        assert told in push("--node", "box_0", "--repo", REPO, code=1)


def test_a_failed_commit_leaves_nothing_behind_and_the_next_attempt_succeeds(push: Shell, hub: FakeHub) -> None:
    hub.fail("commit", 500)
    assert "trouble of its own (500)" in push("--node", "box_0", "--repo", REPO, code=1)
    assert hub.repositories[REPO].files == {}
    hub.fail("preupload", 503)  # short trouble is waited out
    push("--node", "box_0", "--repo", REPO)
    assert len(hub.repositories[REPO].messages) == 1


def test_a_refusal_of_the_storage_is_not_laid_at_the_tokens_door(push: Shell, hub: FakeHub) -> None:
    hub.fail("store", 403)
    assert "storage does not take the upload (403)" in push("--node", "box_0", "--repo", REPO, code=1)
    assert hub.repositories[REPO].files == {}


def test_no_network_is_one_sentence(push: Shell) -> None:
    told = push("--node", "box_0", "--repo", REPO, code=1, HF_ENDPOINT="http://127.0.0.1:9")
    assert "http://127.0.0.1:9 cannot be reached" in told
    assert "HF_HUB_OFFLINE" in push("--node", "box_0", "--repo", REPO, code=1, HF_HUB_OFFLINE="1")


def test_what_is_not_there_or_cannot_be_is_one_sentence(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(node: str, repo: str, *words: str) -> str:
        assert main(["push", "trial", "--gdrive-path", str(root), "--node", node, "--repo", repo, *words]) == 1
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.count("\n") == 1
        return shown.err

    assert "There is no node nobody in trial" in told("nobody", REPO, "--dry-run")
    assert "there are those of: 0, 1" in told("box_0", REPO, "--dry-run", "--round", "7")
    for repo in ("first", "a/b/c", "../first", f"{USER}/a--b", f"{USER}/first.git", f"{USER}/\x1b[2J", ""):
        assert "allows no repository" in told("box_0", repo)


def test_a_damaged_checkpoint_is_one_sentence_that_leads_to_another(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(root, tmp_path / "copy"))
    (copy / "experiments" / "trial" / "checkpoints" / "round_1" / "box_0.pt").write_bytes(b"half a che")
    words = ["push", "trial", "--gdrive-path", str(copy), "--node", "box_0", "--repo", REPO, "--dry-run"]
    assert main(words) == 1
    assert "checkpoint of round 1 of box_0 cannot be read" in (told := capsys.readouterr().err) and "--round" in told
    assert main([*words, "--round", "0"]) == 0


def test_a_disk_that_is_full_is_one_sentence(push: Shell) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, before[1]))  # of the children too
    try:
        told = push("--node", "box_0", "--repo", REPO, "--dry-run", code=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "Cannot export to" in told and "TMPDIR" in told


def test_a_name_of_the_hub_is_what_its_library_takes_for_one() -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    names = ["a/b", "A-b.c_9/_", "a/" + "b" * 96, "a/" + "b" * 97, "a" * 97 + "/b", "a/b\n", "a/é", "/a", "a/", "-a/b"]
    for name in [*names, "a.-b/c", "a/b.", "a--b/c", "a..b/c", "a/b.git", "a.git/b", "a b/c", "."]:
        try:
            validate_repo_id(name)
            expected = "/" in name
        except HFValidationError:
            expected = False
        assert is_hub_id(name) == expected, name


# The card


def test_the_card_says_how_the_node_was_trained(root: Path, tmp_path: Path) -> None:
    card = (exported(root, tmp_path / "out", "--node", "box_1") / "README.md").read_text()
    metadata, _, body = card.removeprefix("---\n").partition("\n---\n")
    assert yaml.safe_load(metadata) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rl-swarm", "reinforcement-learning"],
    }, "pico is no model of the Hub"
    log = (root / "experiments" / "trial" / "logs" / "box_1" / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in log.splitlines()]
    reward = sum(row["my_reward"] for row in rows) / 2
    facts = [
        ("tasks", "`arithmetic`"),
        ("own questions a round (I)", "`2`"),
        ("peers' groups a round (J)", "`1`"),
        ("answers a question (G)", "`4`"),
        ("learning rate", "`0.001`"),
        ("seed", "`42`"),
        ("rounds learned", "2"),
        ("reward on its own questions", f"{reward:.3f} (mean of the last 2 rounds)"),
        ("reward on held-out questions", f"{rows[-1]['eval_reward']:.3f} (round 1)"),
        ("peers' groups learned from", f"{sum(row['external_used'] for row in rows)} of 2 wanted"),
    ]
    for name, value in facts:
        assert f"\n| {name} | {value} |\n" in body
    assert str(root) not in card


def test_the_card_names_the_base_model_where_others_can_get_it(tmp_path: Path) -> None:
    experiment = toy_run(MemoryStore(), num_transplant_trees=0)[0]
    card = model_card(experiment, "ada", "Qwen/Qwen3-0.6B", 2)
    metadata: dict[str, Any] = yaml.safe_load(card.split("---\n")[1])
    assert metadata["base_model"] == "Qwen/Qwen3-0.6B"
    assert "it learned alone" in card and "held-out" not in card
    assert "learning rate" not in card, "this node has noted no settings"
    folder = tmp_path / "secret" / "mine"
    card = model_card(experiment, "ada", str(folder), 2)
    assert "base_model" not in card and "`mine`, a local folder" in card and "secret" not in card


def test_nobodys_text_becomes_markup_of_the_card() -> None:
    experiment = toy_run(MemoryStore())[0]
    experiment.append_start("ada", {"tasks": "x|y`\n---\n# Buy [this](http://evil)", "seed": None}, 0.0)
    card = model_card(experiment, "ada", "a\nlicense: evil/b", 2)
    assert yaml.safe_load(card.split("---\n")[1]).keys() == {"library_name", "pipeline_tag", "tags"}
    assert re.findall(r"^# .*", card, re.MULTILINE) == ["# `ada` of `trial`, after round 2"]
    assert "| tasks | `x\\|y'\\n---\\n# Buy [this](http://evil)` |" in card


def test_the_cards_example_runs_in_an_exported_folder(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = exported(root, tmp_path / "out", "--node", "box_0")
    (example,) = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(out)
    scope: dict[str, Any] = {}
    exec(example, scope)
    assert scope["tokenizer"]("1+1=").input_ids and scope["model"].num_parameters() > 0


# The fake itself


def asked(method: str, url: str, body: bytes = b"", **headers: str) -> int:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, data=body, method=method, headers=named)
    try:
        with urllib.request.urlopen(request) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_fake_is_as_strict_as_the_hub(hub: FakeHub) -> None:
    bearer = f"Bearer {hub.token}"
    assert asked("POST", f"{hub.url}/api/repos/create", b'{"name": "first"}') == 401
    assert asked("POST", f"{hub.url}/api/repos/create", b'{"name": "first"}', Authorization=bearer) == 200

    oid, size = hashlib.sha256(b"weights").hexdigest(), len(b"weights")
    batch = {"operation": "upload", "transfers": ["basic"], "hash_algo": "sha256", "objects": [{"oid": oid, "size": 7}]}
    large = {"path": "model.safetensors", "algo": "sha256", "oid": oid, "size": size}
    lines = [{"key": "header", "value": {"summary": "x"}}, {"key": "lfsFile", "value": large}]
    commit = b"\n".join(json.dumps(line).encode() for line in lines)
    place, kind = f"{hub.url}/api/models/{REPO}/commit/main", "application/x-ndjson"
    assert asked("POST", place, commit, Authorization=bearer, Content_Type=kind) == 400, "it was not uploaded"

    headers = {"Content-Type": "application/vnd.git-lfs+json"}
    answer = hub.lfs_batch(REPO, headers=headers, body=json.dumps(batch).encode())
    upload = answer["objects"][0]["actions"]["upload"]["href"]
    assert asked("PUT", upload.partition("?")[0], b"weights") == 403, "no signature"
    assert asked("PUT", upload, b"waights") == 400, "another sha256"
    assert asked("PUT", upload, b"weights", Authorization=bearer) == 400, "the token is not for the storage"
    assert asked("PUT", upload, b"weights") == 200
    assert asked("POST", place, commit, Authorization="Bearer hf_wrong", Content_Type=kind) == 401
    assert asked("POST", place, commit, Authorization=bearer, Content_Type="application/json") == 415
    assert asked("POST", place, commit, Authorization=bearer, Content_Type=kind) == 200
    assert hub.repositories[REPO].files == {"model.safetensors": b"weights"}
