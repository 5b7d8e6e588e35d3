"""One node's round on one CPU thread, ours against TRL's GRPOTrainer, each in a process of its own: prints JSON.

    trl-venv/bin/python benchmarks/cpu_round.py --model FOLDER [--new-tokens 48] [--ours-only | --peer-only]
    python benchmarks/cpu_round.py --model tiny --new-tokens 8 --ours-only     # random weights, seconds

FOLDER is that of a real model (SmolLM2-135M, say); a name of a random shape will do for a trial. Both get the same four
questions of `gcd` and `chain_sum` a step, through the model's chat template where it has one, token for token; each
samples eight completions of at most 48 tokens of each and makes one update. Rewards alternate, so that every group has
something to teach. Completions end where the model ends them, so their numbers of tokens differ a little and are
reported. --full forces TRL's to the full length; ours ends where it ends.

A process loads the model (not timed), makes a first step, timed cold, then a second. Memory is the peak of the
resident set of the process, imports and loading included. TRL runs with float32 weights under autocast, its default,
which is also what ours does (float32 weights, products in bfloat16), and with everything in bfloat16. The completions
of an update go through TRL in four passes, which took it less time and half the memory of one pass; ours chooses its
own micro-batches. Ratios are TRL's number by ours: of seconds, of seconds per token sampled, of memory.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shapes import MODELS, RATE, finish, learning, model_folder, parse, resident_peak_gb, say, scored

from rl_swarm.policies.stacked import stacked_learner
from rl_swarm.policies.tokens import Tokens
from rl_swarm.tasks import open_tasks
from rl_swarm.types import Question

TASKS = "gcd,chain_sum"
NODE = "node"


def ask(args: argparse.Namespace) -> list[list[Question]]:
    """The questions of each step."""
    task, rng = open_tasks(TASKS, "easy"), random.Random(0)
    return [list(task.sample(args.questions, rng)) for _ in range(args.rounds)]


def our_steps(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    learner = stacked_learner([NODE], folder, learning(args.new_tokens, args.dtype, args.micro_batch_tokens), "cpu")
    steps = []
    for number, asked in enumerate(ask(args)):
        began = time.perf_counter()
        answers = learner.generate({NODE: asked}, args.group_size, {NODE: number})[NODE]
        sampled = time.perf_counter()
        learner.update({NODE: scored(NODE, asked, answers)})
        ended = time.perf_counter()
        steps.append(
            {
                "seconds": round(ended - began, 2),
                "seconds_generate": round(sampled - began, 2),
                "seconds_update": round(ended - sampled, 2),
                "tokens": sum(rollout.tokens for group in answers for rollout in group),
            }
        )
    tokens = Tokens(folder)
    prompts = [len(tokens.encode_prompt(question.prompt)) for asked in ask(args) for question in asked]
    return {"steps": steps, "prompt_tokens": prompts}


def peer_steps(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    from trl_peer import Work, run_steps

    tokens = Tokens(folder)
    texts = [
        tokens.chat.render(question.prompt, ()) if tokens.chat else question.prompt
        for asked in ask(args)
        for question in asked
    ]
    work = Work(args.questions, args.group_size, args.new_tokens, args.full, args.peer_passes)
    made = run_steps(folder, texts, work, weights=args.child, computed=args.dtype, rate=RATE, device="cpu")
    steps = [
        {"seconds": round(seconds, 2), "tokens": sampled}
        for seconds, sampled in zip(made.seconds, made.tokens, strict=True)
    ]
    return {"steps": steps, "prompt_tokens": made.prompts}


def run_child(child: str) -> dict[str, Any]:
    """The same command in a new process, which does one side alone and prints it."""
    say(f"{child} ...")
    command = [sys.executable, __file__, *sys.argv[1:], "--child", child]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    say(f"{child}: {found}")
    return found


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    assert ours["prompt_tokens"] == theirs["prompt_tokens"], "both read the same prompts"
    pairs = list(zip(ours["steps"], theirs["steps"], strict=True))

    def each(our: Any, their: Any) -> float:
        return float(round(their / our, 2))

    return {
        "seconds": [each(our["seconds"], their["seconds"]) for our, their in pairs],
        "seconds_per_token": [
            each(our["seconds"] / our["tokens"], their["seconds"] / their["tokens"]) for our, their in pairs
        ],
        "resident_peak": each(ours["resident_peak_gb"], theirs["resident_peak_gb"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help=f"a model's folder, or one of {', '.join(MODELS)}")
    parser.add_argument("--questions", type=int, default=4, help="of a step (4)")
    parser.add_argument("--group-size", type=int, default=8, help="completions of each question (8)")
    parser.add_argument("--new-tokens", type=int, default=48, help="tokens of a completion, at most (48)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="to compute in (bfloat16)")
    parser.add_argument("--micro-batch-tokens", type=int, help="tokens a training pass of ours (its own choice)")
    parser.add_argument("--rounds", type=int, default=2, help="steps, each reported (2)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--full", action="store_true", help="no completion of TRL's ends early")
    parser.add_argument("--peer-passes", type=int, default=4, help="passes of TRL's update (4)")
    parser.add_argument("--peer-weights", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument("--peer-only", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.set_defaults(device="cpu")
    args = parse(parser)
    if args.child:
        with tempfile.TemporaryDirectory() as scratch:
            folder = model_folder(args.model, Path(scratch)) if args.model in MODELS else Path(args.model)
            side = our_steps(folder, args) if args.child == "ours" else peer_steps(folder, args)
        print(json.dumps({**side, "resident_peak_gb": resident_peak_gb()}))
        return
    args.model = Path(args.model).name
    result: dict[str, Any] = {"model": args.model}
    if not args.peer_only:
        result["ours"] = run_child("ours")
    if not args.ours_only:
        result["trl"] = {weights: run_child(weights) for weights in args.peer_weights}
    if not (args.ours_only or args.peer_only):
        result["ratio"] = {weights: compare(result["ours"], theirs) for weights, theirs in result["trl"].items()}
    finish(result, args)


if __name__ == "__main__":
    main()
