"""Any causal language model that transformers can load, one node after the other; and LoRA adapters through peft.

The way for model families the stacked decoder does not know, and for LORA_RANK. Slower, and right for all of them: the
prompts of one call have one length (the siblings of one question), so nothing is padded while sampling, and training
pads on the right, where a causal model does not look. With adapters all nodes share one base model.

Shape letters: K nodes, S sequences, T positions, C completion positions, D width.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_swarm.errors import ModelError
from rl_swarm.policies import memory, saving
from rl_swarm.policies.adam import StackedAdam
from rl_swarm.policies.batches import Padded
from rl_swarm.policies.engine import Learning
from rl_swarm.policies.families.parts import Weights
from rl_swarm.policies.learner import Learner
from rl_swarm.policies.logprobs import at_real_positions, chunked_logprobs, token_logprobs
from rl_swarm.policies.sampling import Recorder, Sampled, joined
from rl_swarm.policies.tokens import Tokens


def huggingface_learner(
    nodes: Sequence[str], folder: Path, learning: Learning, device: str, reason: str = ""
) -> Learner:
    tokens = Tokens(folder, chat=learning.chat_template == "auto")
    return Learner(nodes, HuggingfaceModels(len(nodes), folder, learning, device, reason), tokens, learning)


class HuggingfaceModels:
    """One transformers model for each node, or one for all with an adapter for each."""

    def __init__(self, count: int, folder: Path, learning: Learning, device: str, reason: str = "") -> None:
        self.device = torch.device(device)
        self._halved = learning.dtype == "bfloat16"
        self._checkpointed = learning.gradient_checkpointing
        self._lora = learning.lora_rank > 0
        if self._lora:
            self._wrapped = _with_adapters(load_model(folder), count, learning.lora_rank).to(device)
            self._models = [self._wrapped.get_base_model()] * count
            self._reference: Any = None
        else:
            self._models = [load_model(folder).to(device) for _ in range(count)]
            # Only a KL term looks back; with adapters the base model is the reference already.
            self._reference = load_model(folder).to(device) if learning.kl_beta else None
        self._acts = 0
        if self._checkpointed:
            chosen = {"use_reentrant": False, "context_fn": self._recomputing}
            for model in self._models:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=chosen)
        config = self._models[0].config.get_text_config()
        self.vocabulary = int(self._models[0].get_input_embeddings().weight.shape[0])
        self.context = int(getattr(config, "max_position_embeddings", None) or NO_LIMIT)
        self._plain_head = _has_plain_head(self._models[0], self.device)
        self._trained = [self._parameters(k) for k in range(count)]
        views = [{name: one.detach()[None] for name, one in trained.items()} for trained in self._trained]
        self._adams = [StackedAdam(view) for view in views]
        kind = f"LoRA adapters of rank {learning.lora_rank}" if self._lora else "whole models"
        self.name = f"{kind} in transformers, one node after the other" + (f" (the model {reason})" if reason else "")

    def _parameters(self, k: int) -> dict[str, torch.nn.Parameter]:
        """What node k trains, by the name it is saved under."""
        if not self._lora:
            return dict(self._models[k].named_parameters())
        mark = f".{_adapter(k)}."
        named = self._models[k].named_parameters()
        return {name.replace(mark, "."): one for name, one in named if mark in name}

    @contextmanager
    def _acting(self, k: int) -> Iterator[Any]:
        """Node k's model, in the compute type, with its adapter in place and without dropout."""
        model, self._acts = self._models[k], k
        self._put_on(k)
        # transformers recomputes layers in training mode only; there is no dropout in either mode.
        model.train(self._checkpointed and torch.is_grad_enabled())
        try:
            with torch.autocast(self.device.type, torch.bfloat16) if self._halved else nullcontext():
                yield model
        finally:
            model.eval()
            self._put_on(k)

    def _put_on(self, k: int) -> None:
        """Node k's adapter. peft also freezes the others, which may still wait for a gradient: they are thawed."""
        if self._lora:
            self._wrapped.set_adapter(_adapter(k))
            for trained in self._trained:
                for one in trained.values():
                    one.requires_grad_(True)

    def _recomputing(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For layers computed again on the way back, when another node's adapter is in place: put this one's back."""
        k = self._acts

        @contextmanager
        def again() -> Iterator[None]:
            self._put_on(k)
            yield

        return nullcontext(), again()

    # What the models compute

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Sequence[Sequence[int]]],
        uniform_KSC: Tensor,
        *,
        ends: Sequence[int],
        temperature: float,
        top_p: float,
    ) -> Sampled:
        uniform_KSC = uniform_KSC.to(self.device)
        size = uniform_KSC.shape[1] // len(prompts[0])
        rows: list[Sampled] = []
        for k, questions in enumerate(prompts):
            with self._acting(k) as model:
                answers = [
                    _answer(
                        model,
                        prompt,
                        Recorder(uniform_KSC[k : k + 1, q * size : (q + 1) * size], ends, temperature, top_p),
                        uniform_KSC.shape[2],
                    )
                    for q, prompt in enumerate(questions)
                ]
                rows.append(joined(answers, 1))
        return joined(rows, 0)

    def release(self) -> None:
        """Nothing is kept."""

    def logprobs(self, padded: Padded, temperature: float) -> tuple[Tensor, Tensor]:
        found = []
        for k in range(len(self._models)):
            with self._acting(k) as model:
                found.append(self._score(model, padded, k, temperature))
        return torch.cat([logp for logp, _ in found]), torch.cat([entropy for _, entropy in found])

    @torch.no_grad()
    def reference_logprobs(self, padded: Padded, temperature: float) -> Tensor:
        found = []
        for k in range(len(self._models)):
            with self._acting(k) as model, self._wrapped.disable_adapter() if self._lora else nullcontext():
                found.append(self._score(model if self._lora else self._reference, padded, k, temperature)[0])
        return torch.cat(found)

    def _score(self, model: Any, padded: Padded, k: int, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of one node's completion tokens, (1, S, C)."""
        one = slice(k, k + 1)
        real_1SC = padded.real_KSC[one]
        if not real_1SC.any():
            nothing = torch.zeros_like(real_1SC)
            return nothing, nothing
        # Not every model can be told that sequences share a prompt: here each has its own.
        ids_1ST, source_1SC = padded.whole(k)
        where = (source_1SC, padded.targets_KSC[one], real_1SC)
        if self._plain_head:
            hidden_STD = model.base_model(input_ids=ids_1ST[0], use_cache=False).last_hidden_state
            head = model.get_output_embeddings()
            return at_real_positions(
                lambda hidden, targets: chunked_logprobs(head, hidden, targets, temperature, self.vocabulary),
                hidden_STD.flatten(0, 1)[None],
                *where,
            )
        # What the model does between its last hidden state and its scores is its own affair: take the scores.
        scores_STV = model(input_ids=ids_1ST[0], use_cache=False).logits
        return at_real_positions(
            lambda scores, targets: token_logprobs(scores, targets, temperature),
            scores_STV.flatten(0, 1)[None],
            *where,
        )

    # Learning

    def gradients(self, k: int) -> Weights:
        return {
            name: torch.zeros_like(one) if one.grad is None else one.grad.clone()
            for name, one in self._trained[k].items()
        }

    def drop_gradients(self) -> None:
        for trained in self._trained:
            for one in trained.values():
                one.grad = None

    def step(self, active_K: Tensor, learning_rate: float, max_norm: float) -> tuple[Tensor, Tensor]:
        norms, moved = torch.zeros(len(self._adams), dtype=torch.float64), torch.zeros_like(active_K)
        for k in active_K.nonzero().flatten().tolist():
            gradients = {
                name: (torch.zeros_like(one) if one.grad is None else one.grad)[None]
                for name, one in self._trained[k].items()
            }
            norm, went = self._adams[k].step(gradients, active_K[k : k + 1], learning_rate, max_norm)
            norms[k], moved[k] = norm[0], went[0]
        self.drop_gradients()
        return norms, moved

    # What is kept

    def weights(self, k: int) -> Weights:
        return {name: one.detach().cpu().clone() for name, one in self._trained[k].items()}

    def state(self, k: int) -> dict[str, Any]:
        adam = self._adams[k]

        def copied(tensors: Weights) -> Weights:
            return {name: tensor[0].cpu().clone() for name, tensor in tensors.items()}

        return {
            "weights": self.weights(k),
            "first": copied(adam.first),
            "second": copied(adam.second),
            "steps": adam.steps_K[0].clone(),
        }

    @torch.no_grad()
    def load_state(self, k: int, state: Mapping[str, Any]) -> None:
        adam = self._adams[k]
        saving.check_sizes(state, self._trained[k])
        for part, tensors in (("weights", adam.weights), ("first", adam.first), ("second", adam.second)):
            for name, tensor in tensors.items():
                tensor[0].copy_(state[part][name])
        adam.steps_K[0] = state["steps"]

    def counts(self) -> memory.Counts:
        config = self._models[0].config.get_text_config()
        width = int(getattr(config, "hidden_size", 1024))
        layers = int(getattr(config, "num_hidden_layers", 24))
        distinct = {id(one): one.numel() for model in self._models for one in model.parameters()}
        return memory.Counts(
            nodes=len(self._models),
            item=2 if self._halved else 4,
            weights=sum(distinct.values()),
            trained=sum(one.numel() for node in self._trained for one in node.values()),
            copied=sum(distinct.values()) if self._halved else 0,
            cached=2 * layers * width,
            kept=KEPT_BY_WIDTH * width,
            width=width,
            layers=layers,
            vocabulary=self.vocabulary,
            checkpointed=self._checkpointed,
        )


# Numbers an unknown model's layer keeps per token for the way back, as a multiple of its width: a generous guess.
KEPT_BY_WIDTH = 40
# For models whose configuration names no longest text.
NO_LIMIT = 2**20


def load_model(folder: Path) -> Any:
    """A transformers model in float32 and without dropout. Code that comes with a model is never run."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        # Left unset, the library would ask on a terminal whether to run the model's own code.
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        for name in vars(config):
            if ("dropout" in name or "pdrop" in name) and isinstance(getattr(config, name), float):
                setattr(config, name, 0.0)
        model, loaded = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"{folder} cannot be loaded: {reason}") from None
    # What is missing the library fills in with random numbers.
    if loaded["missing_keys"]:
        raise ModelError(
            f"{folder} lacks the weight {min(loaded['missing_keys'])}: it is no whole causal language model."
        )
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.eval()


def merged_weights(folder: Path, adapter: Weights) -> Weights:
    """The base model's weights with one node's adapter worked in, under the base model's names."""
    rank = next(weight.shape[0] for name, weight in adapter.items() if ".lora_A." in name)
    wrapped = _with_adapters(load_model(folder), 1, rank)
    mark = f".{_adapter(0)}."
    with torch.no_grad():
        for name, parameter in wrapped.get_base_model().named_parameters():
            if mark in name:
                parameter.copy_(adapter[name.replace(mark, ".")])
    merged = wrapped.merge_and_unload()
    return {name: parameter.detach().contiguous() for name, parameter in merged.named_parameters()}


def _adapter(k: int) -> str:
    return f"node{k}"


def _with_adapters(model: Any, count: int, rank: int) -> Any:
    """The model with an adapter for each node on all its linear layers; all start alike, and from nothing."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ModelError("LORA_RANK needs the package peft: pip install peft.") from None

    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            wrapped = get_peft_model(model, config, adapter_name=_adapter(0))
            for k in range(1, count):
                torch.manual_seed(0)
                wrapped.add_adapter(_adapter(k), config)
    except ValueError as error:
        raise ModelError(f"LORA_RANK is not possible with this model: {str(error).splitlines()[0]}") from None
    return wrapped


@torch.no_grad()
def _has_plain_head(model: Any, device: torch.device) -> bool:
    """Whether scores are the output layer's answer to the last hidden state, and nothing more (caps, scales)."""
    head = model.get_output_embeddings()
    if head is None or model.base_model is model:
        return False
    ids = torch.arange(min(8, head.weight.shape[0]), device=device)[None]
    hidden = getattr(model.base_model(input_ids=ids, use_cache=False), "last_hidden_state", None)
    return hidden is not None and torch.allclose(head(hidden), model(input_ids=ids).logits, atol=1e-4)


def _answer(model: Any, prompt: Sequence[int], recorder: Recorder, longest: int) -> Sampled:
    """Completions of one prompt, one for each of the recorder's sequences."""
    takes = inspect.signature(model.forward).parameters
    shorter = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
    device = model.get_input_embeddings().weight.device
    ids_ST = torch.tensor(prompt, device=device).expand(recorder.sequences, -1)
    out = model(input_ids=ids_ST, use_cache=True, **shorter)
    for c in range(longest):
        chosen_1S = recorder.choose(c, out.logits[None, :, -1].float())
        if chosen_1S is None:
            break
        cache = getattr(out, "past_key_values", None)
        if cache is None:  # no cache that could be handed on: the whole text again
            ids_ST = torch.cat((ids_ST, chosen_1S[0][:, None]), 1)
            out = model(input_ids=ids_ST, use_cache=False, **shorter)
        else:
            out = model(input_ids=chosen_1S[0][:, None], past_key_values=cache, use_cache=True, **shorter)
    return recorder.sampled
