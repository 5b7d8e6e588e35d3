"""Peak device memory of one update of a model of Qwen2.5-0.5B's shape, against what it must hold anyway: prints JSON.

    python benchmarks/update_memory.py [--sequences 64] [--tokens 320] [--layers 24] [--micro-batch-tokens 8192]

Random weights of that shape (151,936 tokens, width 896, 24 layers), bfloat16 compute over float32 weights, Adam's
moments in float32. Every sequence is a prompt of 64 tokens and a completion for the rest. The promise: with gradient
checkpointing the peak stays under weights + optimiser + 4 GiB. Without a GPU it measures nothing and says so.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rl_swarm import __version__
from rl_swarm.models import PICO_FOLDER
from rl_swarm.policies.decoder import read_shape, weight_shapes
from rl_swarm.policies.engine import Learning
from rl_swarm.policies.learner import Learner
from rl_swarm.policies.memory import GIB, Work, estimate
from rl_swarm.policies.stacked import StackedModels
from rl_swarm.policies.tokens import Tokens
from rl_swarm.types import Question, QuestionName, Rollout, RolloutGroup, ScoredGroup, Step

PROMPT = 64


def write_model(folder: Path, layers: int, vocabulary: int, width: int) -> None:
    config = {
        "model_type": "qwen2",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": width * 4864 // 896,
        "num_hidden_layers": layers,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(size, generator=generator) * 0.02 if len(size) > 1 else torch.ones(size)
        for name, size in weight_shapes(read_shape(folder)).items()
    }
    save_file(weights, folder / "model.safetensors")


def groups(sequences: int, tokens: int, size: int) -> list[ScoredGroup]:
    """Own groups of eight random completions each, every one with an advantage."""
    rng = random.Random(0)
    made = []
    for number in range(sequences // 8):
        question = Question(QuestionName("none", "", 0, number), "1" * PROMPT, "")
        rollouts = tuple(
            Rollout("", tuple(rng.randrange(2, size) for _ in range(tokens - PROMPT)), truncated=True) for _ in range(8)
        )
        group = RolloutGroup("a", Step(0), str(number), question, rollouts)
        made.append(ScoredGroup(group, tuple(float(index % 2) for index in range(8))))
    return made


def measure(models: StackedModels, args: argparse.Namespace, learning: Learning) -> dict[str, Any]:
    learner = Learner(["a"], models, Tokens(PICO_FOLDER), learning)
    batch = groups(args.sequences, args.tokens, args.vocabulary)
    work = Work(args.sequences, args.sequences, args.tokens)
    assert learning.micro_batch_tokens is not None
    expected = estimate(models.counts(), work, None, learning.micro_batch_tokens)
    weights, optimiser = expected.held["weights"], expected.held["optimiser"]
    learner.update({"a": batch})
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    row = learner.update({"a": batch})["a"]
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    return {
        "gradient_checkpointing": learning.gradient_checkpointing,
        "micro_batch_tokens": learning.micro_batch_tokens,
        "weights_gib": round(weights / GIB, 2),
        "optimiser_gib": round(optimiser / GIB, 2),
        "peak_gib": round(peak / GIB, 2),
        "beyond_weights_and_optimiser_gib": round((peak - weights - optimiser) / GIB, 2),
        "estimated_peak_gib": round((sum(expected.held.values()) + sum(expected.training.values())) / GIB, 2),
        "seconds": round(time.perf_counter() - began, 2),
        "trained_tokens": row["trained_tokens"],
        "memory_backoffs": row["memory_backoffs"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=320)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--micro-batch-tokens", type=int, nargs="+", default=[8192, 2048])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no GPU here: nothing to measure.")
        return
    results = []
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), args.layers, args.vocabulary, args.width)
        for checkpointed in (True, False):
            for tokens in args.micro_batch_tokens:
                learning = Learning(
                    1e-6,
                    args.tokens - PROMPT,
                    dtype="bfloat16",
                    gradient_checkpointing=checkpointed,
                    micro_batch_tokens=tokens,
                )
                models = StackedModels(1, Path(name), learning, "cuda")
                results.append(measure(models, args, learning))
                del models
                torch.cuda.empty_cache()
    versions = {"rl-swarm": __version__, "torch": torch.__version__}
    print(json.dumps({"runs": results, "device": torch.cuda.get_device_name(), "versions": versions}, indent=1))


if __name__ == "__main__":
    main()
