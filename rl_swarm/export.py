"""Taking results out of a store: a summary with all metrics, or a node's model as an ordinary Hugging Face folder."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from rl_swarm.card import model_card
from rl_swarm.errors import CheckpointError, ModelError, SwarmError
from rl_swarm.experiment import Experiment
from rl_swarm.monitor.screen import visible
from rl_swarm.monitor.status import experiment_status, metric_rows
from rl_swarm.policies import model_folder
from rl_swarm.policies.chat import read_json

# What a model folder holds beside weights: configuration, tokenizer, chat template. Nothing else is copied: the name of
# the folder stands in a record that others can write, and it might be one that is no model's.
DESCRIPTIONS = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json"}
DESCRIPTIONS |= {"special_tokens_map.json", "added_tokens.json", "merges.txt", "vocab.txt", "chat_template.jinja"}
DESCRIPTIONS |= {"chat_template.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"}


class Checkpoint(NamedTuple):
    """A saved node: whose, trained from which model, after which round."""

    node: str
    model: str
    round: int


def summary(experiment: Experiment) -> dict[str, Any]:
    return {"status": experiment_status(experiment), "settings": experiment.birth.settings}


def metrics_csv(rows: list[dict[str, Any]]) -> str:
    """Rows as CSV; nested values (seconds, reasons) as JSON in their cell."""
    # Names and texts may be anyone's: nothing in them may reach a terminal as a command to it.
    rows = [{visible(name): value for name, value in row.items()} for row in rows]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _cell(value) for name, value in row.items()})
    return text.getvalue()


def _cell(value: object) -> object:
    if value is None or isinstance(value, (int, float)):
        return value
    return visible(value if isinstance(value, str) else json.dumps(value))


def export_summary(experiment: Experiment, out: Path) -> list[Path]:
    """summary.json and metrics.csv in a folder."""
    out.mkdir(parents=True, exist_ok=True)
    files = [out / "summary.json", out / "metrics.csv"]
    files[0].write_text(json.dumps(summary(experiment), indent=2) + "\n")
    files[1].write_text(metrics_csv(metric_rows(experiment)))
    return files


def find_checkpoint(experiment: Experiment, node: str, round: int | None = None) -> Checkpoint:
    """The node's checkpoint of a round, of the newest where none is given, if there is anything in it to export."""
    peer = experiment.peers().known.get(node)
    if peer is None:
        known = ", ".join(sorted(experiment.peers().known))
        raise SwarmError(f"There is no node {node} in {experiment.name}; there are: {known}.")
    rounds = experiment.checkpoint_rounds(node)
    if not rounds:
        raise CheckpointError(f"Node {node} has no checkpoint yet.")
    if round is not None and round not in rounds:
        there = ", ".join(map(str, rounds))
        raise CheckpointError(f"Node {node} has no checkpoint of round {round}; there are those of: {there}.")
    if peer.model == "toy":
        raise ModelError("The toy policy is no language model: there is nothing to export.")
    return Checkpoint(node, peer.model, rounds[-1] if round is None else round)


def export_model(
    experiment: Experiment, checkpoint: Checkpoint, out: Path, *, repo: str | None = None, token: str | None = None
) -> None:
    """A checkpoint as a model folder that transformers loads, with a card that says what it is."""
    from safetensors import SafetensorError

    from rl_swarm.policies.saving import is_adapter, read_saved_weights, save_weights

    node, model, round = checkpoint
    source = model_folder(model, token)
    if "model_type" not in read_json(source / "config.json"):
        raise ModelError(f"{source} is no model folder: it has no config.json that names a model_type.")
    try:
        weights = read_saved_weights(experiment.read_checkpoint(node, round))
        if is_adapter(weights):
            from rl_swarm.policies.huggingface import merged_weights

            weights = merged_weights(source, weights)
    except CheckpointError as error:
        raise CheckpointError(
            f"The checkpoint of round {round} of {node} cannot be read ({error}); --round takes another one."
        ) from None
    out.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.name in DESCRIPTIONS:
            shutil.copyfile(path, out / path.name)
    _say_float32(out / "config.json")
    try:
        save_weights(weights, out)
    except SafetensorError as error:  # a full disk, told in the library's own way
        raise OSError(str(error)) from None
    (out / "README.md").write_text(model_card(experiment, node, model, round, repo), encoding="utf-8")


def _say_float32(path: Path) -> None:
    """Weights were trained, and are exported, in float32; a base model's word for less would round them when loaded."""
    config = read_json(path)
    names = [name for name in ("dtype", "torch_dtype") if name in config] or ["torch_dtype"]
    path.write_text(json.dumps(config | dict.fromkeys(names, "float32"), indent=2) + "\n", encoding="utf-8")
