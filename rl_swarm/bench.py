"""The engine's numbers on this machine: timed rounds of sampling and learning, and what the machine does at best.

The policy is opened as a host opens it and asked questions of the configured tasks. Rewards alternate within a group
instead of being earned, so that every group has something to teach. Left out: scoring, publishing and gathering, which
are the CPU's and the store's. Nothing is written.

The first round is the cold one: loading, torch's import included but no download, then kernels, graphs and compilation
as they are first needed. Figures are medians over the rounds after the warm-up; a rate is the median of the rounds'
own rates. The device is awaited before each look at the clock.
"""

from __future__ import annotations

import gc
import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from rl_swarm import __version__
from rl_swarm.errors import SettingsError
from rl_swarm.models.pools import AUTO, choose_model
from rl_swarm.policies import gpu_memory, learning_of, model_folder, open_policy
from rl_swarm.protocols import Policy, Task
from rl_swarm.randomness import named_rng, named_seed
from rl_swarm.settings import Settings
from rl_swarm.tasks import open_tasks
from rl_swarm.types import Question, Rollout, RolloutGroup, ScoredGroup, Step

if TYPE_CHECKING:
    from rl_swarm.policies.tokens import Tokens

GIB = 2**30
# A ceiling is measured for so many seconds and times, whichever is more. The copy is larger than any cache.
CEILING_SECONDS, CEILING_TIMES = 0.2, 3
COPY_BYTES = {"cuda": GIB, "mps": GIB // 4, "cpu": GIB // 4}
# Matrices are doubled until a product takes this long: the same work would be nothing to a GPU and for ever to a CPU.
SMALLEST_SIDE, LARGEST_SIDE, LONG_PRODUCT = 256, 8192, 0.01


@dataclass(frozen=True, slots=True)
class Round:
    """One round of all nodes: seconds, tokens of their completions, and what the update said of itself."""

    seconds: float
    generate: float
    update: float
    sampled_tokens: int
    trained_tokens: int
    prompt_tokens: float  # of a question, on average
    completion_tokens: float
    logprob_gap: float | None
    memory_backoffs: int
    device_gib: float | None


@dataclass(frozen=True, slots=True)
class Load:
    """Opening the policy: how long it took, what it says of itself, and where and in what type it computes."""

    seconds: float
    about: str
    devices: tuple[str, ...]
    dtype: str
    graphs: bool


def measure(settings: Settings, nodes: int, warm_up: int, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Time `rounds` rounds after `warm_up` others; `say` hears of progress. The result is ready to become JSON."""
    settings = _settled(settings, nodes, say)
    folder = model_folder(settings.model_name, settings.huggingface_access_token)
    load, all_rounds = _run(settings, folder, [f"node_{k}" for k in range(nodes)], warm_up, rounds, say)
    cold, timed = all_rounds[0], all_rounds[warm_up:]
    resident = _resident_gib()
    say("measuring what the machine can do")
    gaps = [one.logprob_gap for one in timed if one.logprob_gap is not None]
    on_device = [one.device_gib for one in timed if one.device_gib is not None]
    return {
        "run": {
            "model": settings.model_name,
            "policy": load.about,
            "nodes": nodes,
            "device": _device_name(load.devices[0]),
            "devices": len(load.devices),
            "threads": _threads(),
            "dtype": load.dtype,
            "tasks": settings.tasks,
            "questions": settings.num_train_samples,
            "group_size": settings.num_generations,
            "max_new_tokens": settings.max_new_tokens,
            "prompt_tokens": round(fmean(one.prompt_tokens for one in timed), 2),
            "completion_tokens": round(fmean(one.completion_tokens for one in timed), 2),
            "micro_batch_tokens": settings.micro_batch_tokens,
            "compile": settings.compile,
            "compiled": _has_compiled(),
            "cuda_graphs": load.graphs,
            "seed": settings.seed,
            "warm_up": warm_up,
            "rounds": rounds,
        },
        "first_round": {
            "seconds": round(load.seconds + cold.seconds, 6),
            "load": load.seconds,
            "generate": cold.generate,
            "update": cold.update,
        },
        "medians": {
            "seconds_a_round": round(median(one.seconds for one in timed), 6),
            "seconds_generate": round(median(one.generate for one in timed), 6),
            "seconds_update": round(median(one.update for one in timed), 6),
            "sampled_tokens_a_second": round(median(one.sampled_tokens / one.generate for one in timed), 1),
            "trained_tokens_a_second": round(median(one.trained_tokens / one.update for one in timed), 1),
        },
        "logprob_gap": max(gaps, default=None),
        "memory_backoffs": sum(one.memory_backoffs for one in timed),
        "peak_memory": {"device_gib": max(on_device)} if on_device else {"resident_gib": resident},
        "ceilings": _ceilings(load.devices[0], load.dtype),
        "rounds": [asdict(one) for one in timed],
        "versions": _versions(),
    }


def _settled(settings: Settings, nodes: int, say: Callable[[str], None]) -> Settings:
    """Settings that name a model which computes something."""
    if settings.model_name == "toy":
        raise SettingsError(
            "MODEL_NAME='toy' is not allowed here: it is no model, and its times say nothing; use pico, a folder or a "
            "Hub id."
        )
    if settings.model_name != AUTO:
        return settings
    choice = choose_model(gpu_memory(settings.device, nodes), settings.seed, "bench")
    say(choice.reason)
    return settings.model_copy(update={"model_name": choice.model})


# Rounds


@dataclass(frozen=True, slots=True)
class _Swarm:
    policy: Policy
    nodes: Sequence[str]
    task: Task
    tokens: Tokens
    settings: Settings
    devices: Sequence[str]

    def round(self, number: int) -> Round:
        settings, step = self.settings, Step(number)
        asked = {
            node: self.task.sample(settings.num_train_samples, named_rng(settings.seed, node, "questions", step))
            for node in self.nodes
        }
        seeds = {node: named_seed(settings.seed, node, "generate 0", step) for node in self.nodes}
        began = _now(self.devices)
        answers = self.policy.generate(asked, settings.num_generations, seeds)
        answered = _now(self.devices)
        batches = {node: _alternately_right(node, step, asked[node], answers[node]) for node in self.nodes}
        ready = _now(self.devices)
        rows = list(self.policy.update(batches).values())
        ended = _now(self.devices)

        prompts = [
            len(self.tokens.encode_prompt(question.prompt, question.examples))
            for questions in asked.values()
            for question in questions
        ]
        completions = [one.tokens for groups in answers.values() for group in groups for one in group]
        gaps = [row["logprob_gap"] for row in rows if math.isfinite(row.get("logprob_gap", math.nan))]
        held = [row["device_gib"] for row in rows if "device_gib" in row]
        return Round(
            seconds=round(ended - began, 6),
            generate=round(answered - began, 6),
            update=round(ended - ready, 6),
            sampled_tokens=sum(completions),
            trained_tokens=int(sum(row["trained_tokens"] for row in rows)),
            prompt_tokens=round(fmean(prompts), 2),
            completion_tokens=round(fmean(completions), 2),
            logprob_gap=round(max(gaps), 9) if gaps else None,
            memory_backoffs=int(max(row["memory_backoffs"] for row in rows)),
            device_gib=round(max(held), 3) if held else None,
        )


def _run(
    settings: Settings, folder: Path, nodes: Sequence[str], warm_up: int, rounds: int, say: Callable[[str], None]
) -> tuple[Load, list[Round]]:
    """Load and all rounds; the models are gone when it returns, so that what comes after has the machine to itself."""
    assert settings.tasks is not None, "filled in by settings.load"
    task = open_tasks(settings.tasks, settings.task_difficulty, settings.prompt_examples)
    say(f"loading {settings.model_name}")
    policy, load = _load(settings, folder, nodes)
    say(load.about)

    from rl_swarm.policies.tokens import Tokens

    tokens = Tokens(folder, chat=settings.chat_template == "auto")
    swarm = _Swarm(policy, nodes, task, tokens, settings, load.devices)
    done = []
    for number in range(warm_up + rounds):
        done.append(swarm.round(number))
        which = (
            f"warm-up {number + 1} of {warm_up}" if number < warm_up else f"round {number + 1 - warm_up} of {rounds}"
        )
        said = done[-1]
        say(f"{which}: {said.seconds:.3f} s, {said.generate:.3f} sampling and {said.update:.3f} updating")
    return load, done


def _load(settings: Settings, folder: Path, nodes: Sequence[str]) -> tuple[Policy, Load]:
    began = time.perf_counter()
    # By its folder: a model of the Hub is here by now, and would only be looked up once more.
    policy = open_policy(settings.model_copy(update={"model_name": str(folder)}), nodes)
    # Said by a host too, and it fits the passes to the memory there is.
    about = policy.about(settings.num_train_samples, 0, settings.num_generations)

    import torch

    from rl_swarm.policies.engine import kernels_run_on, pick_devices
    from rl_swarm.policies.reading import read_config, unsupported

    devices = tuple(pick_devices(settings.device, len(nodes)))
    seconds = round(_now(devices) - began, 6)
    stacked = not settings.lora_rank and not unsupported(read_config(folder))
    graphs = settings.cuda_graphs and stacked and kernels_run_on(torch.device(devices[0]))
    return policy, Load(seconds, about, devices, learning_of(settings, devices[0]).dtype, graphs)


def _alternately_right(
    node: str, step: Step, asked: Sequence[Question], answers: Sequence[tuple[Rollout, ...]]
) -> list[ScoredGroup]:
    """Every second completion is right, whatever it says: so no group is without advantages."""
    return [
        ScoredGroup(
            RolloutGroup(node, step, str(number), question, rollouts),
            tuple(float(index % 2) for index in range(len(rollouts))),
        )
        for number, (question, rollouts) in enumerate(zip(asked, answers, strict=True))
    ]


# The machine


def _now(devices: Sequence[str]) -> float:
    """The time when everything that was started on the devices is done."""
    import torch

    for device in devices:
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        elif device == "mps":
            torch.mps.synchronize()
    return time.perf_counter()


def _ceilings(device: str, dtype: str) -> dict[str, float | str]:
    """What one device does at best: bytes read and written by a copy, operations of a square matrix product."""
    import torch

    gc.collect()
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.empty_cache()
    size = COPY_BYTES[kind]
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * size / _median_seconds(lambda: target.copy_(source), device, CEILING_SECONDS)
    computed = torch.bfloat16 if dtype == "bfloat16" else torch.float32

    def product_seconds(side: int, least: float) -> float:
        left, right = (torch.randn(side, side, device=device).to(computed) for _ in range(2))
        return _median_seconds(lambda: torch.mm(left, right), device, least)

    side = SMALLEST_SIDE
    while side < LARGEST_SIDE and product_seconds(side, 0.0) < LONG_PRODUCT:
        side *= 2
    multiplied = 2 * side**3 / product_seconds(side, CEILING_SECONDS)
    return {
        "copy_gb_a_second": _significant(copied / 1e9),
        "matmul_tflops": _significant(multiplied / 1e12),
        "matmul_dtype": dtype,
        "matmul_side": side,
    }


def _median_seconds(action: Callable[[], object], device: str, least: float) -> float:
    action()
    taken: list[float] = []
    while len(taken) < CEILING_TIMES or sum(taken) < least:
        began = _now([device])
        action()
        taken.append(_now([device]) - began)
    return median(taken)


def _significant(value: float) -> float:
    return float(f"{value:.4g}")


def _device_name(device: str) -> str:
    import torch

    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(device))
    table = Path("/proc/cpuinfo")
    named = (
        [line for line in table.read_text().splitlines() if line.startswith("model name")] if table.is_file() else []
    )
    processor = named[0].partition(":")[2].strip() if named else platform.processor() or platform.machine()
    return f"{processor} ({device})"


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _resident_gib() -> float:
    """The most memory this process has had so far."""
    # Where there is this table: getrusage counts what the process had that this one was started from.
    entry = _entry(Path("/proc/self/status"), "VmHWM")
    if entry:
        return round(int(entry.split()[0]) * 1024 / GIB, 3)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB, 3)


def _entry(table: Path, name: str) -> str:
    """What one of Linux's tables says first under a name; nothing where there is no such table or name."""
    lines = table.read_text().splitlines() if table.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def _has_compiled() -> bool:
    """Whether anything was compiled, which COMPILE=auto leaves to the models."""
    if "torch._dynamo.utils" not in sys.modules:
        return False
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"] > 0


def _versions() -> dict[str, str]:
    found = {"rl-swarm": __version__, "python": platform.python_version()}
    for package in ("torch", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue  # triton is not for every machine
    return found
