"""Steps of TRL's GRPOTrainer on one model folder, timed: what the rounds of this learner are held against.

One step is what one node does in a round: sample a group of completions of each question, score them (each second one
is right), one update from all of them. Sampling is by transformers' `generate`, without vLLM. Settings are TRL's own
except where they would make it slower or do other work: no gradient checkpointing, no reference model, nothing saved
or logged, all of a step's completions in one pass unless told otherwise.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
try:
    import datasets  # type: ignore[import-not-found]
    import transformers
    import trl  # type: ignore[import-not-found]
except ImportError as error:
    sys.exit(
        f"{error}. The peer of this measurement is TRL, best in an environment of its own:\n"
        "    python -m venv trl-venv\n"
        "    trl-venv/bin/pip install -c constraints.txt -e . trl"
    )

WEIGHTS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Work:
    """One step: the first `questions` of the prompts, the next in the next step."""

    questions: int
    group_size: int
    new_tokens: int
    full: bool  # every completion has all its tokens, whatever the model would rather do
    passes: int = 1  # that the completions of one update are divided into


@dataclass(frozen=True)
class Steps:
    """Seconds of each step from the end of the one before; tokens of its completions; tokens of every prompt."""

    seconds: list[float]
    tokens: list[int]
    prompts: list[int]


class _Clock(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self.ends: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._now()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._now()

    def _now(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def run_steps(
    folder: Path, prompts: Sequence[str], work: Work, *, weights: str, computed: str, rate: float, device: str
) -> Steps:
    """As many steps as there are prompts for. Weights may be kept in another type than products have."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokens: list[int] = []

    def alternating(completion_ids: Sequence[Sequence[int]], **others: Any) -> list[float]:
        tokens.append(sum(len(ids) for ids in completion_ids))
        return [float(index % 2) for index in range(len(completion_ids))]

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    sequences = work.questions * work.group_size
    clock = _Clock(device == "cuda")
    with tempfile.TemporaryDirectory() as out:
        trainer = trl.GRPOTrainer(
            model=transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=WEIGHTS[weights]),
            args=trl.GRPOConfig(
                output_dir=out,
                use_cpu=device == "cpu",
                bf16=computed == "bfloat16",
                gradient_checkpointing=False,
                num_generations=work.group_size,
                per_device_train_batch_size=sequences // work.passes,
                gradient_accumulation_steps=work.passes,
                max_completion_length=work.new_tokens,
                generation_kwargs={"min_new_tokens": work.new_tokens} if work.full else None,
                num_iterations=1,
                beta=0.0,
                max_steps=len(prompts) // work.questions,
                shuffle_dataset=False,
                learning_rate=rate,
                lr_scheduler_type="constant",
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=datasets.Dataset.from_dict({"prompt": list(prompts)}),
            processing_class=tokenizer,
            reward_funcs=alternating,
            callbacks=[clock],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    seconds = [end - start for start, end in zip(clock.ends, clock.ends[1:], strict=False)]
    assert len(seconds) == len(tokens) == len(prompts) // work.questions, "one batch of completions a step"
    return Steps(seconds, tokens, [len(ids) for ids in tokenizer(list(prompts)).input_ids])
