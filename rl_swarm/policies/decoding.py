"""Generation on a GPU: the decode step of all nodes as one CUDA graph, over buffers that stay where they are.

A graph is recorded once for each number of rows and then only replayed; it finds everything that changes (weights,
caches, tokens, positions, who has stopped) in place. The kernels look at a sequence's own positions and no further, so
one graph serves short texts and long ones. Sequences that have stopped leave between graphs: what leaves is a line in
a table of rows, no cache is moved. Without graphs the same kernels run one by one, and choose the same tokens.

Shape letters: K nodes, Q questions, S sequences (siblings side by side), M rows (sequences that still run), P prompt
positions, C new tokens, G key-value heads, E head width, L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

import torch
from torch import Tensor

from rl_swarm.errors import ModelError
from rl_swarm.policies import kernels, sampling
from rl_swarm.policies.decoder import Attend, rotary
from rl_swarm.policies.families.parts import Shape, Weights
from rl_swarm.policies.kernels import GATED_SILU, GELU, Record, Stage
from rl_swarm.policies.layout import of_layer
from rl_swarm.policies.memory import is_out_of_memory
from rl_swarm.policies.sampling import Sampled, nucleus, padded_prompts

# Prompts are given room in steps of this, so that rounds with like prompts share buffers and graphs.
PROMPT_STEP = 64
# Steps between looks at who has stopped: a look makes the GPU wait.
LOOK_EVERY = 16
# Sets of buffers kept: one for a round's questions, one for those of an evaluation.
MOST_ROOMS = 2


# Torch records one graph at a time in a process.
RECORDING = Lock()


@dataclass(slots=True)
class Room:
    """Buffers for Q questions of each node with `siblings` completions, and the graphs recorded over them."""

    stage: Stage
    record: Record
    prompts: Tensor  # keys and values, (L, 2, K, Q, G, P, E)
    completions: Tensor  # keys and values, (L, 2, K, S, G, C, E)
    turns: tuple[Tensor, Tensor] | None  # cosines and sines by position, (positions, E / 2)
    replays: dict[tuple[object, ...], tuple[Stage, Callable[[], None] | None]] = field(default_factory=dict)


class Decoding:
    """Samples from stacked weights, which may change in place between calls and nowhere else."""

    def __init__(self, shape: Shape, weights: Weights, *, graphs: bool = True) -> None:
        self._shape, self._weights, self._graphs = shape, weights, graphs
        self._layers = [of_layer(weights, layer) for layer in range(shape.layers)]
        self._table = weights["embed" if shape.tied else "head"][:, : shape.vocabulary]
        self._nodes, self._device, self._dtype = len(self._table), self._table.device, self._table.dtype
        self._rooms: dict[tuple[int, int, int], Room] = {}

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
        """As `sampling.sample`. Out of memory: all buffers are given up before the error passes on."""
        try:
            return self._sample(prompts, uniform_KSC, ends, temperature, top_p)
        except RuntimeError as error:
            if is_out_of_memory(error):
                self.release()
            raise

    def release(self) -> None:
        """Give up all buffers and graphs; the next call makes them again."""
        self._rooms.clear()

    def _sample(
        self,
        prompts: Sequence[Sequence[Sequence[int]]],
        uniform_KSC: Tensor,
        ends: Sequence[int],
        temperature: float,
        top_p: float,
    ) -> Sampled:
        S, C = uniform_KSC.shape[1:]
        prompts_KQP, lengths_KQ = padded_prompts(prompts, min(PROMPT_STEP, self._shape.context))
        room = self._room(lengths_KQ.shape[1], S, C, prompts_KQP.shape[2])
        room.stage.prompt_lengths_KQ.copy_(lengths_KQ)
        room.record.uniform_KSC.copy_(uniform_KSC)
        if len(ends) > kernels.MOST_ENDS:
            raise ModelError(f"The model has {len(ends)} end tokens; at most {kernels.MOST_ENDS} can be watched for.")
        room.record.ends_A.fill_(-1)
        room.record.ends_A[: len(ends)] = torch.tensor(ends)
        for begun, value in ((room.stage.written_KS, 0), (room.record.done_KS, 0), (room.record.lengths_KS, C)):
            begun.fill_(value)
        scores_KQV = self._prefill(room, prompts_KQP.to(self._device))
        self._choose(scores_KQV, room.stage, room.record, temperature, top_p, first=True)
        self._decode(room, temperature, top_p)
        record = room.record
        return Sampled(
            record.chosen_KSC.clone(),
            record.logprobs_KSC.clone(),
            record.lengths_KS.to(torch.long),
            record.done_KS == 1,
        )

    def _room(self, questions: int, sequences: int, new_tokens: int, longest: int) -> Room:
        """Buffers of at least this size, with those used last kept and older ones given up."""
        key = (questions, sequences, new_tokens)
        room = self._rooms.pop(key, None)
        if room is None or room.prompts.shape[5] < longest:
            del room
            while len(self._rooms) >= MOST_ROOMS:
                del self._rooms[next(iter(self._rooms))]
            room = self._make_room(*key, -(-longest // PROMPT_STEP) * PROMPT_STEP)
        self._rooms[key] = room
        return room

    def _make_room(self, questions: int, sequences: int, new_tokens: int, longest: int) -> Room:
        shape, K, device = self._shape, self._nodes, self._device

        def numbers(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*size, dtype=dtype, device=device)

        def cache(rows: int, positions: int) -> Tensor:
            size = (shape.layers, 2, K, rows, shape.kv_heads, positions, shape.head_width)
            return numbers(*size, dtype=self._dtype)

        turns = rotary(shape, self._weights, torch.arange(longest + new_tokens, device=device)[None])
        half = shape.head_width // 2
        return Room(
            stage=Stage(
                slots_KM=torch.arange(sequences, dtype=torch.int32, device=device).repeat(K, 1),
                prompt_lengths_KQ=numbers(K, questions),
                written_KS=numbers(K, sequences),
                siblings=sequences // questions,
            ),
            record=Record(
                uniform_KSC=numbers(K, sequences, new_tokens, dtype=torch.float32),
                ends_A=numbers(kernels.MOST_ENDS, dtype=torch.long),
                ids_KS=numbers(K, sequences, dtype=torch.long),
                chosen_KSC=numbers(K, sequences, new_tokens, dtype=torch.long),
                logprobs_KSC=numbers(K, sequences, new_tokens, dtype=torch.float32),
                done_KS=numbers(K, sequences),
                lengths_KS=numbers(K, sequences),
                limit=new_tokens,
            ),
            prompts=cache(questions, longest),
            completions=cache(sequences, new_tokens),
            turns=None if turns is None else (turns[0][0, :, 0, :half].clone(), turns[1][0, :, 0, :half].clone()),
        )

    # The passes

    def _block(self, rows: int, shape: Shape, weights: Weights, x_KND: Tensor, attend: Attend) -> Tensor:
        """`decoder.block` in kernels."""
        epsilon, get, linear = shape.norm_epsilon, weights.get, partial(kernels.linear, rows=rows)
        y = kernels.norm(x_KND, weights["norm1.weight"], get("norm1.bias"), epsilon)
        qkv = linear(y, weights["qkv.weight"], get("qkv.bias"))
        x_KND = linear(attend(weights, qkv), weights["out.weight"], get("out.bias"), onto=x_KND)
        y = kernels.norm(x_KND, weights["norm2.weight"], get("norm2.bias"), epsilon)
        activation = GATED_SILU if shape.gated else GELU
        inner = linear(y, weights["up.weight"], get("up.bias"), activation=activation)
        return linear(inner, weights["down.weight"], get("down.bias"), onto=x_KND)

    def _scores(self, rows: int, x_KND: Tensor) -> Tensor:
        weights = self._weights
        y = kernels.norm(x_KND, weights["last.weight"], weights.get("last.bias"), self._shape.norm_epsilon)
        return kernels.linear(y, self._table, out_dtype=torch.float32, rows=rows)

    def _prefill(self, room: Room, prompts_KQP: Tensor) -> Tensor:
        """Fill the prompts' cache; returns the scores at each prompt's end, (K, Q, V)."""
        kept, hidden_KQD = sampling.prefill(
            self._shape, self._weights, prompts_KQP, room.stage.prompt_lengths_KQ.long(), partial(self._block, 0)
        )
        P = prompts_KQP.shape[2]
        for layer, pair in enumerate(kept):
            for buffer, found in zip(room.prompts[layer], pair, strict=True):
                buffer[:, :, :, :P] = found.view(*buffer.shape[:3], P, -1)
        return self._scores(room.stage.slots_KM.shape[1], hidden_KQD)

    def _step(self, room: Room, stage: Stage, temperature: float, top_p: float) -> None:
        """One more token for every row of the stage."""
        weights, rows = self._weights, room.stage.slots_KM.shape[1]
        x_KMD = kernels.embed(stage, room.record.ids_KS, weights["embed"], weights.get("positions"))
        for layer, parts in enumerate(self._layers):
            x_KMD = self._block(rows, self._shape, parts, x_KMD, partial(self._attend, room, stage, layer))
        self._choose(self._scores(rows, x_KMD), stage, room.record, temperature, top_p)

    def _attend(self, room: Room, stage: Stage, layer: int, weights: Weights, qkv_KMX: Tensor) -> Tensor:
        norms = (weights["q_norm.weight"], weights["k_norm.weight"]) if "q_norm.weight" in weights else None
        heads, epsilon = self._shape.heads, self._shape.norm_epsilon
        prompts, completions = room.prompts[layer], room.completions[layer]
        return kernels.attend(qkv_KMX, stage, prompts, completions, heads, room.turns, norms, epsilon)

    def _choose(
        self, scores_KMV: Tensor, stage: Stage, record: Record, temperature: float, top_p: float, first: bool = False
    ) -> None:
        kept_KMV = None
        if top_p < 1 and temperature:
            likely = nucleus(torch.softmax(scores_KMV / temperature, -1), top_p) > 0
            kept_KMV = scores_KMV.masked_fill(~likely, -torch.inf)
        kernels.choose(scores_KMV, kept_KMV, stage, record, temperature, first=first)

    # The loop

    def _decode(self, room: Room, temperature: float, top_p: float) -> None:
        left = room.record.limit - 1
        rows = room.record.done_KS.shape[1]
        while left > 0:
            stopped_KS = room.record.done_KS != 0
            running = int((~stopped_KS).sum(1).max())
            if not running:
                return
            while rows > 1 and running <= rows // 2:
                rows = (rows + 1) // 2
            slots_KM, replay = self._replay(room, rows, temperature, top_p)
            # Those that run come first, each node's in order; for company there may be some that have stopped.
            order_KM = stopped_KS.to(torch.int8).argsort(dim=1, stable=True)[:, :rows]
            slots_KM.copy_(order_KM)
            for _ in range(min(left, LOOK_EVERY)):
                replay()
            left -= LOOK_EVERY

    def _replay(self, room: Room, rows: int, temperature: float, top_p: float) -> tuple[Tensor, Callable[[], None]]:
        """The table of rows, and what makes one step for them."""
        key = (rows, temperature, top_p)
        if key not in room.replays:
            stage = Stage(
                torch.full((self._nodes, rows), -1, dtype=torch.int32, device=self._device),
                room.stage.prompt_lengths_KQ,
                room.stage.written_KS,
                room.stage.siblings,
            )

            room.replays[key] = (stage, self._recorded(room, stage, temperature, top_p) if self._graphs else None)
        stage, graph = room.replays[key]
        # Nothing in a room may hold on to the room: what is given up must be gone at once.
        return stage.slots_KM, graph or partial(self._step, room, stage, temperature, top_p)

    def _recorded(self, room: Room, stage: Stage, temperature: float, top_p: float) -> Callable[[], None]:
        """The step as a graph. It is run once before, for no row, so that its kernels are compiled."""
        self._step(room, stage, temperature, top_p)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other GPUs' threads may go on taking memory meanwhile.
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with RECORDING, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._step(room, stage, temperature, top_p)
        return graph.replay
