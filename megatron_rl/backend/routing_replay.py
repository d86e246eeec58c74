"""The optional part that replays routed experts: it packs them for the routers, or records the routers' choices.

Under ``rollout.routing_replay=rollout`` the engine gives each sample's experts. Under
``old_logprobs`` the forward pass for the old log-probs records them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from megatron_rl.backend.batch import Batch
from megatron_rl.backend.packing import LaidMicroBatch, PackedMicroBatch
from megatron_rl.backend.routed_rows import (
    RecordedExperts,
    RouterRows,
    gather_recorded,
    lay_experts,
    read_experts,
    token_places,
)
from megatron_rl.backend.trainable_model import TrainableModel
from megatron_rl.distributed.collectives import reduce_on_host
from megatron_rl.distributed.platform import HOST, send
from megatron_rl.model.routing_replay import Recording, RoutingReplay, check_routing_replay
from megatron_rl.planning.tokens import read_tokens
from megatron_rl.types import BatchFacts, BatchPlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedPass:
    """Holds the experts that this rank's routers chose in one forward pass.

    routers: maps each micro-batch's ``id`` to the micro-batch and its routers' experts.
    rows: the layers of this rank's routers, and which packed tokens of a micro-batch they see.
    rank: this rank's global number.
    """

    routers: Recording
    rows: RouterRows
    rank: int

    def gather(self, batch: Batch, plan: BatchPlan) -> RecordedExperts:
        """Return the experts that all ranks' routers chose, for the samples that this rank owns. A collective."""
        facts, (mini_batch,) = batch.facts, plan.mini_batches
        read, by_sample = read_tokens(facts), {}
        for packed, by_index in self.routers.values():
            samples, layout = packed.source.samples, packed.packed.layout
            if packed.source.filler:  # its sample runs in another micro-batch too, or is dropped
                continue
            places = [
                token_places(layout, slot, int(facts.prompt_tokens[i]), int(read[i])) for slot, i in enumerate(samples)
            ]
            experts = read_experts(by_index, layout, places, packed.positions, self.rows)
            by_sample.update(zip(samples.tolist(), experts, strict=True))
        passed = np.zeros(facts.num_samples, dtype=bool)
        passed[mini_batch.ran] = True
        return gather_recorded(batch, by_sample, passed, self.rows, self.rank)


class ReplayedExperts:
    """Replays routed experts in a policy's passes. BackendPart (backend/part.py) describes the methods.

    routing: records and replays experts at this rank's routers.
    rows: the layers of this rank's routers, and which packed tokens of a micro-batch they see.
    rank: this rank's global number.
    records: whether log-prob passes record experts, as under ``routing_replay=old_logprobs``.
    requires: whether every sample must bring its experts, as under ``routing_replay=rollout``.
    """

    name, every_stage = "experts", True

    def __init__(self, routing: RoutingReplay, rows: RouterRows, *, rank: int, records: bool, requires: bool) -> None:
        self.routing, self.rows, self.rank = routing, rows, rank
        self.records, self.requires = records, requires

    def check(self, facts: BatchFacts) -> None:
        if self.requires:
            require_routed(facts, (self.rows.num_layers, self.rows.top_k))

    def pack(self, laid: LaidMicroBatch) -> torch.Tensor | None:
        """Return the expert numbers to replay at this rank's routers; None if no sample has any.

        The result is int16 [this rank's routers, tokens that they see, top_k].
        """
        experts = lay_experts(laid.layout, laid.rows, laid.read, laid.positions, self.rows)
        return None if experts is None else send(torch.from_numpy(experts), HOST.device)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.routing.forget()

    def forward(
        self, chunk: int, microbatch: PackedMicroBatch, *, trains: bool
    ) -> contextlib.AbstractContextManager[None]:
        return self.routing.forward(chunk, microbatch, microbatch.of_parts[self.name], counts=trains)

    @contextlib.contextmanager
    def recording(self) -> Iterator[RecordedPass]:
        with self.routing.recording() as routers:
            yield RecordedPass(routers=routers, rows=self.rows, rank=self.rank)

    def take_sums(self) -> dict[str, float]:
        """Return {"replayed": number of replayed tokens, "rerouted": those whose router chose other experts}."""
        rerouted, replayed = reduce_on_host(self.routing.counts.cpu()).tolist()
        self.forget_sums()
        return {"rerouted": float(rerouted), "replayed": float(replayed)}

    def forget_sums(self) -> None:
        self.routing.counts.zero_()


def build_replayed_experts(model: TrainableModel) -> ReplayedExperts:
    """Set up the replay of experts at the policy's routers. Raises ConfigError if the model cannot replay them."""
    config, grid, shape = model.config, model.topology, model.shape
    check_routing_replay(config.rollout.routing_replay, config.megatron.transformer, shape)
    routing = RoutingReplay([chunk.module for chunk in model.chunks])
    sliced = config.parallel.sequence_parallel
    rows = RouterRows(
        layers=routing.layers,
        num_layers=shape.num_layers,
        top_k=shape.experts_per_token,
        slice_rank=grid.tensor_rank if sliced else 0,
        slices=grid.tensor_size if sliced else 1,
    )
    setting = config.rollout.routing_replay
    records, requires = setting == "old_logprobs", setting == "rollout"
    return ReplayedExperts(routing, rows, rank=grid.rank, records=records, requires=requires)


def require_routed(facts: BatchFacts, shape: tuple[int, int]) -> None:
    """Raise ValueError, on every rank alike, if a sample has no routed experts, or experts of another shape.

    shape: (layers, experts per token) of the policy, which every sample must have.
    """
    shapes = np.zeros((facts.num_samples, 2), dtype=np.int64) if facts.routed_shapes is None else facts.routed_shapes
    wrong = np.flatnonzero((shapes != shape).any(axis=1))
    if not len(wrong):
        return
    i, (layers, top_k) = int(wrong[0]), shape
    theirs = f"routed_experts of [tokens, {shapes[i][0]}, {shapes[i][1]}]" if shapes[i].any() else "no routed_experts"
    raise ValueError(
        f"sample {facts.sample_ids[i]} came with {theirs} ({len(wrong)} such samples), and "
        f"rollout.routing_replay=rollout wants int16 [{facts.total_tokens[i]}, {layers}, {top_k}] of it (tokens, "
        "layers, experts per token); see to it that the engine serves the model of model.hf_path and returns its "
        "experts, or set rollout.routing_replay=off"
    )
