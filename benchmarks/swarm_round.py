"""A whole round of a swarm on one machine against TRL's GRPOTrainer node after node, in one run: prints JSON.

    python benchmarks/swarm_round.py [--model gpt2] [--nodes 8] [--rounds 5] [--skip-peer]
    python benchmarks/swarm_round.py --model tiny --nodes 2 --prompt-tokens 8 --new-tokens 8 --rounds 2   # on a CPU

Ours: each of the nodes samples eight completions of each of four questions of 64 tokens with Learner.generate, 128 new
tokens each, and makes one Learner.update from them, all nodes as one program. Random weights hardly ever write the
end-of-text token, so completions are full; `full_completions` says what share was. Rewards alternate, so that every
group has something to teach. Left out: scoring, publishing and gathering, which are the CPU's and the store's.

TRL: a trainer of the same weights does the same work for one node, one step after the other, generation by
transformers without vLLM, lengths forced to be full. A swarm of it takes `nodes` times as long. It is measured with
float32 weights under autocast (TRL's default; ours too keeps float32 weights and computes in bfloat16) and with
everything in bfloat16, which does not learn at small learning rates but is quicker; `ratio` is to the quicker of them.

Times are medians after warm-up, the device awaited before each look at the clock. The peak of device memory is that of
a timed round; on a CPU only the peak of the whole process is known. TRL is needed unless --skip-peer.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from shapes import (
    RATE,
    about,
    add_sizes,
    clock,
    device_peak_gib,
    finish,
    free_device,
    learning,
    model_folder,
    node_names,
    parse,
    questions,
    resident_peak_gb,
    say,
    scored,
)

from rl_swarm.policies.stacked import stacked_learner


def our_rounds(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    names = node_names(args.nodes)
    learner = stacked_learner(
        names, folder, learning(args.new_tokens, args.dtype, args.micro_batch_tokens), args.device
    )
    free_device(args.device)
    generating: list[float] = []
    updating: list[float] = []
    whole: list[float] = []
    rows: list[dict[str, float]] = []
    lengths: list[int] = []
    for number in range(args.warm_up + args.rounds):
        seeds = {name: number * args.nodes + k for k, name in enumerate(names)}
        asked = {name: questions(args.questions, args.prompt_tokens, seed) for name, seed in seeds.items()}
        with clock(whole, args.device):
            with clock(generating, args.device):
                answers = learner.generate(asked, args.group_size, seeds)
            batches = {name: scored(name, asked[name], answers[name]) for name in names}
            with clock(updating, args.device):
                rows.append(learner.update(batches)[names[0]])
        if number >= args.warm_up:
            lengths += [rollout.tokens for node in answers.values() for group in node for rollout in group]
        say(f"ours, round {number}: {generating[-1]:.3f} s sampling, {updating[-1]:.3f} s updating")
    tokens = sum(lengths) / args.rounds
    seconds, timed = statistics.median(whole[args.warm_up :]), rows[args.warm_up :]
    sampling = statistics.median(generating[args.warm_up :])
    return {
        "seconds_a_round": round(seconds, 4),
        "seconds_generate": round(sampling, 4),
        "seconds_update": round(statistics.median(updating[args.warm_up :]), 4),
        "slowest_round": round(max(whole[args.warm_up :]), 4),
        "first_round": round(whole[0], 2),
        "tokens_a_round": round(tokens),
        "tokens_a_second": round(tokens / seconds),
        "sampled_tokens_a_second": round(tokens / sampling),
        "full_completions": round(sum(length == args.new_tokens for length in lengths) / len(lengths), 4),
        "trained_tokens_of_a_node": timed[-1]["trained_tokens"],
        "memory_backoffs": sum(row["memory_backoffs"] for row in timed),
        "device_peak_gib": round(max(row["device_gib"] for row in timed), 2) if args.device == "cuda" else None,
    }


def peer_steps(folder: Path, weights: str, args: argparse.Namespace) -> dict[str, Any]:
    from trl_peer import Work, run_steps

    free_device(args.device)
    prompts = [
        question.prompt
        for number in range(args.warm_up + args.rounds)
        for question in questions(args.questions, args.prompt_tokens, number)
    ]
    work = Work(args.questions, args.group_size, args.new_tokens, full=True)
    steps = run_steps(folder, prompts, work, weights=weights, computed=args.dtype, rate=RATE, device=args.device)
    assert set(steps.prompts) == {args.prompt_tokens}, "prompts are of the length asked for"
    seconds, tokens = steps.seconds[args.warm_up :], statistics.fmean(steps.tokens[args.warm_up :])
    say(f"TRL, {weights} weights: {[round(one, 3) for one in steps.seconds]} s")
    return {
        "weights": weights,
        "seconds_a_step": round(statistics.median(seconds), 4),
        "seconds_a_round_of_the_swarm": round(statistics.median(seconds) * args.nodes, 4),
        "tokens_a_step": round(tokens),
        "tokens_a_second": round(tokens / statistics.median(seconds)),
        "device_peak_gib": device_peak_gib(args.device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8)
    add_sizes(parser)
    parser.add_argument("--skip-peer", action="store_true", help="measure ours alone; TRL need not be there")
    parser.add_argument(
        "--peer-weights", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"], help="(both)"
    )
    args = parse(parser)
    if not args.skip_peer:
        import trl_peer  # noqa: F401 to say now, not after the measurement, that it is missing
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_folder(args.model, Path(scratch))
        ours = our_rounds(folder, args)
        result: dict[str, Any] = {"model": args.model, "ours": ours}
        if not args.skip_peer:
            result["trl"] = [peer_steps(folder, weights, args) for weights in args.peer_weights]
            quickest = min(one["seconds_a_round_of_the_swarm"] for one in result["trl"])
            result["ratio"] = round(quickest / ours["seconds_a_round"], 2)
        result |= {"resident_peak_gb": resident_peak_gb(), **about(folder)}
    finish(result, args)


if __name__ == "__main__":
    main()
