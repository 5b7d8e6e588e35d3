"""The policy of a host: groups of text in, updates out, for any kind of models.

It turns groups into token sequences, cuts them into minibatches and micro-batches, and puts grpo's functions together.
What the models are and how they compute (all nodes as one program, or transformers' own code) is behind `Models`.

Shape letters: K nodes, S sequences, C completion positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from rl_swarm.errors import ModelError
from rl_swarm.policies import grpo, saving
from rl_swarm.policies.advantages import advantages
from rl_swarm.policies.batches import Batch, MicroBatch, Padded, TrainingSequence, micro_batches, pad, tokens_of
from rl_swarm.policies.engine import Learning, Models
from rl_swarm.policies.families.parts import Weights
from rl_swarm.policies.figures import Figures, note_gap
from rl_swarm.policies.memory import GIB, Work, default_micro_batch, estimate, free_memory, is_out_of_memory
from rl_swarm.policies.sampling import Sampled, draws, joined
from rl_swarm.policies.tokens import Tokens
from rl_swarm.protocols import CheckpointNote
from rl_swarm.types import Question, Rollout, ScoredGroup

# No tokenizer makes one token of more characters than this, runs of spaces included.
LONGEST_TOKEN = 128


class Learner:
    """A Policy over some models."""

    def __init__(self, nodes: Sequence[str], models: Models, tokens: Tokens, learning: Learning) -> None:
        self._nodes = tuple(nodes)
        self._models, self._tokens, self._learning = models, tokens, learning
        self._micro_batch_tokens = learning.micro_batch_tokens or default_micro_batch(models.counts(), models.device)
        # Questions answered at a time, and how often memory ran out since the last row: both follow from trouble alone.
        self._sampled_together = 2**30
        self._backoffs = 0
        if tokens.size > models.vocabulary:
            raise ModelError(
                f"The tokenizer knows {tokens.size} tokens, the model only {models.vocabulary}: they do not belong "
                "together."
            )

    # Generation

    def generate(
        self,
        questions: Mapping[str, Sequence[Question]],
        group_size: int,
        seeds: Mapping[str, int],
        *,
        greedy: bool = False,
    ) -> dict[str, list[tuple[Rollout, ...]]]:
        encoded = [[self._encode_question(question) for question in questions[node]] for node in self._nodes]
        longest = max(len(ids) for node in encoded for ids in node)
        if longest + self._learning.max_new_tokens > self._models.context:
            raise ModelError(
                f"A prompt of {longest} tokens and {self._learning.max_new_tokens} new ones do not fit into the "
                f"model's context of {self._models.context}: lower MAX_NEW_TOKENS or PROMPT_EXAMPLES, or choose other "
                "TASKS."
            )
        sampled = self._sample(encoded, group_size, [seeds[node] for node in self._nodes], greedy)
        answers: dict[str, list[tuple[Rollout, ...]]] = {}
        for k, node in enumerate(self._nodes):
            lengths, count = sampled.lengths_KS[k].tolist(), len(encoded[k]) * group_size
            ids = [row[:length] for row, length in zip(sampled.ids_KSC[k].tolist(), lengths, strict=True)][:count]
            rollouts = [
                Rollout(text, tuple(row), tuple(logprobs[:length]), truncated=not stopped)
                for text, row, logprobs, length, stopped in zip(
                    self._tokens.decode_all(ids),
                    ids,
                    sampled.logprobs_KSC[k].tolist(),
                    lengths,
                    sampled.stopped_KS[k].tolist(),
                    strict=False,  # answers given for company are beyond `count`
                )
            ]
            answers[node] = [
                tuple(rollouts[start : start + group_size]) for start in range(0, len(rollouts), group_size)
            ]
        return answers

    def _sample(
        self, encoded: Sequence[Sequence[Sequence[int]]], group_size: int, seeds: Sequence[int], greedy: bool
    ) -> Sampled:
        """All questions at once, or as many at a time as fit into memory: the draws, so the tokens, are the same."""
        learning = self._learning
        count = max(len(node) for node in encoded)
        # Nodes with fewer questions answer somebody's again for company; those answers are dropped.
        filler = next(node[0] for node in encoded if node)
        even = [[*node, *[filler] * (count - len(node))] for node in encoded]
        uniform_KSC = draws(seeds, count * group_size, learning.max_new_tokens)
        parts: list[Sampled] = []
        start = 0
        while start < count:
            stop = min(count, start + self._sampled_together)
            try:
                parts.append(
                    self._models.sample(
                        [node[start:stop] for node in even],
                        uniform_KSC[:, start * group_size : stop * group_size],
                        ends=self._tokens.ends,
                        temperature=0.0 if greedy else learning.temperature,
                        top_p=learning.top_p,
                    )
                )
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if stop - start == 1:
                    raise ModelError(
                        "There is not enough memory to answer even one question: lower MAX_NEW_TOKENS, "
                        "NUM_GENERATIONS or the number of nodes, or take a smaller model."
                    ) from None
                self._sampled_together = (stop - start) // 2
                self._backoffs += 1
            else:
                start = stop
        return joined(parts, 1).cpu()

    # Learning

    def update(self, batches: Mapping[str, Sequence[ScoredGroup]]) -> dict[str, dict[str, float]]:
        minibatches = self._minibatches(batches)
        figures = [Figures() for _ in self._nodes]
        self._look_back(minibatches, figures)
        for minibatch in minibatches:
            for k, batch in enumerate(minibatch):
                figures[k].trained_tokens += batch.tokens
                if batch.broken:
                    batch.sequences.clear()
                    figures[k].dropped += 1
            if not any(batch.sequences for batch in minibatch):
                continue
            self._in_micro_batches(minibatch, partial(self._pass, minibatch), figures)
            active_K = torch.tensor([bool(batch.sequences) for batch in minibatch])
            norm_K, moved_K = self._step(active_K)
            for k in active_K.nonzero().flatten().tolist():
                figures[k].step(float(norm_K[k]), bool(moved_K[k]))
        shared: dict[str, float] = {"memory_backoffs": self._backoffs}
        self._backoffs = 0
        if self._models.device.type == "cuda":
            shared["device_gib"] = torch.cuda.max_memory_allocated(self._models.device) / GIB
            torch.cuda.reset_peak_memory_stats(self._models.device)
        return {node: figures[k].row() | shared for k, node in enumerate(self._nodes)}

    def _step(self, active_K: Tensor) -> tuple[Tensor, Tensor]:
        try:
            return self._models.step(active_K, self._learning.learning_rate, self._learning.max_grad_norm)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise ModelError(
                "Memory ran out in the middle of the optimiser's step: start again, from the last checkpoint, with "
                "fewer nodes, LORA_RANK or a smaller model."
            ) from None

    def gradients(self, batches: Mapping[str, Sequence[ScoredGroup]]) -> dict[str, Weights]:
        """The gradient each node would step along in a round of one update; nothing moves."""
        minibatch, *later = self._minibatches(batches)
        assert not later, "with several updates a round there is no one gradient"
        self._look_back([minibatch], [Figures() for _ in self._nodes])
        self._in_micro_batches(minibatch, partial(self._pass, minibatch), [Figures() for _ in self._nodes])
        found = {node: self._models.gradients(k) for k, node in enumerate(self._nodes)}
        self._models.drop_gradients()
        return found

    def _minibatches(self, batches: Mapping[str, Sequence[ScoredGroup]]) -> list[list[Batch]]:
        """Each node's groups dealt out in turn over the round's updates; a group stays whole."""
        count = self._learning.minibatches
        dealt = [[Batch() for _ in self._nodes] for _ in range(count)]
        for k, node in enumerate(self._nodes):
            for number, scored in enumerate(batches[node]):
                self._add(dealt[number % count][k], node, number, scored)
        return dealt

    def _add(self, batch: Batch, node: str, group: int, scored: ScoredGroup) -> None:
        learning = self._learning
        prompt = self._encode_question(scored.group.question)
        foreign = scored.group.node != node
        negative = grpo.negative_weight(
            learning.off_policy, foreign, learning.negative_weight, learning.peer_negative_weight
        )
        # A correction compares siblings, also those of no advantage; a KL term looks at all of a node's own text.
        all_count = learning.off_policy == "truncated" and scored.informative if foreign else learning.kl_beta > 0
        for number, (rollout, advantage) in enumerate(
            zip(scored.group.rollouts, advantages(scored, learning.advantage), strict=True)
        ):
            if number in scored.left_out:
                continue
            room = self._models.context - len(prompt)
            completion = self._encode_completion(rollout, room) if rollout.token_ids is None else rollout.token_ids
            if not foreign and not all(map(math.isfinite, rollout.logprobs or ())):
                batch.broken = True
            batch.tokens += len(completion)
            batch.completions += 1
            if advantage < 0:
                advantage *= negative
            if advantage != 0.0 or all_count:
                batch.sequences.append(
                    TrainingSequence(
                        prompt,
                        completion,
                        advantage,
                        foreign,
                        group,
                        sampled_logprobs=None if foreign else rollout.logprobs,
                        said_logprob=rollout.said_logprob if foreign else None,
                    )
                )

    def fits(self, question: Question, rollouts: Sequence[Rollout]) -> bool:
        if self._learning.off_policy in grpo.NEEDS_LOGPROBS and any(one.said_logprob is None for one in rollouts):
            return False
        room = min(self._learning.max_new_tokens, self._models.context - len(self._encode_question(question)))
        # Hopelessly long text need not be encoded to be turned away.
        return all(
            len(rollout.text) <= room * LONGEST_TOKEN and self._is_trainable(rollout, room) for rollout in rollouts
        )

    def _is_trainable(self, rollout: Rollout, room: int) -> bool:
        """Not nothing, not too long, and no text that goes on after it has ended."""
        written = self._tokens.encode(rollout.text)
        fits = 0 < len(written) <= room * 5 // 4 if rollout.truncated else len(written) < room
        return fits and not set(written) & set(self._tokens.ends)

    def _encode_question(self, question: Question) -> list[int]:
        return self._tokens.encode_prompt(question.prompt, question.examples)

    def _encode_completion(self, rollout: Rollout, room: int) -> list[int]:
        """A text that was cut off may encode to a few tokens more than it was written with: it is cut again."""
        ids = self._tokens.encode(rollout.text)
        return ids[: min(self._learning.max_new_tokens, room)] if rollout.truncated else [*ids, self._tokens.end]

    def _look_back(self, minibatches: Sequence[Sequence[Batch]], figures: Sequence[Figures]) -> None:
        """Note log-probs under the weights the round begins with, wherever they will be needed once these have moved.

        The first update needs none, its ratio is 1; unless peers' text is corrected for who wrote it.
        """
        corrects = self._learning.off_policy in grpo.NEEDS_LOGPROBS
        for number, minibatch in enumerate(minibatches):
            looked_at = [
                Batch([one for one in batch.sequences if number > 0 or (corrects and one.foreign)])
                for batch in minibatch
            ]
            if any(batch.sequences for batch in looked_at):
                self._in_micro_batches(looked_at, self._note_old, figures)
            if corrects:
                for batch in minibatch:
                    self._correct(batch)

    def _note_old(self, micro_batch: MicroBatch, figures: Sequence[Figures]) -> None:
        padded = self._pad(micro_batch)
        with torch.no_grad():
            logp_KSC, _ = self._models.logprobs(padded, self._learning.temperature)
        note_gap(figures, padded, logp_KSC)
        rows = logp_KSC.tolist()
        for k, node in enumerate(micro_batch):
            for q, siblings in enumerate(node):
                for s, sequence in enumerate(siblings, q * padded.siblings):
                    sequence.old_logprobs = rows[k][s][: len(sequence.completion)]

    def _pad(self, micro_batch: MicroBatch) -> Padded:
        # Attention kernels on a GPU want rows of masks that are multiples of 16 bytes.
        return pad(micro_batch, self._models.device, 8 if self._models.device.type == "cuda" else 1)

    def _correct(self, batch: Batch) -> None:
        """Put corrected advantages in place of those of peers' groups."""
        groups: dict[int, list[TrainingSequence]] = {}
        for sequence in batch.sequences:
            if sequence.foreign:
                groups.setdefault(sequence.group, []).append(sequence)
        for siblings in groups.values():
            advantage_G = torch.tensor([one.advantage for one in siblings], dtype=torch.float64)
            here_G = torch.tensor([math.fsum(one.old_logprobs or ()) for one in siblings], dtype=torch.float64)
            there_G = torch.tensor([one.said_logprob for one in siblings], dtype=torch.float64)
            corrected_G = grpo.corrected(self._learning.off_policy, advantage_G, here_G, there_G)
            for one, advantage in zip(siblings, corrected_G.tolist(), strict=True):
                one.advantage = advantage

    def _in_micro_batches(
        self,
        minibatch: Sequence[Batch],
        visit: Callable[[MicroBatch, Sequence[Figures]], None],
        figures: Sequence[Figures],
    ) -> None:
        """Visit a minibatch piece by piece. Out of memory: again from the start in smaller pieces."""
        while True:
            pieces = micro_batches(minibatch, self._micro_batch_tokens)
            gathered = [Figures() for _ in self._nodes]
            try:
                for piece in pieces:
                    visit(piece, gathered)
            except RuntimeError as error:
                self._models.drop_gradients()
                if not is_out_of_memory(error):
                    raise
                self._models.release()
                if all(sum(map(len, node)) <= 1 for piece in pieces for node in piece):
                    raise ModelError(
                        "There is not enough memory to train on even one completion at a time: set "
                        "GRADIENT_CHECKPOINTING=True, lower MAX_NEW_TOKENS or the number of nodes, or take a smaller "
                        "model."
                    ) from None
                self._micro_batch_tokens = min(self._micro_batch_tokens, max(map(tokens_of, pieces))) // 2
                self._backoffs += 1
            else:
                for total, part in zip(figures, gathered, strict=True):
                    total.add(part)
                return

    def _pass(self, minibatch: Sequence[Batch], micro_batch: MicroBatch, figures: Sequence[Figures]) -> None:
        """Forward and backward of one micro-batch: gradients add up in the models, figures in `figures`."""
        learning, models = self._learning, self._models
        padded = self._pad(micro_batch)
        real_KSC = padded.real_KSC
        logp_KSC, entropy_KSC = models.logprobs(padded, learning.temperature)
        said = logp_KSC.detach()
        old_KSC = torch.where(padded.old_KSC.isnan(), said, padded.old_KSC)
        unlikely_KS = padded.foreign_KS & ~grpo.better_than_chance(
            (old_KSC.nan_to_num(0.0) * real_KSC).sum(-1), real_KSC.sum(-1), models.vocabulary
        )
        advantage_KS1 = padded.advantage_KS1.masked_fill(unlikely_KS[..., None], 0.0)
        losses_KSC, clipped_KSC = grpo.token_losses(
            learning.loss, logp_KSC, old_KSC, advantage_KS1, real_KSC, learning.clip_low, learning.clip_high
        )
        if learning.kl_beta:
            # On peers' text the reference is the policy itself: nothing is added. Masked later, inf would become NaN.
            reference_KSC = models.reference_logprobs(padded, learning.temperature)
            reference_KSC = torch.where(padded.foreign_KS[..., None], said, reference_KSC)
            divergence_KSC = grpo.divergence(logp_KSC, reference_KSC)
            losses_KSC = losses_KSC + learning.kl_beta * divergence_KSC
            own_KSC = real_KSC * ~padded.foreign_KS[..., None]
            for one, far, seen in zip(
                figures,
                (divergence_KSC.detach() * own_KSC).sum((1, 2)).tolist(),
                own_KSC.sum((1, 2)).tolist(),
                strict=True,
            ):
                one.divergence += far
                one.own_seen += seen
        tokens_K = torch.tensor([batch.tokens for batch in minibatch], device=models.device)
        completions_K = torch.tensor([batch.completions for batch in minibatch], device=models.device)
        weights_KSC = grpo.token_weights(learning.aggregate, real_KSC, tokens_K, completions_K, learning.max_new_tokens)
        loss_K = (losses_KSC * weights_KSC).sum((1, 2))
        loss_K.sum().backward()  # type: ignore[no-untyped-call]

        note_gap(figures, padded, said)
        sums_K = torch.stack(
            [
                loss_K.detach().double(),
                (entropy_KSC * real_KSC).sum((1, 2)).double(),
                (clipped_KSC * real_KSC).sum((1, 2)).double(),
                real_KSC.sum((1, 2)).double(),
                unlikely_KS.sum(1).double(),
            ]
        ).tolist()
        for k, one in enumerate(figures):
            one.loss += sums_K[0][k]
            one.entropy += sums_K[1][k]
            one.clipped += sums_K[2][k]
            one.seen += sums_K[3][k]
            one.unlikely += sums_K[4][k]

    # Checkpoints

    def save(self, node: str, note: CheckpointNote) -> bytes:
        return saving.to_bytes(self._models.state(self._nodes.index(node)), note)

    def load(self, node: str, saved: bytes, expected: CheckpointNote) -> CheckpointNote:
        state, note = saving.from_bytes(saved)
        saving.check_note(note, expected)
        self._models.load_state(self._nodes.index(node), state)
        return note

    def node_weights(self, node: str) -> Weights:
        """A copy of one node's weights under the names they are saved by."""
        return self._models.weights(self._nodes.index(node))

    def about(self, own: int, peers: int, group_size: int) -> str:
        """What the models will take of this machine's memory; also lowers the micro-batch to what fits."""
        length = LIKELY_PROMPT + self._learning.max_new_tokens
        work = Work(own * group_size, (own + peers) * group_size, min(length, self._models.context))
        free = free_memory(self._models.device)
        expected = estimate(self._models.counts(), work, free, self._micro_batch_tokens)
        self._micro_batch_tokens = expected.micro_batch_tokens
        return f"{self._models.name}, {self._learning.dtype} on {self._models.device.type}; {expected.sentence()}"


# The length of a usual prompt, for the estimate before any is known.
LIKELY_PROMPT = 128
