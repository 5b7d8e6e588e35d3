"""Sampling: ours against transformers' generate, and against the fewest bytes it could move. Prints JSON.

    python benchmarks/generation.py [--models gpt2 smollm2 qwen2.5-0.5b] [--nodes 1 8] [--skip-peer]
    python benchmarks/generation.py --models tiny --nodes 1 2 --prompt-tokens 8 --new-tokens 8 --rounds 2 \\
        --copy-mib 64 --matmul-side 512                                                                  # on a CPU

The work: 32 sequences of 128 new tokens for each node, eight of each of four prompts of 64 tokens, at temperature 1.
Ours is Learner.generate, from texts to texts with log-probs, for each number of nodes. With one node it is compared
with transformers' generate on the same weights and prompts, with its default cache and with the static cache, for
which transformers compiles the decoding step (on a GPU; the first call takes a minute and is not timed). There no token
ends a text, so that every completion is full; ours ends at the end-of-text token, which random weights hardly ever
write, and `full_completions` says what share was full.

The floor is what a step of decoding cannot do without: reading every weight once in bfloat16 (of an embedding that is
not also the head only a few rows are looked up, which count for nothing) and the keys and values of all positions
before it, on average over the steps. They are counted once for each sequence and, as the other floor, with those of a
prompt once for all its completions. Bytes by the bandwidth of a large copy within the device's memory, measured in the
same run (bytes read and written), is the floor's time. A step's actual time is that of generating all tokens less that
of generating one, by the steps between; `share` is floor by actual.

Times are medians after warm-up. The bfloat16 rate of a large matrix product is measured too, to know the machine by.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from shapes import (
    MODELS,
    about,
    add_sizes,
    bandwidth,
    count_parameters,
    device_peak_gib,
    finish,
    free_device,
    learning,
    matmul_rate,
    median_seconds,
    model_folder,
    node_names,
    parse,
    questions,
    resident_peak_gb,
    say,
)

from rl_swarm.policies.learner import Learner
from rl_swarm.policies.reading import read_shape
from rl_swarm.policies.stacked import StackedModels
from rl_swarm.policies.tokens import Tokens

BYTES = 2  # of a bfloat16 number


def floor_bytes(folder: Path, nodes: int, args: argparse.Namespace) -> tuple[float, float]:
    """Bytes one step of decoding must read, keys and values per sequence, and with those of a prompt once."""
    shape, parameters = read_shape(folder), count_parameters(folder)
    weights = BYTES * (parameters.blocks + parameters.head)
    entry = BYTES * 2 * shape.layers * shape.kv_heads * shape.head_width
    sequences = args.questions * args.group_size
    # The first new token comes from the prompt alone; the step that reads token c looks at c new positions.
    new = sum(range(1, args.new_tokens)) / (args.new_tokens - 1)
    each = weights + entry * sequences * (args.prompt_tokens + new)
    shared = weights + entry * (args.questions * args.prompt_tokens + sequences * new)
    return nodes * each, nodes * shared


def measure_ours(folder: Path, nodes: int, speed: float, args: argparse.Namespace) -> dict[str, Any]:
    names, settings = node_names(nodes), learning(args.new_tokens, args.dtype)
    models, tokens = StackedModels(nodes, folder, settings, args.device), Tokens(folder)
    asked = {name: questions(args.questions, args.prompt_tokens, k) for k, name in enumerate(names)}
    free_device(args.device)
    lengths: list[int] = []

    def seconds(new_tokens: int) -> float:
        learner = Learner(names, models, tokens, replace(settings, max_new_tokens=new_tokens))
        seeds = dict.fromkeys(names, 0)

        def generate() -> None:
            for name in names:
                seeds[name] += 1
            answers = learner.generate(asked, args.group_size, seeds)
            lengths[:] = [rollout.tokens for node in answers.values() for group in node for rollout in group]

        return median_seconds(generate, args.device, args.warm_up, args.rounds)

    prefill = seconds(1)
    whole = seconds(args.new_tokens)
    step = (whole - prefill) / (args.new_tokens - 1)
    count = nodes * args.questions * args.group_size * args.new_tokens
    each, shared = floor_bytes(folder, nodes, args)
    say(f"{folder.name}, ours, {nodes} nodes: {whole:.4f} s, {1000 * step:.3f} ms a step")
    return {
        "nodes": nodes,
        "seconds": round(whole, 4),
        "tokens_a_second": round(count / whole),
        "seconds_prefill": round(prefill, 4),
        "milliseconds_a_step": round(1000 * step, 4),
        "full_completions": round(sum(length == args.new_tokens for length in lengths) / len(lengths), 4),
        "floor": {
            "cache_per_sequence": {
                "mb_a_step": round(each / 1e6, 1),
                "milliseconds": round(1000 * each / speed, 4),
                "share": round(each / speed / step, 3),
            },
            "prompt_once_per_question": {
                "mb_a_step": round(shared / 1e6, 1),
                "milliseconds": round(1000 * shared / speed, 4),
                "share": round(shared / speed / step, 3),
            },
        },
        "device_peak_gib": device_peak_gib(args.device),
    }


def measure_transformers(folder: Path, cache: str | None, args: argparse.Namespace) -> dict[str, Any]:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch._dynamo.reset()
    dtype = torch.bfloat16 if args.dtype == "bfloat16" else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(args.device).eval()
    model.generation_config.eos_token_id = None
    tokens = Tokens(folder)
    prompts = [tokens.encode_prompt(one.prompt) for one in questions(args.questions, args.prompt_tokens, 0)]
    ids = torch.tensor(prompts, device=args.device).repeat_interleave(args.group_size, 0)
    free_device(args.device)
    chosen = {} if cache is None else {"cache_implementation": cache}

    def generate() -> None:
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=args.new_tokens,
            pad_token_id=0,
            **chosen,
        )
        assert out.shape[1] == args.prompt_tokens + args.new_tokens, "every completion is full"

    seconds = median_seconds(generate, args.device, args.warm_up, args.rounds)
    say(f"{folder.name}, transformers, {cache or 'default'} cache: {seconds:.4f} s")
    return {
        "cache": cache or "default",
        "seconds": round(seconds, 4),
        "tokens_a_second": round(len(ids) * args.new_tokens / seconds),
        "device_peak_gib": device_peak_gib(args.device),
    }


def measure(folder: Path, speed: float, args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {
        "model": folder.name,
        "ours": [measure_ours(folder, nodes, speed, args) for nodes in args.nodes],
    }
    if not args.skip_peer:
        result["transformers"] = [measure_transformers(folder, cache, args) for cache in (None, "static")]
        single = [one for one in result["ours"] if one["nodes"] == 1]
        for peer in result["transformers"] if single else []:
            peer["ratio"] = round(peer["seconds"] / single[0]["seconds"], 2)
    return {**result, **about(folder)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gpt2", "smollm2", "qwen2.5-0.5b"])
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 8])
    add_sizes(parser, model=False)
    parser.add_argument("--skip-peer", action="store_true", help="measure ours alone")
    parser.add_argument("--copy-mib", type=int, default=4096, help="size of the copy that measures bandwidth (4096)")
    parser.add_argument("--matmul-side", type=int, default=8192, help="side of the matrices multiplied (8192)")
    args = parse(parser)
    speed = bandwidth(args.device, args.copy_mib * 2**20)
    rate = matmul_rate(args.device, args.matmul_side)
    free_device(args.device)
    say(f"{speed / 1e12:.3f} TB/s copied, {rate / 1e12:.2f} TFLOP/s multiplied")
    with tempfile.TemporaryDirectory() as scratch:
        found = [measure(model_folder(name, Path(scratch)), speed, args) for name in args.models]
    result = {
        "copy_tb_a_second": round(speed / 1e12, 3),
        "matmul_tflops": round(rate / 1e12, 2),
        "models": found,
        "resident_peak_gb": resident_peak_gb(),
    }
    finish(result, args)


if __name__ == "__main__":
    main()
