"""The policy of a host: K nodes' models stacked into one program, sampling and learning side by side.

Shape letters: K nodes, S sequences, T positions, C completion positions, D width, V vocabulary.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rl_swarm.errors import CheckpointError, ModelError
from rl_swarm.policies import grpo, sampling
from rl_swarm.policies.adam import StackedAdam
from rl_swarm.policies.decoder import Weights, forward, logits, read_shape, read_weights, stack
from rl_swarm.policies.tokens import Tokens
from rl_swarm.protocols import CheckpointNote
from rl_swarm.types import Rollout, ScoredGroup

# No tokenizer makes one token of more characters than this, runs of spaces included.
LONGEST_TOKEN = 128


@dataclass(frozen=True, slots=True)
class Learning:
    """The learner's settings, as plain values."""

    learning_rate: float
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    off_policy: str = "none"
    max_grad_norm: float = 1.0
    micro_batch_tokens: int = 8192
    dtype: str = "float32"
    gradient_checkpointing: bool = False


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One completion ready for training: what was sampled, and how much it counts."""

    prompt: Sequence[int]
    completion: Sequence[int]
    advantage: float
    sampled_logprobs: Sequence[float] | None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.completion)


@dataclass(slots=True)
class _Batch:
    """All sequences a node trains on this round. Tokens of zero-advantage groups count but need no forward pass."""

    sequences: list[_Sequence]
    tokens: int


class StackedPolicy:
    """A Policy over one model folder; every node starts from the same weights."""

    def __init__(self, nodes: Sequence[str], folder: Path, learning: Learning, device: str = "cpu") -> None:
        self._nodes = tuple(nodes)
        self._learning = learning
        self._shape = read_shape(folder)
        self._tokens = Tokens(folder)
        if self._tokens.size > self._shape.vocabulary:
            raise ModelError(
                f"{folder}: the tokenizer knows {self._tokens.size} tokens, the model only {self._shape.vocabulary}."
            )
        single = {name: weight.to(device) for name, weight in read_weights(folder, self._shape).items()}
        self._weights: Weights = stack(single, len(nodes))
        self._adam = StackedAdam(self._weights)
        self._device = torch.device(device)

    # Generation

    def generate(
        self, prompts: Mapping[str, Sequence[str]], group_size: int, seeds: Mapping[str, int]
    ) -> dict[str, list[tuple[Rollout, ...]]]:
        learning = self._learning
        encoded = [[self._tokens.encode_prompt(prompt) for prompt in prompts[node]] for node in self._nodes]
        longest = max(len(ids) for node in encoded for ids in node)
        if longest + learning.max_new_tokens > self._shape.context:
            raise ModelError(
                f"A prompt of {longest} tokens and {learning.max_new_tokens} new ones do not fit into the model's "
                f"context of {self._shape.context}: lower MAX_NEW_TOKENS or choose other TASKS."
            )
        sampled = sampling.sample(
            self._shape,
            self._compute_weights(self._weights),
            encoded,
            group_size,
            [seeds[node] for node in self._nodes],
            ends=self._tokens.ends,
            max_new_tokens=learning.max_new_tokens,
            temperature=learning.temperature,
            top_p=learning.top_p,
        )
        ids, logprobs = sampled.ids_KSC.tolist(), sampled.logprobs_KSC.tolist()
        lengths, stopped = sampled.lengths_KS.tolist(), sampled.stopped_KS.tolist()
        answers: dict[str, list[tuple[Rollout, ...]]] = {}
        for k, node in enumerate(self._nodes):
            rollouts = [
                Rollout(
                    text=self._tokens.decode(ids[k][s][: lengths[k][s]]),
                    token_ids=tuple(ids[k][s][: lengths[k][s]]),
                    logprobs=tuple(logprobs[k][s][: lengths[k][s]]),
                    truncated=not stopped[k][s],
                )
                for s in range(len(ids[k]))
            ]
            answers[node] = [
                tuple(rollouts[start : start + group_size]) for start in range(0, len(rollouts), group_size)
            ]
        return answers

    # Learning

    def update(self, batches: Mapping[str, Sequence[ScoredGroup]]) -> dict[str, dict[str, float]]:
        prepared = [self._prepare(node, batches[node]) for node in self._nodes]
        if not any(batch.sequences for batch in prepared):
            nothing = {**_figures({"seen": 0.0}), "grad_norm": 0.0, "updated": 0.0}
            return {node: nothing | {"trained_tokens": prepared[k].tokens} for k, node in enumerate(self._nodes)}
        gradients, figures = self._gradients(prepared)
        active_K = torch.tensor([bool(batch.sequences) for batch in prepared])
        norm_K, moved_K = self._adam.step(
            gradients, active_K, self._learning.learning_rate, self._learning.max_grad_norm
        )
        norms, moved = norm_K.tolist(), moved_K.tolist()
        return {
            node: figures[k]
            | {
                "grad_norm": norms[k],
                "trained_tokens": prepared[k].tokens,
                "updated": float(moved[k]),
            }
            for k, node in enumerate(self._nodes)
        }

    def gradients(self, batches: Mapping[str, Sequence[ScoredGroup]]) -> Weights:
        """The gradient each node would step along, stacked like the weights."""
        return self._gradients([self._prepare(node, batches[node]) for node in self._nodes])[0]

    def _gradients(self, batches: Sequence[_Batch]) -> tuple[Weights, list[dict[str, float]]]:
        names = ("loss", "entropy", "clipped", "seen", "gap")
        sums = {name: torch.zeros(len(batches), dtype=torch.float64) for name in names}
        for weight in self._weights.values():
            weight.requires_grad_(True)
        for start, stop in self._micro_batches(batches):
            self._accumulate([batch.sequences[start:stop] for batch in batches], batches, sums)
        gradients: Weights = {}
        for name, weight in self._weights.items():
            gradients[name] = torch.zeros_like(weight) if weight.grad is None else weight.grad
            weight.requires_grad_(False)
            weight.grad = None
        return gradients, [
            _figures({name: values[k].item() for name, values in sums.items()}) for k in range(len(batches))
        ]

    def _prepare(self, node: str, groups: Sequence[ScoredGroup]) -> _Batch:
        batch = _Batch([], 0)
        for scored in groups:
            prompt = self._tokens.encode_prompt(scored.group.question.prompt)
            foreign = scored.group.node != node
            for rollout, advantage in zip(scored.group.rollouts, scored.advantages, strict=True):
                completion = rollout.token_ids or self._encode_completion(rollout)
                batch.tokens += len(completion)
                if foreign:
                    advantage *= grpo.foreign_weight(self._learning.off_policy, advantage)
                if advantage != 0.0:
                    batch.sequences.append(
                        _Sequence(prompt, completion, advantage, None if foreign else rollout.logprobs)
                    )
        # Neighbours of like length waste the least padding; the sort is stable, so runs repeat exactly.
        batch.sequences.sort(key=lambda sequence: sequence.length)
        return batch

    def fits(self, prompt: str, rollouts: Sequence[Rollout]) -> bool:
        room = min(self._learning.max_new_tokens, self._shape.context - len(self._tokens.encode_prompt(prompt)))
        # Hopelessly long text need not be encoded to be turned away.
        return all(
            len(rollout.text) <= room * LONGEST_TOKEN and 0 < len(self._encode_completion(rollout)) <= room
            for rollout in rollouts
        )

    def _encode_completion(self, rollout: Rollout) -> list[int]:
        ids = self._tokens.encode(rollout.text)
        return ids if rollout.truncated else [*ids, self._tokens.end]

    def _micro_batches(self, batches: Sequence[_Batch]) -> list[tuple[int, int]]:
        """Slices of the nodes' sequence lists, each within the token budget (or one sequence per node)."""
        count = max(len(batch.sequences) for batch in batches)
        slices: list[tuple[int, int]] = []
        start = 0
        while start < count:
            stop = start + 1
            while stop < count:
                longest = max(b.sequences[min(stop, len(b.sequences) - 1)].length for b in batches if b.sequences)
                if len(batches) * (stop + 1 - start) * longest > self._learning.micro_batch_tokens:
                    break
                stop += 1
            slices.append((start, stop))
            start = stop
        return slices

    def _accumulate(
        self, slices: Sequence[Sequence[_Sequence]], batches: Sequence[_Batch], sums: dict[str, Tensor]
    ) -> None:
        """Forward and backward of one micro-batch: gradients add up in the weights, figures in `sums`."""
        K, S = len(slices), max(len(sequences) for sequences in slices)
        T = max(sequence.length for sequences in slices for sequence in sequences)
        C = max(len(sequence.completion) for sequences in slices for sequence in sequences)
        ids_KST = torch.zeros(K, S, T, dtype=torch.long)
        targets_KSC = torch.zeros(K, S, C, dtype=torch.long)
        # The hidden state at position t scores token t+1, so a completion is scored from the prompt's last position on.
        source_KSC = torch.zeros(K, S, C, dtype=torch.long)
        real_KSC = torch.zeros(K, S, C)
        advantage_KS1 = torch.zeros(K, S, 1)
        sampled_KSC = torch.full((K, S, C), float("nan"))
        for k, sequences in enumerate(slices):
            for s, sequence in enumerate(sequences):
                prompt, completion = len(sequence.prompt), len(sequence.completion)
                ids_KST[k, s, : prompt + completion] = torch.tensor([*sequence.prompt, *sequence.completion])
                targets_KSC[k, s, :completion] = torch.tensor(list(sequence.completion))
                source_KSC[k, s, :completion] = torch.arange(prompt - 1, prompt - 1 + completion)
                real_KSC[k, s, :completion] = 1.0
                advantage_KS1[k, s] = sequence.advantage
                if sequence.sampled_logprobs is not None:
                    sampled_KSC[k, s, :completion] = torch.tensor(list(sequence.sampled_logprobs))
        device = self._device
        real_KSC, targets_KSC, sampled_KSC = real_KSC.to(device), targets_KSC.to(device), sampled_KSC.to(device)

        weights = self._compute_weights(self._weights)
        positions = torch.arange(T, device=device).expand(K, S, T)
        hidden = forward(
            self._shape, weights, ids_KST.to(device), positions, checkpointed=self._learning.gradient_checkpointing
        )
        index = source_KSC.to(device)[..., None].expand(K, S, C, self._shape.width)
        scores = logits(self._shape, weights, hidden.gather(2, index).view(K, S * C, -1)).view(K, S, C, -1)
        logp, entropy = grpo.token_logprobs(scores, targets_KSC, self._learning.temperature)
        loss_KSC, clipped_KSC = grpo.clipped_surrogate(
            logp, logp.detach(), advantage_KS1.to(device), self._learning.clip_low, self._learning.clip_high
        )
        tokens_K = torch.tensor([max(1, batch.tokens) for batch in batches], device=device)
        loss_K = (loss_KSC * real_KSC).sum((1, 2)) / tokens_K
        loss_K.sum().backward()  # type: ignore[no-untyped-call]

        gap_K = ((logp.detach() - sampled_KSC).abs() * real_KSC).nan_to_num(0.0).amax((1, 2))
        sums["gap"] = torch.maximum(sums["gap"], gap_K.cpu().double())
        sums["loss"] += loss_K.detach().cpu().double()
        sums["entropy"] += (entropy * real_KSC).sum((1, 2)).cpu().double()
        sums["clipped"] += (clipped_KSC * real_KSC).sum((1, 2)).cpu().double()
        sums["seen"] += real_KSC.sum((1, 2)).cpu().double()

    def _compute_weights(self, weights: Weights) -> Weights:
        """The weights in the compute type; float32 masters stay what they are."""
        if self._learning.dtype == "float32":
            return weights
        return {name: weight.to(torch.bfloat16) for name, weight in weights.items()}

    # Checkpoints

    def save(self, node: str, note: CheckpointNote) -> bytes:
        k = self._nodes.index(node)
        buffer = io.BytesIO()
        parts = {"weights": self._weights, "first": self._adam.first, "second": self._adam.second}
        state: dict[str, object] = {
            part: {name: tensor[k].cpu().clone() for name, tensor in tensors.items()} for part, tensors in parts.items()
        }
        torch.save({**state, "steps": self._adam.steps_K[k].clone(), "note": dict(note)}, buffer)
        return buffer.getvalue()

    def load(self, node: str, saved: bytes, expected: CheckpointNote) -> CheckpointNote:
        k = self._nodes.index(node)
        state = _read_saved(saved)
        parts = {"weights": self._weights, "first": self._adam.first, "second": self._adam.second}
        note: dict[str, str | int] = state["note"]
        if not expected.items() <= note.items():
            raise CheckpointError(f"it belongs to {state['note']}, not to {dict(expected)}")
        for part, tensors in parts.items():
            sizes = {name: tensor.shape[1:] for name, tensor in tensors.items()}
            if {name: tensor.shape for name, tensor in state[part].items()} != sizes:
                raise CheckpointError("it was made with another model")
        for part, tensors in parts.items():
            for name, tensor in tensors.items():
                tensor[k].copy_(state[part][name])
        self._adam.steps_K[k] = state["steps"]
        return note

    def node_weights(self, node: str) -> Weights:
        """A copy of one node's weights under their Hugging Face names."""
        k = self._nodes.index(node)
        return {name: weight[k].detach().cpu().clone() for name, weight in self._weights.items()}


def _figures(sums: Mapping[str, float]) -> dict[str, float]:
    """Means over the tokens that were looked at; where there was nothing to learn from, nothing is claimed."""
    seen = sums["seen"]
    if not seen:
        return {"loss": 0.0}
    return {
        "loss": sums["loss"],
        "entropy": sums["entropy"] / seen,
        "clip_fraction": sums["clipped"] / seen,
        "logprob_gap": sums["gap"],
    }


def _read_saved(saved: bytes) -> dict[str, Any]:
    try:
        state = torch.load(io.BytesIO(saved), weights_only=True, map_location="cpu")
    except (RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(f"not a whole checkpoint ({type(error).__name__})") from None
    if not isinstance(state, dict) or state.keys() != {"weights", "first", "second", "steps", "note"}:
        raise CheckpointError("not a checkpoint of this program")
    return state


def read_saved_weights(saved: bytes) -> Weights:
    """The weights in a checkpoint, under their Hugging Face names."""
    weights: Weights = _read_saved(saved)["weights"]
    return weights


def save_weights(weights: Weights, folder: Path) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def pick_device(wanted: str) -> str:
    """The device to compute on. `auto` takes cuda, then mps, then cpu."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        return next(name for name, available in there.items() if available)
    if not there[wanted]:
        raise ModelError(f"DEVICE={wanted!r} is not available on this machine; use auto or cpu.")
    return wanted
