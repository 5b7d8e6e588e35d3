"""How fast an update is, against the machine's rate of multiplying matrices: prints JSON.

    python benchmarks/training_rate.py [--model gpt2] [--nodes 8]
    python benchmarks/training_rate.py --model tiny --nodes 2 --questions 2 --prompt-tokens 8 --new-tokens 8 \\
        --matmul-side 512                                                                                # on a CPU

One Learner.update of all nodes: of each, 64 random sequences of 192 tokens, eight completions of 128 tokens for each
of eight prompts of 64; forward, backward and optimiser, from groups of token ids to moved weights, Python included.
Rewards alternate, so that no completion is left out.

Operations are counted as usual: 2 for each weight and token forward, twice that backward, so 6 times
(the weights of all layers × tokens + those of the head × completion tokens), and 12 times layers × width of all heads
for each pair of a token and one it may look at. Tokens that need a pass are a prompt's, once for all its completions,
and the completions'; `own_prompts` counts the same time as if each completion brought its own prompt, as most programs
compute it. Operations that are done twice to save memory count once. The share is of the measured rate of one large
bfloat16 product. Times are medians after warm-up; the peak of device memory is that of a timed update.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from shapes import (
    about,
    add_sizes,
    count_parameters,
    finish,
    free_device,
    learning,
    matmul_rate,
    median_seconds,
    model_folder,
    node_names,
    parse,
    random_groups,
    resident_peak_gb,
    say,
)

from rl_swarm.policies.reading import read_shape
from rl_swarm.policies.stacked import stacked_learner


def operations(folder: Path, args: argparse.Namespace, *, own_prompts: bool) -> float:
    """Of one update of all nodes."""
    shape, parameters = read_shape(folder), count_parameters(folder)
    prompt, new, sequences = args.prompt_tokens, args.new_tokens, args.questions * args.group_size
    prompts = sequences if own_prompts else args.questions
    whole = prompt + new
    before_prompt, before_all = prompt * (prompt + 1) / 2, whole * (whole + 1) / 2
    pairs = prompts * before_prompt + sequences * (before_all - before_prompt)
    multiplied = parameters.blocks * (prompts * prompt + sequences * new) + parameters.head * sequences * new
    return float(args.nodes * (6 * multiplied + 12 * shape.layers * shape.heads * shape.head_width * pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8)
    add_sizes(parser)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--matmul-side", type=int, default=8192, help="side of the matrices multiplied (8192)")
    parser.set_defaults(questions=8)
    args = parse(parser)
    rate = matmul_rate(args.device, args.matmul_side)
    say(f"{rate / 1e12:.2f} TFLOP/s multiplied")
    names, rows = node_names(args.nodes), list[dict[str, float]]()
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_folder(args.model, Path(scratch))
        settings = learning(
            args.new_tokens, args.dtype, args.micro_batch_tokens, checkpointed=args.gradient_checkpointing
        )
        learner = stacked_learner(names, folder, settings, args.device)
        vocabulary = read_shape(folder).vocabulary
        batches = {
            name: random_groups(
                name, args.questions, args.group_size, args.prompt_tokens, args.new_tokens, vocabulary, k
            )
            for k, name in enumerate(names)
        }
        free_device(args.device)
        seconds = median_seconds(
            lambda: rows.append(learner.update(batches)[names[0]]), args.device, args.warm_up, args.rounds
        )
        sequences = args.questions * args.group_size
        assert rows[-1]["trained_tokens"] == sequences * args.new_tokens, "every completion is learned from"

        def counted(*, own_prompts: bool) -> dict[str, Any]:
            flops = operations(folder, args, own_prompts=own_prompts) / seconds
            prompts = sequences if own_prompts else args.questions
            tokens = args.nodes * (prompts * args.prompt_tokens + sequences * args.new_tokens)
            return {
                "tokens": tokens,
                "tokens_a_second": round(tokens / seconds),
                "tflops": round(flops / 1e12, 3),
                "share_of_matmul": round(flops / rate, 3),
            }

        result = {
            "model": args.model,
            "seconds_an_update": round(seconds, 4),
            "needed_tokens": counted(own_prompts=False),
            "own_prompts": counted(own_prompts=True),
            "completion_tokens_a_second": round(args.nodes * sequences * args.new_tokens / seconds),
            "matmul_tflops": round(rate / 1e12, 2),
            "memory_backoffs": sum(row["memory_backoffs"] for row in rows),
            "device_peak_gib": round(rows[-1]["device_gib"], 2) if args.device == "cuda" else None,
            "resident_peak_gb": resident_peak_gb(),
            **about(folder),
        }
    finish(result, args)


if __name__ == "__main__":
    main()
