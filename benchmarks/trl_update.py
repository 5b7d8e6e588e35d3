"""One update of this learner against one of TRL's GRPOTrainer, from the same weights, texts and rewards.

    python -m venv trl-venv
    trl-venv/bin/pip install -c constraints.txt -e . trl
    trl-venv/bin/python benchmarks/trl_update.py > trl_update.json

A table goes to stderr, JSON to stdout; the exit code is 1 if a bound fails. TRL is no dependency of the package: it is
needed here alone, hence the environment of its own. It takes about a minute of one CPU core.

Both start from the same float32 weights: pico, and a Llama, a GPT-2 and a Qwen3 of a few thousand random ones. Our
learner samples eight completions of each of four prompts of equal length; rewards are random, but the same within the
fourth group, so that one group without advantage is in the batch. TRL gets these token ids and rewards through its
`rollout_func`, which stands in for generation and may hand extra columns (here the rewards) to the reward function. All
else is TRL's own code: padding, advantages, log-probs, loss, clipping, AdamW without decay. A subclass only looks on.
A KL term has something to pull at because the reference is another model: the start with noise on every weight.

In an update the texts were sampled for, every ratio is 1: no clip can bind, and the losses differ in nothing but their
aggregation. So some cases make two updates from one batch (TRL's num_iterations=2; here each group is given twice and
MINIBATCHES is 2), and the second is compared, where the clip must decide over some tokens. Between the two our weights
are set to TRL's, to the last bit.

What is compared, and the bounds:

    logprobs   of every completion token: the largest difference                                         < 1e-4
    gradient   before clipping: norm of the difference by norm of TRL's gradient, at the worst tensor    < 1e-4
    moments    of Adam after the step, in the same way: the gradient as it is after clipping             < 1e-4
    step       our Adam, given TRL's gradients: difference of a weight's change by the learning rate,
               at the worst of all weights (beyond the last bit of the weight)                           < 1e-4
    off        share of weights whose whole change, each from its own gradient, differs by more than
               1e-4 of the learning rate (beyond the last bit); after one update only                    < 1 %

Why weights are not held to more in the last line: Adam's first step is -rate * g / (|g| + 1e-8), so of every gradient,
however small, it keeps the sign. Where a gradient is nothing but rounding (some are zero by symmetry: a bias of GPT-2's
keys changes no score) the two steps differ by up to twice the learning rate, as those of any two programs would that
sum in different order. `gradient` and `step` together say all that there is to say: the gradients are the same to 1e-4,
and the same gradients make the same weights.

Settings that mean the same:

    here                                        TRL
    AGGREGATE=token                             loss_type="dapo"; "bnpo" where the batch is one pass
    AGGREGATE=sequence                          loss_type="grpo"
    AGGREGATE=constant                          loss_type="dr_grpo", max_completion_length=MAX_NEW_TOKENS
    LOSS=gspo AGGREGATE=sequence                loss_type="grpo", importance_sampling_level="sequence"
    LOSS=cispo CLIP_HIGH=0.28                   loss_type="cispo", epsilon_high=1.28: the bound itself, and there is no
      CLIP_LOW=0.999999 AGGREGATE=token         lower one
    ADVANTAGE=std                               scale_rewards="group"
    ADVANTAGE=mean                              scale_rewards="none"
    KL_BETA                                     beta, use_bias_correction_kl=False
    MICRO_BATCH_TOKENS                          per_device_train_batch_size: neither changes the result

The last rows are where the two are known to differ though settings look alike. There the gradients must differ, within
the bounds in DIFFERENCES: this also shows that the comparison would see a mistake.

    std of small rewards       TRL divides by std + 1e-4, we by std + 1e-8. With rewards of 0 to 1 these are a few parts
                               in ten thousand of every advantage; elsewhere rewards are 0 to 1000, and it is nothing
    KL, bias-corrected         by default TRL multiplies the KL term by the ratio: adds KL * grad logp to the gradient
    CISPO, epsilon as clip     epsilon_high=0.28 is an upper bound of 0.28 in TRL: every ratio of 1 becomes 0.28
    bnpo in four passes        the mean of the passes' token means, so it depends on how the batch is cut
    prompts of unequal length  TRL pads them on the left and counts positions from the first padding on. Rotary ones are
                               relative, so Llama and Qwen do not notice (they are held to be equal, above); GPT-2 is
                               trained at other positions than it sampled at. Hence equal lengths everywhere else
    padding is sampled         transformers keeps the input embedding of config.json's pad_token_id free of gradient.
                               That matters only to a model that writes this token amid its text, as a random one does:
                               the tiny models of the other rows name none
    token against grpo         no convention, simply another loss
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_swarm import __version__
from rl_swarm.models import PICO_FOLDER
from rl_swarm.models.pico import write_tokenizer
from rl_swarm.policies.adam import StackedAdam
from rl_swarm.policies.batches import Padded
from rl_swarm.policies.engine import Learning
from rl_swarm.policies.families.parts import Weights
from rl_swarm.policies.learner import Learner
from rl_swarm.policies.stacked import StackedModels
from rl_swarm.policies.tokens import Tokens
from rl_swarm.tasks.arithmetic import Arithmetic
from rl_swarm.types import Question, RolloutGroup, ScoredGroup, Step

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func may change: the version is in the output
try:
    import datasets  # type: ignore[import-not-found]
    import transformers
    import trl  # type: ignore[import-not-found]
except ImportError as error:
    sys.exit(f"{error}. This needs TRL, best in an environment of its own:\n{(__doc__ or '').split('A table')[0]}")

QUESTIONS, GROUP_SIZE, NEW_TOKENS = 4, 8, 12
RATE, MAX_NORM, CLIP_LOW, CLIP_HIGH = 1e-3, 1.0, 0.2, 0.28
TOLERANCE, MOST_OFF = 1e-4, 0.01
DIFFERS, NOT_AS_KNOWN = "DIFFERS", "NOT THE KNOWN DIFFERENCE"
LARGE = 1000.0  # scale of rewards at which TRL's 1e-4 beside their deviation is nothing
NODE = "node"
VOCABULARY, CONTEXT = 52, 64

Texts = dict[tuple[int, ...], list[float]]


@dataclass(frozen=True)
class Case:
    name: str
    ours: Mapping[str, Any] = field(default_factory=dict)
    theirs: Mapping[str, Any] = field(default_factory=dict)
    updates: int = 1
    rewards: float = LARGE
    models: tuple[str, ...] = ("pico", "llama", "gpt2", "qwen3")
    unequal: bool = False  # prompts of several lengths
    known: tuple[float, float] | None = None  # the gradients must differ by something between these


GSPO = ({"loss": "gspo", "aggregate": "sequence"}, {"loss_type": "grpo", "importance_sampling_level": "sequence"})
CISPO = ({"loss": "cispo", "clip_low": 0.999999}, {"loss_type": "cispo", "epsilon_high": 1 + CLIP_HIGH})
NARROW = ({"clip_low": 0.02, "clip_high": 0.03}, {"epsilon": 0.02, "epsilon_high": 0.03})
IN_FOUR = {"per_device_train_batch_size": GROUP_SIZE, "gradient_accumulation_steps": QUESTIONS}
CASES = [
    Case("token = dapo", {}, {"loss_type": "dapo"}),
    Case("token = bnpo", {}, {"loss_type": "bnpo"}),
    Case("sequence = grpo", {"aggregate": "sequence"}, {"loss_type": "grpo"}),
    Case("constant = dr_grpo", {"aggregate": "constant"}, {"loss_type": "dr_grpo"}),
    Case("gspo", *GSPO),
    Case("cispo", *CISPO),
    Case("advantage mean = scale none", {"advantage": "mean"}, {"scale_rewards": "none"}, rewards=1.0),
    Case("KL 0.1", {"kl_beta": 0.1}, {"beta": 0.1, "use_bias_correction_kl": False}),
    Case("temperature 0.7", {"temperature": 0.7}, {"temperature": 0.7}),
    Case("in several passes", {"micro_batch_tokens": 200}, IN_FOUR),
    Case("prompts of unequal length", models=("pico", "llama", "qwen3"), unequal=True),
    Case("second update, token = dapo", {}, {"loss_type": "dapo"}, updates=2),
    Case("second update, gspo", GSPO[0] | NARROW[0], GSPO[1] | NARROW[1], updates=2),
    Case("second update, cispo", CISPO[0] | {"clip_high": 0.03}, CISPO[1] | {"epsilon_high": 1.03}, updates=2),
]
DIFFERENCES = [
    Case("std of small rewards", rewards=1.0, models=("pico",), known=(1e-4, 1e-3)),
    Case("KL, bias-corrected", {"kl_beta": 0.1}, {"beta": 0.1}, models=("pico",), known=(1e-3, 1.0)),
    # 1 / 0.28 - 1 = 2.571
    Case("CISPO, epsilon as clip", CISPO[0], {"loss_type": "cispo"}, models=("pico",), known=(2.57, 2.572)),
    Case("bnpo in four passes", {}, {"loss_type": "bnpo"} | IN_FOUR, models=("pico",), known=(1e-3, 1.0)),
    Case("prompts of unequal length", models=("gpt2",), unequal=True, known=(1e-2, 10.0)),
    Case("padding is sampled", models=("llama with padding",), known=(1e-3, 1.0)),
    Case("token against grpo", {}, {"loss_type": "grpo"}, models=("pico",), known=(1e-2, 10.0)),
]


# The models


def tiny_configs() -> dict[str, Any]:
    ends = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": None}
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    small = ends | size | {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "num_key_value_heads": 2}
    dry = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    gpt2 = {"vocab_size": VOCABULARY, "n_positions": CONTEXT, "n_embd": 16, "n_layer": 2, "n_head": 4}
    return {
        "llama": transformers.LlamaConfig(**small, tie_word_embeddings=False),
        "llama with padding": transformers.LlamaConfig(**small | {"pad_token_id": 0}, tie_word_embeddings=False),
        "gpt2": transformers.GPT2Config(**ends, **dry, **gpt2),
        "qwen3": transformers.Qwen3Config(**small, head_dim=8, tie_word_embeddings=True),
    }


def write_tiny(config: Any, folder: Path) -> Path:
    """Random weights, large enough that the distributions are far from uniform, and pico's tokenizer."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        start = parameter.detach() if parameter.dim() == 1 else torch.zeros(())
        parameter.data = start + 0.3 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_reference(start: Path, folder: Path) -> Path:
    """The same model with noise on every weight."""
    shutil.copytree(start, folder)
    generator = torch.Generator().manual_seed(1)
    noisy = {
        name: weight + 0.02 * torch.randn(weight.shape, generator=generator)
        for name, weight in load_file(start / "model.safetensors").items()
    }
    (folder / "model.safetensors").unlink()
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# What is learned from


def choose_questions(tokens: Tokens, unequal: bool) -> list[Question]:
    """Questions whose prompts all have one length in tokens, or each another: long ones, to which answers differ."""
    by_length: dict[int, dict[str, Question]] = {}
    for question in Arithmetic().sample(200, random.Random(0)):
        by_length.setdefault(len(tokens.encode_prompt(question.prompt)), {})[question.prompt] = question
    alike = [list(questions.values()) for _, questions in sorted(by_length.items())]
    if unequal:
        return [questions[0] for questions in alike[-QUESTIONS:]]
    return [questions for questions in alike if len(questions) >= QUESTIONS][-1][:QUESTIONS]


def scored_groups(learner: Learner, questions: Sequence[Question], scale: float) -> list[ScoredGroup]:
    rng = random.Random(1)
    answers = learner.generate({NODE: list(questions)}, GROUP_SIZE, {NODE: 0})[NODE]
    groups: list[ScoredGroup] = []
    for number, (question, rollouts) in enumerate(zip(questions, answers, strict=True)):
        rewards = [scale * rng.random() for _ in rollouts] if number + 1 < QUESTIONS else [scale] * GROUP_SIZE
        group = RolloutGroup(NODE, Step(0), str(number), question, rollouts)
        groups.append(ScoredGroup(group, tuple(rewards)))
    return groups


# One update of each


@dataclass(frozen=True)
class Outcome:
    """What the last update was made of and where it led; gradients and weights after each update."""

    logprobs: Texts
    gradients: list[Weights]
    weights: list[Weights]
    first: Weights
    second: Weights


class WatchedModels(StackedModels):
    """Ours, remembering what each update was made of. `given` weights replace those an update has led to."""

    def watch(self, given: Sequence[Weights]) -> None:
        self.seen_logprobs: Texts = {}
        self.seen_gradients: list[Weights] = []
        self.seen_weights: list[Weights] = []
        self._given = list(given)

    def logprobs(self, padded: Padded, temperature: float) -> tuple[Tensor, Tensor]:
        logp_KSC, entropy_KSC = super().logprobs(padded, temperature)
        if torch.is_grad_enabled():
            whole_1ST, _ = padded.whole(0)
            for s, length in enumerate(padded.real_KSC[0].sum(-1).int().tolist()):
                end = int(padded.lengths_KQ[0, s // padded.siblings]) + length
                self.seen_logprobs[tuple(whole_1ST[0, s, :end].tolist())] = logp_KSC[0, s, :length].tolist()
        return logp_KSC, entropy_KSC

    def step(self, active_K: Tensor, learning_rate: float, max_norm: float) -> tuple[Tensor, Tensor]:
        self.seen_gradients.append(self.gradients(0))
        found = super().step(active_K, learning_rate, max_norm)
        self.seen_weights.append(self.weights(0))
        if self._given:
            self.load_state(0, self.state(0) | {"weights": self._given.pop(0)})
        return found


def our_learner(start: Path, reference: Path, learning: Learning) -> tuple[Learner, WatchedModels]:
    """Opened on the reference, then brought to the start as by a checkpoint: the reference stays what it was."""
    models = WatchedModels(1, reference, learning, "cpu")
    models.load_state(0, StackedModels(1, start, learning, "cpu").state(0))
    return Learner([NODE], models, Tokens(start), learning), models


def our_update(
    learner: Learner, models: WatchedModels, groups: Sequence[ScoredGroup], theirs: Outcome
) -> tuple[Outcome, float]:
    """Also the share of tokens over which the clip decided in the last update."""
    updates = len(theirs.weights)
    models.watch(theirs.weights[:-1])
    # Groups are dealt out in turn over the minibatches: each one so many times is the whole batch for each update.
    row = learner.update({NODE: [group for group in groups for _ in range(updates)]})[NODE]
    state = models.state(0)
    outcome = Outcome(models.seen_logprobs, models.seen_gradients, models.seen_weights, state["first"], state["second"])
    return outcome, row["clip_fraction"] * updates  # a mean over all updates; the first has none


def replayed(start: Weights, gradients: Sequence[Weights]) -> Weights:
    """Where our Adam goes with these gradients."""
    adam = StackedAdam({name: weight[None].clone() for name, weight in start.items()})
    for one in gradients:
        adam.step(
            {name: gradient[None].clone() for name, gradient in one.items()}, torch.tensor([True]), RATE, MAX_NORM
        )
    return {name: weight[0] for name, weight in adam.weights.items()}


class WatchedTrainer(trl.GRPOTrainer):  # type: ignore[misc]
    """TRL's, remembering the same."""

    def watch(self) -> None:
        self.seen_logprobs: Texts = {}
        self.seen_gradients: dict[int, Weights] = {}
        self.seen_weights: dict[int, Weights] = {}  # with which an update begins

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """One pass forward and back: after an update's last one its gradients are complete, and not yet clipped."""
        loss = super().training_step(model, *args, **kwargs)
        update = self.state.global_step
        self.seen_weights[update] = weights_of(model)
        self.seen_gradients[update] = {name: one.grad.clone() for name, one in model.named_parameters()}
        return loss

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        found = super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )
        if torch.is_grad_enabled():
            for row, mask, logp in zip(input_ids, attention_mask.bool(), found[0], strict=True):
                real = mask[-logits_to_keep:]
                self.seen_logprobs[tuple(row[mask].tolist())] = logp[real].tolist()
        return found


def trl_update(start: Path, reference: Path, groups: Sequence[ScoredGroup], case: Case, out: Path) -> Outcome:
    tokens = Tokens(start)
    told = {one.group.question.prompt: list(zip(one.group.rollouts, one.rewards, strict=True)) for one in groups}

    def rollouts(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        """Each prompt comes as often as it has completions; they are handed out in order."""
        rows = [told[prompt].pop(0) for prompt in prompts]
        return {
            "prompt_ids": [tokens.encode_prompt(prompt) for prompt in prompts],
            "completion_ids": [list(rollout.token_ids or ()) for rollout, _ in rows],
            "logprobs": [list(rollout.logprobs or ()) for rollout, _ in rows],
            "verdict": [reward for _, reward in rows],
        }

    def looked_up(verdict: list[float], **others: Any) -> list[float]:
        return verdict

    # The trainer loads its reference from where the model says it is from.
    model = transformers.AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
    model.load_state_dict(load_file(start / "model.safetensors"), strict=False)
    model.tie_weights()
    settings: dict[str, Any] = {
        "output_dir": str(out),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_dropout": True,
        "num_generations": GROUP_SIZE,
        "per_device_train_batch_size": QUESTIONS * GROUP_SIZE,
        "gradient_accumulation_steps": 1,
        "max_completion_length": NEW_TOKENS,
        "mask_truncated_completions": False,
        "temperature": 1.0,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "beta": 0.0,
        "epsilon": CLIP_LOW,
        "epsilon_high": CLIP_HIGH,
        "num_iterations": case.updates,
        "max_steps": case.updates,
        "optim": "adamw_torch",
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": MAX_NORM,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    trainer = WatchedTrainer(
        model=model,
        args=trl.GRPOConfig(**settings | dict(case.theirs)),
        train_dataset=datasets.Dataset.from_dict({"prompt": list(told)}),
        processing_class=transformers.AutoTokenizer.from_pretrained(start),
        reward_funcs=looked_up,
        rollout_func=rollouts,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.watch()
    trainer.train()
    assert trainer.state.global_step == case.updates and not any(told.values()), "every completion was used once"
    moments = {name: trainer.optimizer.state[one] for name, one in trainer.model.named_parameters()}
    return Outcome(
        trainer.seen_logprobs,
        list(trainer.seen_gradients.values()),
        [*list(trainer.seen_weights.values())[1:], weights_of(trainer.model)],
        {name: state["exp_avg"] for name, state in moments.items()},
        {name: state["exp_avg_sq"] for name, state in moments.items()},
    )


def weights_of(model: Any) -> Weights:
    return {name: one.detach().clone() for name, one in model.named_parameters()}


# The comparison


@dataclass(frozen=True)
class Result:
    model: str
    case: str
    tokens: int  # compared: those of texts that differ
    clipped: float  # share of tokens over which the clip decided
    grad_norm: float
    logprobs: float
    gradient: float
    gradient_largest: float  # the largest single difference, by the norm of its tensor
    moments: float
    step: float
    weights_off: float
    change_largest: float  # the largest difference of a weight's change, by the largest change
    verdict: str


def worst(values: Iterable[Tensor | float]) -> float:
    """The largest; what is not a number is larger than any (Python's max would lose it)."""
    return float(torch.tensor([float(value) for value in values], dtype=torch.float64).max())


def apart(ours: Weights, theirs: Weights) -> float:
    """Norm of the difference by the norm of theirs, at the worst tensor."""
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    return worst((ours[name] - other).norm() / other.norm() for name, other in theirs.items())


def compare(model: str, case: Case, clipped: float, begun: Weights, ours: Outcome, theirs: Outcome) -> Result:
    # Completions without advantage need no pass here, so they may be on TRL's side only.
    assert ours.logprobs.keys() <= theirs.logprobs.keys(), "other texts"
    pairs = [pair for ids, said in ours.logprobs.items() for pair in zip(said, theirs.logprobs[ids], strict=True)]
    gradients, ended = theirs.gradients[-1], theirs.weights[-1]
    before = [begun, *theirs.weights][case.updates - 1]

    def beyond_last_bit(other: Weights) -> Tensor:
        """How far each weight is from TRL's, in learning rates."""
        spare = torch.finfo(torch.float32).eps
        return torch.cat([((other[name] - w).abs() - spare * w.abs()).flatten() for name, w in ended.items()]) / RATE

    differences = [(ours.weights[-1][name] - weight).abs().max() for name, weight in ended.items()]
    changes = [(weight - before[name]).abs().max() for name, weight in ended.items()]
    figures = {
        "logprobs": worst(abs(one - other) for one, other in pairs),
        "gradient": apart(ours.gradients[-1], gradients),
        "moments": worst([apart(ours.first, theirs.first), apart(ours.second, theirs.second)]),
        "step": worst([beyond_last_bit(replayed(begun, theirs.gradients)).max(), 0.0]),
    }
    off = float((beyond_last_bit(ours.weights[-1]) > TOLERANCE).float().mean())
    if case.known is not None:
        low, high = case.known
        verdict = "differs as it should" if low < figures["gradient"] < high else NOT_AS_KNOWN
    else:
        equal = all(value < TOLERANCE for value in figures.values())
        verdict = "equal" if equal and (clipped > 0 if case.updates > 1 else off < MOST_OFF) else DIFFERS
    return Result(
        model,
        case.name,
        tokens=len(pairs),
        clipped=clipped,
        grad_norm=float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm()),
        gradient_largest=worst(
            (ours.gradients[-1][name] - gradient).abs().max() / gradient.norm() for name, gradient in gradients.items()
        ),
        weights_off=off,
        change_largest=worst(differences) / worst(changes),
        verdict=verdict,
        **figures,
    )


def run_case(model: str, start: Path, reference: Path, case: Case, scratch: Path) -> Result:
    values: dict[str, Any] = {"learning_rate": RATE, "max_new_tokens": NEW_TOKENS, "max_grad_norm": MAX_NORM}
    values |= {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH, "minibatches": case.updates}
    learner, models = our_learner(start, reference, Learning(**values | dict(case.ours)))
    begun = models.weights(0)
    groups = scored_groups(learner, choose_questions(Tokens(start), case.unequal), case.rewards)
    theirs = trl_update(start, reference, groups, case, scratch)
    ours, clipped = our_update(learner, models, groups, theirs)
    return compare(model, case, clipped, begun, ours, theirs)


# The report


HEAD = ("norm", "clip", "logprobs", "gradient", "moments", "step", "off")
COLUMNS = "model  case                        {:>6} {:>5} {:>9} {:>9} {:>9} {:>9} {:>7}".format(*HEAD)


def line(result: Result) -> str:
    return (
        f"{result.model:6.6} {result.case:27} {result.grad_norm:6.3f} {result.clipped:5.0%} {result.logprobs:9.1e} "
        f"{result.gradient:9.1e} {result.moments:9.1e} {result.step:9.1e} {result.weights_off:7.2%}  {result.verdict}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    began, results = time.perf_counter(), list[Result]()
    print(COLUMNS, file=sys.stderr)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        starts = {"pico": PICO_FOLDER}
        starts |= {kind: write_tiny(config, scratch / kind) for kind, config in tiny_configs().items()}
        references = {model: write_reference(start, scratch / f"{model} reference") for model, start in starts.items()}
        for model, case in [(model, case) for model in starts for case in CASES if model in case.models] + [
            (case.models[0], case) for case in DIFFERENCES
        ]:
            results.append(run_case(model, starts[model], references[model], case, scratch / "out"))
            print(line(results[-1]), file=sys.stderr, flush=True)
    failed = [result for result in results if result.verdict in (DIFFERS, NOT_AS_KNOWN)]
    report = {
        "equal": not failed,
        "tolerance": TOLERANCE,
        "cases": [asdict(result) for result in results],
        "seconds": round(time.perf_counter() - began, 1),
        "threads": torch.get_num_threads(),
        "versions": {
            "rl-swarm": __version__,
            "trl": trl.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    print(json.dumps(report, indent=2))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
