"""What the measurements share: random models of known shapes, questions of a given length, clocks and ceilings.

Weights are random because only their shapes matter to time and memory. The tokenizer is pico's, one token a character,
so that a prompt has as many tokens as wished; its ids are within every vocabulary.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rl_swarm import __version__
from rl_swarm.models import PICO_FOLDER
from rl_swarm.models.pico import write_tokenizer
from rl_swarm.policies.engine import Learning
from rl_swarm.policies.memory import GIB
from rl_swarm.policies.reading import read_shape, weight_shapes
from rl_swarm.types import Question, QuestionName, Rollout, RolloutGroup, ScoredGroup, Step

# Too small for anything to move much; Adam steps by about this however small the gradient.
RATE = 1e-6
FIRST_ID = 5  # of the tokens that are neither padding nor an end

_ENDS = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": True}


def _llama(layers: int, width: int, heads: int, pairs: int, ffn: int, vocabulary: int, **others: Any) -> dict[str, Any]:
    return {
        **_ENDS,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": pairs,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 8192,
        **others,
    }


CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "tiny": _llama(2, 32, 4, 2, 64, 512),
    "1m": _llama(4, 128, 4, 4, 384, 2048),
    "5m": _llama(5, 256, 4, 4, 704, 4096),
    "25m": _llama(6, 512, 8, 8, 1376, 12_288),
    "gpt2": {
        **_ENDS,
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 50_257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "activation_function": "gelu_new",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "smollm2": _llama(30, 576, 9, 3, 1536, 49_152, rope_theta=100_000.0),
    "qwen2.5-0.5b": _llama(
        24,
        896,
        14,
        2,
        4864,
        151_936,
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=32_768,
    ),
}
MODELS = ("pico", *CONFIGS)
TABLES = (".wte.weight", ".wpe.weight", ".embed_tokens.weight")
LADDER = ("1m", "5m", "25m", "gpt2", "qwen2.5-0.5b")


def write_model(config: Mapping[str, Any], folder: Path) -> Path:
    """A Hugging Face folder of random weights, in half precision to be quick to write and read."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)

    def draw(name: str, size: tuple[int, ...]) -> torch.Tensor:
        if name.endswith(".bias"):
            return torch.zeros(size)
        return torch.randn(size, generator=generator) * 0.02 if len(size) > 1 else torch.ones(size)

    weights = {name: draw(name, size).bfloat16() for name, size in weight_shapes(read_shape(folder)).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)
    return folder


def model_folder(name: str, scratch: Path) -> Path:
    """The folder of one of MODELS, written on first use."""
    if name == "pico":
        return PICO_FOLDER
    folder = scratch / name
    return folder if (folder / "tokenizer_config.json").exists() else write_model(CONFIGS[name], folder)


@dataclass(frozen=True)
class Parameters:
    """The parameters of one model by their use. A table that is also the head counts as the head."""

    total: int
    blocks: int  # every layer and the norms: what each token of each pass is multiplied with
    head: int
    looked_up: int  # embeddings of tokens and positions that are not the head


def count_parameters(folder: Path) -> Parameters:
    shape = read_shape(folder)
    sizes = {name: torch.Size(size).numel() for name, size in weight_shapes(shape).items()}
    tables = sum(
        size for name, size in sizes.items() if name.endswith((".wte.weight", ".wpe.weight", "_tokens.weight"))
    )
    head = shape.vocabulary * shape.width
    total = sum(sizes.values())
    looked_up = tables - head if shape.tied else tables
    return Parameters(total, total - head - looked_up, head, looked_up)


# Questions and groups


def node_names(count: int) -> list[str]:
    return [f"node_{number}" for number in range(count)]


def questions(count: int, tokens: int, seed: int) -> list[Question]:
    """Questions of so many tokens each, every one another: digits, each of which is a token of pico's tokenizer."""
    rng = random.Random(seed)
    texts = ["".join(rng.choices("0123456789", k=tokens)) for _ in range(count)]
    return [Question(QuestionName("none", "", seed, number), text, "") for number, text in enumerate(texts)]


def scored(node: str, asked: Sequence[Question], answers: Sequence[tuple[Rollout, ...]]) -> list[ScoredGroup]:
    """Every group is informative: each second completion is right."""
    made = []
    for number, (question, rollouts) in enumerate(zip(asked, answers, strict=True)):
        group = RolloutGroup(node, Step(0), str(number), question, rollouts)
        made.append(ScoredGroup(group, tuple(float(index % 2) for index in range(len(rollouts)))))
    return made


def random_groups(
    node: str, count: int, size: int, prompt: int, completion: int, vocabulary: int, seed: int = 0
) -> list[ScoredGroup]:
    """Groups of random completions that never end, without having a model write them."""
    rng = random.Random(seed)

    def rollout() -> Rollout:
        return Rollout("", tuple(rng.choices(range(FIRST_ID, vocabulary), k=completion)), truncated=True)

    asked = questions(count, prompt, seed)
    return scored(node, asked, [tuple(rollout() for _ in range(size)) for _ in asked])


def learning(
    new_tokens: int, dtype: str, micro_batch_tokens: int | None = None, *, checkpointed: bool = False
) -> Learning:
    return Learning(
        RATE,
        new_tokens,
        dtype=dtype,
        micro_batch_tokens=micro_batch_tokens,
        gradient_checkpointing=checkpointed,
    )


# Clocks and machines


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def clock(into: list[float], device: str) -> Iterator[None]:
    """Append the seconds the body takes, with everything it has started on the device."""
    synchronize(device)
    began = time.perf_counter()
    yield
    synchronize(device)
    into.append(time.perf_counter() - began)


def median_seconds(action: Callable[[], object], device: str, warm_up: int, times: int) -> float:
    taken: list[float] = []
    for _ in range(warm_up + times):
        with clock(taken, device):
            action()
    return statistics.median(taken[warm_up:])


def bandwidth(device: str, size: int) -> float:
    """Bytes a second that a copy within the device's memory moves: those read and those written."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_seconds(lambda: target.copy_(source), device, 3, 10)


def matmul_rate(device: str, side: int) -> float:
    """Floating-point operations a second of a product of two square bfloat16 matrices."""
    left, right = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    return 2 * side**3 / median_seconds(lambda: torch.mm(left, right, out=out), device, 3, 10)


def free_device(device: str) -> None:
    """Give back what dropped models held, so that the next one is measured alone."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def device_peak_gib(device: str) -> float | None:
    """The most that was in use on the device since it was last asked from zero; None on a CPU.

    Learner.update() asks itself, for its row, and begins anew: what it saw is the row's `device_gib`.
    """
    return round(torch.cuda.max_memory_allocated() / GIB, 2) if device == "cuda" else None


def resident_peak_gb() -> float:
    """The most memory this process has ever had, in GB of 10^9 bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9, 2)


def machine(device: str) -> str:
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    return f"{platform.machine()} CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads used"


def versions() -> dict[str, str]:
    found = {"rl-swarm": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "trl"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            pass
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def finish(result: Mapping[str, Any], args: argparse.Namespace) -> None:
    """The result as one JSON object, with what it was measured on and the sizes asked for."""
    described = {"device": machine(args.device), "sizes": sizes(args), "versions": versions()}
    print(json.dumps({**result, **described}, indent=1))


def sizes(args: argparse.Namespace) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}


def about(folder: Path) -> dict[str, Any]:
    """A model's shape, for the result."""
    return {"shape": asdict(read_shape(folder)), "parameters": asdict(count_parameters(folder))}


def add_sizes(parser: argparse.ArgumentParser, *, model: bool = True) -> None:
    """The options every measurement has."""
    if model:
        parser.add_argument("--model", choices=MODELS, default="gpt2", help="shape of the random weights (gpt2)")
    parser.add_argument("--questions", type=int, default=4, help="questions a node asks (4)")
    parser.add_argument("--group-size", type=int, default=8, help="completions of each question (8)")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens of each completion (128)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="to compute in (bfloat16)")
    parser.add_argument("--micro-batch-tokens", type=int, help="tokens a training pass (the learner's own choice)")
    parser.add_argument("--warm-up", type=int, default=3, help="runs before the timed ones (3)")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs, of which the median counts (5)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU (1)")


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(args.threads)
    return args
