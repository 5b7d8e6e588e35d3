"""Models that cannot be: one sentence that names the trouble, exit code 1, no traceback, no ghost in the swarm."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from rl_swarm.cli import main
from rl_swarm.experiment import open_experiment
from rl_swarm.models import PICO_FOLDER
from rl_swarm.stores.folder import FolderStore

pytestmark = pytest.mark.torch


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def half_the_weights(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def other_vocabulary(folder: Path) -> None:
    """A model with fewer tokens than its tokenizer has."""
    weights = load_file(folder / "model.safetensors")
    small = {"model.embed_tokens.weight": weights["model.embed_tokens.weight"][:40].clone()}
    save_file(weights | small, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 40}))


def other_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))


def short_context(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))


def no_end(folder: Path) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({k: v for k, v in config.items() if not k.startswith("eos")}))


def unknown_kind(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "something", "eos_token_id": 1}))


TROUBLE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no model at all": (no_config, "is not a model folder: it has no config.json"),
    "no tokenizer": (no_tokenizer, "has no tokenizer: tokenizer.json is missing"),
    "no weights": (no_weights, "has no weights"),
    "half the weights": (half_the_weights, "cannot be read"),
    "another vocabulary": (other_vocabulary, "The tokenizer knows 52 tokens, the model only 40"),
    "another shape": (other_shape, "config.json implies"),
    "a context too short": (short_context, "lower MAX_NEW_TOKENS or PROMPT_EXAMPLES, or choose other TASKS"),
    "no end of text": (no_end, "names no end-of-text token"),
    "an unknown kind": (unknown_kind, "cannot be loaded"),
}


@pytest.mark.parametrize("case", TROUBLE)
def test_a_model_that_cannot_be_is_one_sentence(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, told = TROUBLE[case]
    folder, root = tmp_path / "model", tmp_path / "root"
    shutil.copytree(PICO_FOLDER, folder)
    spoil(folder)
    chosen = ["--model-name", str(folder), "--gdrive-path", str(root), "--node-id", "n", "--tasks", "arithmetic"]
    more = ["--max-new-tokens", "12", "--max-rounds", "2", "--device", "cpu", "--coordinator-join-grace", "0"]
    assert main(["host", "--nodes", "1", *chosen, *more]) == 1
    output = capsys.readouterr()
    assert told in output.err, output
    assert "Traceback" not in output.err + output.out
    known = open_experiment(FolderStore(root), "default_experiment").peers().known
    # A prompt's length shows only when there is one; everything else keeps the node from becoming a member.
    assert ("n_0" in known) == (case == "a context too short")
