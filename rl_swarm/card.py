"""The model card of a trained node: what it is and how it was trained, from nothing but the experiment's own data."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from rl_swarm.experiment import Experiment
from rl_swarm.models.hub_ids import is_hub_id
from rl_swarm.monitor.screen import visible
from rl_swarm.monitor.status import metric_rows

# The reward of one round is mostly the luck of its questions.
LAST_ROUNDS = 10

TAGS = ("rl-swarm", "reinforcement-learning")

_CARD = """\
---
{metadata}
---

# {node} of {experiment}, after round {round}

A language model trained by reinforcement learning with RL Swarm: each node of a swarm answers questions whose answers
can be checked, shares the text of its answers, and learns from its own and some of its peers'
(SAPO, [arXiv:2509.08721](https://arxiv.org/abs/2509.08721)). It was trained for the tasks below and for nothing else.

| | |
|---|---|
{facts}

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({place})
model = AutoModelForCausalLM.from_pretrained({place})
```

Written by `rl-swarm` from the records of the experiment. The terms of the base model apply.
"""


def model_card(experiment: Experiment, node: str, model: str, round: int, repo: str | None = None) -> str:
    """The card of a node that was trained from `model`, as it was after a round; `repo` is where it will lie."""
    facts = _origin(experiment, node, model, round) | _settings(experiment, node) | _results(experiment, node, round)
    return _CARD.format(
        metadata=_metadata(model),
        node=_code(node),
        experiment=_code(experiment.name),
        round=round,
        facts="\n".join(f"| {name} | {value} |" for name, value in facts.items()),
        place=json.dumps(repo or "."),
    )


def _is_on_the_hub(model: str) -> bool:
    return is_hub_id(model) and not Path(model).is_dir()


def _metadata(model: str) -> str:
    """The front matter. A JSON text is YAML too, whatever stands in it."""
    values: dict[str, Any] = {"base_model": model} if _is_on_the_hub(model) else {}
    values |= {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": list(TAGS)}
    return "\n".join(f"{name}: {json.dumps(value)}" for name, value in values.items())


def _origin(experiment: Experiment, node: str, model: str, round: int) -> dict[str, str]:
    if model == "pico":
        base = "pico, the small model inside rl-swarm"
    elif _is_on_the_hub(model):
        base = f"[{model}](https://huggingface.co/{model})"
    else:
        # Where it lay on somebody's disk is nobody's business.
        base = f"{_code(Path(model).name)}, a local folder"
    return {
        "node": f"{_code(node)} of experiment {_code(experiment.name)} (run {_code(experiment.run)})",
        "checkpoint": f"after round {round}",
        "base model": base,
    }


def _settings(experiment: Experiment, node: str) -> dict[str, str]:
    """What the node itself was started with; what it did not note is left out, not guessed."""
    names = {
        "tasks": "tasks",
        "own questions a round (I)": "num_train_samples",
        "peers' groups a round (J)": "num_transplant_trees",
        "answers a question (G)": "num_generations",
        "learning rate": "learning_rate",
        "loss": "loss",
        "rule for peers' text": "off_policy",
        "weight of the KL term": "kl_beta",
        "LoRA rank (0: the whole model)": "lora_rank",
        "temperature": "temperature",
        "examples before a question": "prompt_examples",
        "seed": "seed",
    }
    started = experiment.last_start(node)
    return {shown: _code(str(started[name])) for shown, name in names.items() if started.get(name) is not None}


def _results(experiment: Experiment, node: str, round: int) -> dict[str, str]:
    rows = [row for row in metric_rows(experiment, node) if row["round"] <= round]
    if not rows:
        return {}
    rounds = sorted({row["round"] for row in rows})
    last = [row["my_reward"] for row in rows if row["round"] in rounds[-LAST_ROUNDS:]]
    span = f"mean of the last {len(rounds[-LAST_ROUNDS:])} rounds" if len(rounds) > 1 else "one round"
    facts = {
        "rounds learned": str(len(rounds)),
        "reward on its own questions": f"{fmean(last):.3f} ({span})",
    }
    evaluated = [row for row in rows if row.get("eval_reward") is not None]
    if evaluated:
        newest = evaluated[-1]
        facts["reward on held-out questions"] = f"{newest['eval_reward']:.3f} (round {newest['round']})"
    used, wanted = sum(row["external_used"] for row in rows), sum(row["external_wanted"] for row in rows)
    facts["peers' groups learned from"] = f"{used} of {wanted} wanted" if wanted else "none: it learned alone"
    return facts


def _code(text: str) -> str:
    """Text as it stands: in a span of code nothing is markup, but for what ends the span or a table's cell."""
    return "`" + visible(text).replace("`", "'").replace("|", "\\|") + "`"
