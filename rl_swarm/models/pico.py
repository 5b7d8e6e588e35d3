"""The embedded model and the recipe that made it.

    python -m rl_swarm.models.pico make --out FOLDER      supervised start on the arithmetic task, seeded
    python -m rl_swarm.models.pico measure [--model M]    what it can do: reward by kind, answer tags, untagged skill

Pico is a Llama-shaped decoder of 0.9 million parameters that reads characters (an answer tag is one token). Its folder
is an ordinary Hugging Face folder. The recipe teaches it arithmetic but lets it use the answer tags in few lines only:
skill without format, which is where pretrained models start too, so its first rewards are low and there is much that
reinforcement learning can gain. Held-out questions are never shown.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from rl_swarm.models import PICO_FOLDER
from rl_swarm.policies import sampling
from rl_swarm.policies.decoder import forward
from rl_swarm.policies.families.parts import Shape, Weights
from rl_swarm.policies.layout import parted, stack
from rl_swarm.policies.logprobs import token_logprobs
from rl_swarm.policies.reading import read_shape, read_weights, weight_shapes
from rl_swarm.policies.tokens import Tokens
from rl_swarm.tasks.arithmetic import KINDS, Arithmetic
from rl_swarm.tasks.text import CLOSE, OPEN

WIDTH, LAYERS, HEADS, FFN, CONTEXT = 128, 4, 4, 384, 128
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz+-*/%(),=. "
PAD, END, UNKNOWN = "<pad>", "<eos>", "<unk>"


def write_tokenizer(folder: Path) -> int:
    """A tokenizer of single characters; returns the size of its vocabulary."""
    tokens = [PAD, END, UNKNOWN, OPEN, CLOSE, *CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({token: id for id, token in enumerate(tokens)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (PAD, END, UNKNOWN)])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in (OPEN, CLOSE)])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": PAD,
            "unk_token": UNKNOWN,
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
        },
    )
    return len(tokens)


def write_config(folder: Path, vocabulary: int) -> None:
    _write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": vocabulary,
            "hidden_size": WIDTH,
            "intermediate_size": FFN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "head_dim": WIDTH // HEADS,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": CONTEXT,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": 1,
            "pad_token_id": 0,
            "torch_dtype": "float32",
        },
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def initial_weights(shape: Shape, seed: int) -> Weights:
    """Normal of deviation 0.02, the layers that write into the residual stream scaled down by depth; norms are one."""
    generator = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for name, size in weight_shapes(shape).items():
        if len(size) == 1:
            weights[name] = torch.ones(size)
            continue
        deviation = 0.02 / math.sqrt(2 * shape.layers) if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        weights[name] = torch.randn(size, generator=generator) * deviation
    return weights


def lines(tokens: Tokens, seed: int, tag_rate: float) -> Iterator[tuple[list[int], list[int]]]:
    """Question and answer as token ids, for ever: the answer in tags in a `tag_rate` share of lines."""
    rng, task = random.Random(seed), Arithmetic()
    while True:
        for question in task.sample(64, rng):
            answer = f"{OPEN}{question.answer}{CLOSE}" if rng.random() < tag_rate else question.answer
            yield tokens.encode(question.prompt), [*tokens.encode(answer), tokens.end]


def make(out: Path, seed: int, steps: int, batch: int, rate: float, tag_rate: float, device: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_config(out, write_tokenizer(out))
    shape, tokens = read_shape(out), Tokens(out)
    weights = {name: w.to(device).requires_grad_() for name, w in stack(shape, initial_weights(shape, seed), 1).items()}
    adam = torch.optim.AdamW(weights.values(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01, fused=device != "cpu")
    warmup = max(1, steps // 30)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        adam, lambda s: min((s + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * min(1.0, s / steps)))
    )
    source, start = lines(tokens, seed, tag_rate), time.perf_counter()
    for step in range(steps):
        rows = [next(source) for _ in range(batch)]
        length = max(len(prompt) + len(answer) for prompt, answer in rows)
        ids = torch.zeros(1, batch, length, dtype=torch.long)
        real = torch.zeros(1, batch, length - 1)
        for s, (prompt, answer) in enumerate(rows):
            ids[0, s, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            real[0, s, len(prompt) - 1 : len(prompt) + len(answer) - 1] = 1.0
        ids, real = ids.to(device), real.to(device)
        positions = torch.arange(length - 1, device=device).expand(1, batch, length - 1)
        scores = forward(shape, weights, ids[:, :, :-1], positions)
        logp, _ = token_logprobs(scores, ids[:, :, 1:], 1.0)
        loss = -(logp * real).sum() / real.sum()
        adam.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        adam.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            print(
                f"step {step + 1:5d} of {steps}  loss {loss.item():.4f}  {time.perf_counter() - start:.0f} s",
                flush=True,
            )
    save_file(
        {
            name: weight.contiguous()
            for name, weight in parted(shape, {name: one[0].detach().cpu() for name, one in weights.items()}).items()
        },
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    recipe = {
        "seed": seed,
        "steps": steps,
        "batch": batch,
        "rate": rate,
        "tag_rate": tag_rate,
        "torch": torch.__version__,
    }
    _write_json(out / "recipe.json", recipe)


def measure(folder: Path, questions: int, device: str) -> None:
    """Held-out questions, one sampled answer each (temperature 1), for every kind."""
    shape, tokens = read_shape(folder), Tokens(folder)
    weights = {name: weight.to(device) for name, weight in stack(shape, read_weights(folder, shape), 1).items()}
    print(f"{'kind':12} reward  tagged  skill (tags or not)")
    rewards: list[float] = []
    for kind in KINDS:
        task = Arithmetic([kind])
        asked = task.sample(questions, random.Random(0), held_out=True)
        prompts = [[tokens.encode(question.prompt) for question in asked]]
        uniform = sampling.draws([0], questions, 16)
        sampled = sampling.sample(shape, weights, prompts, uniform, ends=tokens.ends, temperature=1.0, top_p=1.0)
        texts = [
            tokens.decode(ids[:length])
            for ids, length in zip(sampled.ids_KSC[0].tolist(), sampled.lengths_KS[0].tolist(), strict=True)
        ]
        reward = sum(map(task.score, asked, texts)) / questions
        tagged = sum(text.startswith(OPEN) for text in texts) / questions
        bare = [text.replace(OPEN, "").replace(CLOSE, "") for text in texts]
        skill = sum(text == question.answer for text, question in zip(bare, asked, strict=True)) / questions
        rewards.append(reward)
        print(f"{kind:12} {reward:6.3f}  {tagged:6.3f}  {skill:6.3f}")
    print(f"{'mean':12} {sum(rewards) / len(rewards):6.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    maker = verbs.add_parser("make", help="train pico from scratch into a folder")
    maker.add_argument("--out", type=Path, required=True)
    maker.add_argument("--seed", type=int, default=0)
    maker.add_argument("--steps", type=int, default=3000)
    maker.add_argument("--batch", type=int, default=256)
    maker.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    maker.add_argument("--tag-rate", type=float, default=0.12, help="share of lines whose answer is in tags")
    maker.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    measurer = verbs.add_parser("measure", help="reward by kind on held-out questions")
    measurer.add_argument("--model", type=Path, default=PICO_FOLDER)
    measurer.add_argument("--questions", type=int, default=500)
    measurer.add_argument("--device", default="cpu")
    args = parser.parse_args()
    if args.verb == "make":
        make(args.out, args.seed, args.steps, args.batch, args.rate, args.tag_rate, args.device)
        measure(args.out, 500, args.device)
    else:
        measure(args.model, args.questions, args.device)


if __name__ == "__main__":
    main()
