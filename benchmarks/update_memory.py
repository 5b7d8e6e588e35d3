"""Peak device memory of one update of a model of Qwen2.5-0.5B's shape, against what it must hold anyway: prints JSON.

    python benchmarks/update_memory.py [--sequences 64] [--tokens 320] [--layers 24] [--micro-batch-tokens 8192]

Random weights of that shape (151,936 tokens, width 896, 24 layers), bfloat16 compute over float32 weights, Adam's
moments in float32. Every sequence is a prompt of 64 tokens and a completion for the rest. The promise: with gradient
checkpointing the peak stays under weights + optimiser + 4 GiB. Without a GPU it measures nothing and says so.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from shapes import CONFIGS, RATE, finish, random_groups, write_model

from rl_swarm.policies.engine import Learning
from rl_swarm.policies.learner import Learner
from rl_swarm.policies.memory import GIB, Work, estimate
from rl_swarm.policies.stacked import StackedModels
from rl_swarm.policies.tokens import Tokens

PROMPT, GROUP_SIZE = 64, 8


def measure(models: StackedModels, tokens: Tokens, args: argparse.Namespace, learning: Learning) -> dict[str, Any]:
    learner = Learner(["a"], models, tokens, learning)
    size = (args.sequences // GROUP_SIZE, GROUP_SIZE, PROMPT, args.tokens - PROMPT)
    batch = random_groups("a", *size, args.vocabulary)
    work = Work(args.sequences, args.sequences, args.tokens)
    assert learning.micro_batch_tokens is not None
    expected = estimate(models.counts(), work, None, learning.micro_batch_tokens)
    weights, optimiser = expected.held["weights"], expected.held["optimiser"]
    learner.update({"a": batch})
    began = time.perf_counter()
    row = learner.update({"a": batch})["a"]
    torch.cuda.synchronize()
    # An update reads the device's peak into its row and sets it back: what is asked for later is that of nothing.
    peak = row["device_gib"] * GIB
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
    parser.set_defaults(device="cuda")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no GPU here: nothing to measure.")
        return
    results = []
    with tempfile.TemporaryDirectory() as name:
        config = {
            **CONFIGS["qwen2.5-0.5b"],
            "vocab_size": args.vocabulary,
            "hidden_size": args.width,
            "intermediate_size": args.width * 4864 // 896,
            "num_hidden_layers": args.layers,
        }
        folder = write_model(config, Path(name))
        for checkpointed in (True, False):
            for tokens in args.micro_batch_tokens:
                learning = Learning(
                    RATE,
                    args.tokens - PROMPT,
                    dtype="bfloat16",
                    gradient_checkpointing=checkpointed,
                    micro_batch_tokens=tokens,
                )
                models = StackedModels(1, folder, learning, "cuda")
                results.append(measure(models, Tokens(folder), args, learning))
                del models
                torch.cuda.empty_cache()
    finish({"runs": results}, args)


if __name__ == "__main__":
    main()
