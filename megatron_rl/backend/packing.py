"""The packing of a micro-batch into tensors: sequences end to end (THD), padded, and the inputs of the loss.

Each sequence is padded to a multiple of ``PlanRules.pad_multiple`` tokens. Under context
parallelism a rank holds its own chunks of every sequence. It holds a loss token if these chunks
contain the position that predicts the token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from megatron_rl.backend.batch import Batch, targets_at
from megatron_rl.distributed.platform import HOST, send
from megatron_rl.distributed.topology import Topology
from megatron_rl.model.attention.layout import Layout, lay_out
from megatron_rl.model.attention.packed import PackedSequences, pack
from megatron_rl.model.attention.spans import WHOLE, ContextShard, context_positions
from megatron_rl.planning.plan import PlanRules
from megatron_rl.planning.tokens import read_tokens
from megatron_rl.types import MicroBatch, Sample


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedMicroBatch:
    """Holds one micro-batch on this rank: device tensors of its T tokens and N loss tokens.

    ``tokens`` is None except on the first pipeline stage. The fields from ``loss_positions`` on are
    None except on the last stage.

    packed: Megatron-Core's parameters of the packed sequences, with their lengths on the host.
    positions: [T] on the host, each token's position in the whole micro-batch, before context
        parallelism splits it.
    num_sequences: the number of the micro-batch's samples.
    tokens: [1, T], the token ids.
    of_parts: name of an optional part (backend/part.py) → the object that it packed.
    source: the plan's micro-batch that was packed.
    loss_positions: [N], the index among the T tokens whose logits predict the loss token.
    targets: [N], the loss tokens' ids.
    flat: [N] on the host, the loss token's index among all response tokens of the batch.
    sequences: [N], the index of the loss token's sample in the micro-batch.
    rollout_logprobs: [N], the engine's log-probs.

    Inputs of the loss, each [N], None in a pass without a loss:
    weights: the factor on each token's loss.
    advantages, old_logprobs, reference_logprobs: inputs of a policy's loss, as is the number
        ``kl_coefficient``.
    measured: how often the step's metrics count a token; None: once.
    returns, old_values: inputs of a critic's loss.
    """

    packed: PackedSequences
    positions: np.ndarray
    num_sequences: int
    tokens: torch.Tensor | None
    of_parts: Mapping[str, object] = field(default_factory=dict)
    source: MicroBatch | None = None
    loss_positions: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    flat: np.ndarray | None = None
    sequences: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    old_logprobs: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None
    rollout_logprobs: torch.Tensor | None = None
    kl_coefficient: float | None = None
    measured: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    old_values: torch.Tensor | None = None


class FlatInputs(Protocol):
    """Looks up the inputs of the loss for given loss tokens; LossInputs and ValueInputs implement it.

    ``gather`` takes two arrays [N], for N loss tokens: the index of each token's sample, and its
    index among the batch's response tokens. It returns values for some fields of PackedMicroBatch,
    by the field's name: an array [N], or one float for all tokens.
    """

    def gather(self, samples: np.ndarray, flat: np.ndarray) -> Mapping[str, np.ndarray | float]: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaidMicroBatch:
    """Holds the K samples of a micro-batch and their tokens' positions, before they become tensors.

    layout: the positions of all samples' tokens in the packed micro-batch.
    rows: the K samples.
    read: int64 [K], how many response tokens of each sample the model reads.
    positions: int64 [T], the positions in the packed micro-batch that this rank holds.
    """

    layout: Layout
    rows: Sequence[Sample]
    read: np.ndarray
    positions: np.ndarray


class PackingPart(Protocol):
    """Makes one object for every packed micro-batch, which becomes its ``PackedMicroBatch.of_parts[name]``."""

    name: str

    def pack(self, laid: LaidMicroBatch) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Packer:
    """Packs micro-batches into the tensors that this rank needs; each model has one packer.

    pad_token: the token id of pads.
    needs_tokens: whether this pipeline stage reads token ids, as the first does.
    needs_loss: whether this pipeline stage computes the loss, as the last does.
    context: which chunks of every sequence this rank holds under context parallelism.
    for_transformer_engine: whether the layers are Transformer Engine's.
    parts: the optional parts (backend/part.py), which pack objects of their own.
    """

    pad_token: int
    needs_tokens: bool
    needs_loss: bool
    device: torch.device
    context: ContextShard = WHOLE
    for_transformer_engine: bool = False
    parts: tuple[PackingPart, ...] = ()

    @staticmethod
    def of_rank(grid: Topology, pad_token: object, layer_spec: str, parts: tuple[PackingPart, ...]) -> Packer:
        """Return the packer of this rank.

        pad_token: the Hugging Face config's ``pad_token_id``; 0 is used if it is None or negative.
        layer_spec: ``torch`` or ``transformer_engine``, the kind of the model's layers.
        parts: the optional parts.
        """
        return Packer(
            pad_token=max(pad_token, 0) if isinstance(pad_token, int) else 0,
            needs_tokens=grid.is_first_stage,
            needs_loss=grid.is_last_stage,
            device=HOST.device,
            context=ContextShard(rank=grid.context_rank, size=grid.context_size, group=grid.context_group),
            for_transformer_engine=layer_spec == "transformer_engine",
            parts=parts,
        )

    def pack(
        self, microbatch: MicroBatch, *, batch: Batch, inputs: FlatInputs | None, rules: PlanRules
    ) -> PackedMicroBatch:
        """Return one micro-batch of a planned batch as tensors.

        inputs: the inputs of the loss; None in a log-prob pass.
        rules: the rules of the plan: padding, and whether samples share a prompt.
        """
        # positions of the micro-batch's tokens, and this rank's share of the positions
        facts, samples = batch.facts, microbatch.samples
        read = read_tokens(facts)[samples]
        layout = lay_out(
            facts.prompt_tokens[samples],
            read,
            facts.prompt_keys[samples] if rules.share_prompts else None,
            rules.pad_multiple,
            rules.row_multiple,
        )
        positions = context_positions(layout.lengths, self.context.rank, self.context.size)
        packed = pack(
            layout,
            self.device,
            self.context,
            for_transformer_engine=self.for_transformer_engine,
            share_prompts=rules.share_prompts,
        )
        # tensors: tokens on the first stage, the parts' objects, loss fields on the last stage
        fields: dict[str, object] = {"tokens": None, "source": microbatch}
        if self.needs_tokens:
            tokens = _lay_tokens(layout, [batch.rows[i] for i in samples.tolist()], read, self.pad_token)
            fields["tokens"] = send(torch.from_numpy(tokens[positions])[None], self.device)
        if self.parts:
            rows = [batch.rows[i] for i in samples.tolist()]
            laid = LaidMicroBatch(layout=layout, rows=rows, read=read, positions=positions)
            fields["of_parts"] = {part.name: part.pack(laid) for part in self.parts}
        if self.needs_loss:
            local = np.full(layout.num_tokens, -1)
            local[positions] = np.arange(len(positions))
            fields.update(_loss_fields(microbatch, batch, inputs, layout, local, self.device))
        return PackedMicroBatch(packed=packed, positions=positions, num_sequences=len(samples), **fields)


def _lay_tokens(layout: Layout, rows: Sequence[Sample], read: np.ndarray, pad_token: int) -> np.ndarray:
    """Return int64 [T], the token ids at their positions in the packed micro-batch, pads included.

    rows: the K samples of the micro-batch.
    read: int64 [K], how many response tokens of each sample the model reads.

    Raises ValueError if samples that share a prompt have different prompts.
    """
    tokens = np.full(layout.num_tokens, pad_token, dtype=np.int64)
    laid: dict[int, Sample] = {}
    places = zip(rows, layout.prompts.tolist(), layout.responses.tolist(), read.tolist(), strict=True)
    for row, prompt, response, length in places:
        first = laid.setdefault(prompt, row)
        prompt_ids = row.token_ids[: row.prompt_tokens]
        if not np.array_equal(prompt_ids, first.token_ids[: first.prompt_tokens]):
            raise ValueError(
                f"the prompts of samples {first.sample_id} and {row.sample_id} differ but have the same digest, so "
                "they cannot be shared; set plan.share_prompts=false"
            )
        tokens[prompt : prompt + row.prompt_tokens] = prompt_ids
        tokens[response : response + length] = row.token_ids[row.prompt_tokens : row.prompt_tokens + length]
    return tokens


def _loss_fields(
    microbatch: MicroBatch,
    batch: Batch,
    inputs: FlatInputs | None,
    layout: Layout,
    local: np.ndarray,
    device: torch.device,
) -> dict[str, object]:
    """Return the fields of PackedMicroBatch for the loss tokens that this rank predicts.

    inputs: the inputs of the loss; None in a log-prob pass.
    local: int64, for each position of the whole micro-batch its index on this rank; −1 if another
        context rank holds it.
    """
    offsets = batch.facts.response_offsets
    # per sequence, the loss tokens whose predicting position is on this rank
    positions, targets, flat, sequences, rollout = [], [], [], [], []
    for slot, i in enumerate(microbatch.samples.tolist()):
        row = batch.rows[i]
        # a filler has no loss token: it trains nothing and counts in no metric, and its graph gives
        # a gradient of zero
        chosen = np.flatnonzero(row.loss_mask if not microbatch.filler else np.zeros_like(row.loss_mask))
        # a token is predicted at the position before it, a response's first token at the prompt's end
        own = np.where(chosen == 0, layout.prompts[slot] + row.prompt_tokens, layout.responses[slot] + chosen)
        places = local[own - 1]
        chosen, places = chosen[places >= 0], places[places >= 0]
        targets_NK = targets_at(row, chosen)
        width = targets_NK.shape[1]
        positions.append(np.repeat(places, width))
        targets.append(targets_NK.reshape(-1))
        flat.append(offsets[i] + (chosen[:, None] * width + np.arange(width)).reshape(-1))
        sequences.append(np.full(len(chosen) * width, slot))
        rollout.append(np.repeat(row.logprobs[chosen], width))
    # one tensor per field, on the device
    flat_index = np.concatenate(flat)
    sequence_index = np.concatenate(sequences)

    def floats(values: np.ndarray) -> torch.Tensor:
        return send(torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)), device)

    fields: dict[str, object] = {
        "loss_positions": send(torch.from_numpy(np.concatenate(positions)), device),
        "targets": send(torch.from_numpy(np.concatenate(targets)), device),
        "sequences": send(torch.from_numpy(sequence_index), device),
        "rollout_logprobs": floats(np.concatenate(rollout)),
        "flat": flat_index,
    }
    if inputs is not None:
        input_fields = inputs.gather(microbatch.samples[sequence_index], flat_index)
        fields |= {
            name: values if isinstance(values, float) else floats(values) for name, values in input_fields.items()
        }
    return fields


class PackedAhead(Sequence[PackedMicroBatch]):
    """Packs each micro-batch of a step, and sends it to the device, while the previous one runs.

    ``self[i]`` returns micro-batch i, or raises the error that its packing raised. This object keeps
    every packed micro-batch, so that no memory is reused while the device may still read it.

    pack: a function that packs one micro-batch.
    thread: an executor with one worker thread, which packs and sends.
    stream: the CUDA stream that sends; before the first micro-batch it waits for all earlier work on
        the device. None on a CPU.
    """

    def __init__(
        self,
        microbatches: Sequence[MicroBatch],
        pack: Callable[[MicroBatch], PackedMicroBatch],
        thread: ThreadPoolExecutor,
        stream: torch.cuda.Stream | None = None,
    ):
        self._microbatches, self._pack_one, self._thread, self._stream = microbatches, pack, thread, stream
        self._coming: list[Future] = []
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        self._ask_for(1)

    def __len__(self) -> int:
        return len(self._microbatches)

    def __getitem__(self, index: int) -> PackedMicroBatch:
        if index >= len(self):
            raise IndexError(index)
        self._ask_for(index + 2)
        packed, sent = self._coming[index].result()
        if sent is not None:
            torch.cuda.current_stream().wait_event(sent)
        return packed

    def _ask_for(self, count: int) -> None:
        for microbatch in self._microbatches[len(self._coming) : count]:
            self._coming.append(self._thread.submit(self._pack, microbatch))

    def _pack(self, microbatch: MicroBatch) -> tuple[PackedMicroBatch, torch.cuda.Event | None]:
        if self._stream is None:
            return self._pack_one(microbatch), None
        with torch.cuda.device(HOST.device), torch.cuda.stream(self._stream):
            packed = self._pack_one(microbatch)
            return packed, self._stream.record_event()
