"""The measurements of one topology, for megatron-rl verify: log-probs, gradients, weights after steps, activations."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithm.advantage import reduction_weights
from megatron_rl.algorithm.sharing import token_coupling
from megatron_rl.algorithm.signal import has_signal
from megatron_rl.backend import MegatronBackend
from megatron_rl.backend.batch import Batch
from megatron_rl.commands.verify.compare import Measured, Point
from megatron_rl.commands.verify.faults import Fault, output_projection
from megatron_rl.commands.verify.thin import Work
from megatron_rl.config import Config
from megatron_rl.distributed import topology
from megatron_rl.distributed.collectives import gather_json
from megatron_rl.distributed.platform import HOST
from megatron_rl.distributed.watchdog import Watchdog
from megatron_rl.types import LossInputs, Sample, StepPlan

NUM_STEPS = 3


@dataclass(kw_only=True)
class Bench:
    """Holds a backend, the samples to measure it with, and the batch of these samples over all ranks."""

    backend: MegatronBackend
    work: Work
    batch: Batch

    def mini_batch(self, *, drops: bool) -> tuple[StepPlan, bytes]:
        """Plan the whole batch as one optimizer step; return (plan, digest of the plan).

        By the digest the ranks later check that their plans are equal. Afterwards ``self.batch`` also
        has the tokens of the samples that this rank runs.

        drops: whether samples without signal are dropped.
        """
        signal = has_signal(self.work.advantages, self.batch.facts.loss_tokens)
        plan = self.backend.plan_training(self.batch, signal, drops=drops)
        self.batch = self.backend.fetch_rows(self.batch, plan)
        (mini_batch,) = plan.mini_batches
        return mini_batch, plan.fingerprints()[0]

    def accumulate(self, *, drops: bool) -> StepPlan:
        config = self.backend.config
        mini_batch, fingerprint = self.mini_batch(drops=drops)
        weights = reduction_weights(
            config.loss.reduction,
            self.batch.facts,
            mini_batch.members,
            max_response_tokens=config.rollout.max_response_tokens,
        )
        old = np.concatenate([s.logprobs for s in self.work.samples])
        reference = old + np.float32(0.1) if config.loss.kl_coefficient else None
        inputs = LossInputs(
            advantages=self.work.advantages * weights, weights=weights, old_logprobs=old, reference_logprobs=reference
        )
        self.backend.forward_backward(self.batch, mini_batch, inputs, fingerprint=fingerprint)
        return mini_batch

    def gradient(self, *, drops: bool) -> tuple[dict[str, torch.Tensor], StepPlan]:
        mini_batch = self.accumulate(drops=drops)
        gradient = self.backend.gradient()
        self.backend.zero_grad()
        return {name: x.float().cpu() for name, x in gradient.items()}, mini_batch

    def logprobs(self) -> dict[str, np.ndarray]:
        flat = self.backend.logprobs(self.batch, np.ones(len(self.work.samples), dtype=bool)).flat
        parts = np.split(flat, self.batch.facts.response_offsets[1:-1])
        return dict(zip(self.batch.facts.sample_ids, parts, strict=True))

    def steps(self) -> tuple[list[float], dict[str, torch.Tensor]]:
        """Take three optimizer steps on the same samples; return (gradient norm of each step, weights at the end).

        No sample is dropped. The weights are {Hugging Face name: float32 tensor on the host}.
        """
        norms = []
        for _ in range(NUM_STEPS):
            kind = self.accumulate(drops=False).kind
            norms.append(self.backend.optim_step(kind).grad_norm)
        return norms, {name: x.float().cpu().clone() for name, x in self.backend.export()}


@contextlib.contextmanager
def open_bench(backend: MegatronBackend, work: Work, fault: Fault | None = None) -> Iterator[Bench]:
    """Yield a Bench, which measures the backend.

    work: the samples to measure the backend with.
    fault: a deliberate error to put into the backend; None for none.

    At the end Megatron's process groups are destroyed, but torch.distributed stays initialized.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(topology.destroy)
        if fault is not None:
            stack.enter_context(fault.planted(backend))
        yield Bench(backend=backend, work=work, batch=gather(backend, work.samples, work.groups))


def gather(backend: MegatronBackend, samples: tuple[Sample, ...], groups: tuple[int, ...]) -> Batch:
    """Return the batch of the samples over all ranks; rank r contributes samples r, r + world size, …

    groups: for each sample, the number of its group.
    """
    mine = range(backend.topology.rank, len(samples), backend.topology.world_size)
    return backend.gather([samples[i] for i in mine], [groups[i] for i in mine], list(mine))


def measure_reference(
    config: Config, hf_config, weights: Mapping[str, torch.Tensor], work: Work
) -> tuple[Measured, Work]:
    """Measure one process; return (the measurements, a copy of ``work`` with new log-probs).

    The new log-probs lie near the model's own, as if an engine with slightly other weights had
    generated the samples.

    torch.distributed is initialized for this process alone, and destroyed at the end.

    hf_config: the thin model's Hugging Face config.
    weights: {Hugging Face name: tensor}.
    """
    timeout = datetime.timedelta(seconds=config.run.deadline_s)
    # Without a store of its own, under torchrun this process would join the store of all ranks
    # (TORCHELASTIC_USE_AGENT_STORE).
    dist.init_process_group(HOST.backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        backend = MegatronBackend(config, hf_config=hf_config, weights=weights, total_steps=NUM_STEPS)
        with open_bench(backend, work) as bench:
            logprobs = bench.logprobs()
            bench.work = work = work.near_policy(np.concatenate(list(logprobs.values())))
            bench.batch = gather(bench.backend, work.samples, work.groups)
            (trace,) = trace_sample(bench.backend, work.traced)
            gradient, _ = bench.gradient(drops=False)
            norms, after = bench.steps()
            return Measured(
                logprobs=logprobs, gradient=gradient, grad_norm=norms[0], weights=after, traces=[trace]
            ), work
    finally:
        dist.destroy_process_group()


def measure_topology(bench: Bench, watch: Watchdog, *, skips: bool) -> Measured:
    """Return the log-probs, gradients and activations under the user's topology.

    ``add_steps`` later adds the fields ``grad_norm`` and ``weights``.

    watch: the watchdog, which ends a measurement that hangs.
    skips: whether the gradient is also measured with the samples without signal dropped.
    """
    with watch.stage("activations of one sample"):
        traces = trace_sample(bench.backend, bench.work.traced)
    with watch.stage("log-probs"):
        logprobs = bench.logprobs()
    with watch.stage("dense gradient"):
        gradient, dense = bench.gradient(drops=False)
    facts = {"microbatches": dense.num_microbatches.tolist(), "layer_spec": bench.backend.shape.layer_spec}
    facts |= {"holders": token_holders(bench.backend, run_tokens(bench.backend, bench.work.traced))}
    skip_gradient = None
    if skips:
        with watch.stage("skip gradient"):
            skip_gradient, skip = bench.gradient(drops=True)
        facts |= {"skip_microbatches": skip.num_microbatches.tolist(), "dropped": len(skip.dropped)}
    return Measured(
        logprobs=logprobs,
        gradient=gradient,
        grad_norm=math.nan,
        weights={},
        traces=traces,
        skip_gradient=skip_gradient,
        facts=facts,
    )


def add_steps(measured: Measured, bench: Bench, watch: Watchdog) -> Measured:
    with watch.stage("optimizer steps"):
        norms, weights = bench.steps()
    facts = {**measured.facts, "adam": bench.backend.optimizer.kernel}
    return dataclasses.replace(measured, grad_norm=norms[0], weights=weights, facts=facts)


def token_holders(backend: MegatronBackend, tokens: int) -> list[int]:
    """Return, for each token of the traced sample, the number of the context-parallel rank that holds it.

    tokens: the number of the sample's tokens.

    With CP context-parallel ranks, a sample is split into 2·CP chunks. Rank r holds the chunks r and
    2·CP − 1 − r.
    """
    ranks = backend.topology.context_size
    if ranks == 1:
        return [0] * tokens
    padded = -(-tokens // backend.rules.pad_multiple) * backend.rules.pad_multiple
    chunks = [i * 2 * ranks // padded for i in range(tokens)]
    return [min(chunk, 2 * ranks - 1 - chunk) for chunk in chunks]


# ---- activations of one sample ----


def trace_sample(backend: MegatronBackend, sample: Sample) -> list[dict[Point, list[torch.Tensor]]]:
    """Run one sample alone on every data-parallel replica; return its activations, pads cut off. A collective.

    The main rank gets one dict per replica, {Point: list of [tokens, columns]}. The list has one
    tensor, or one for each rank that holds a copy of it. The other ranks get [].
    """
    ranks = backend.topology
    copies = tuple(dataclasses.replace(sample, sample_id=f"{sample.sample_id}{d}") for d in range(ranks.data_size))
    batch = gather(backend, copies, tuple(range(ranks.data_size)))
    rules = backend.rules
    # so that each replica runs one copy
    backend.rules = dataclasses.replace(rules, samples_per_microbatch=1, repack=True)
    with record(backend) as taken:
        backend.logprobs(batch, np.ones(ranks.data_size, dtype=bool))
    backend.rules = rules
    return assemble(backend, taken, run_tokens(backend, sample))


def run_tokens(backend: MegatronBackend, sample: Sample) -> int:
    """Return the number of a sample's tokens that run through the model.

    They are the tokens before the last loss token. All tokens run if a setting makes a sample's
    activations depend on the tokens of other samples.
    """
    if token_coupling(backend.config.megatron):
        return len(sample.token_ids)
    return sample.prompt_tokens + int(np.flatnonzero(sample.loss_mask)[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Holds one rank's part of one tensor of the forward pass; the Point names the tensor.

    part: [tokens of the rank, columns of the rank] float32.
    columns: True if each tensor-parallel rank holds a slice of the columns; False if it holds a
        slice of the tokens or a copy.
    """

    point: Point
    part: torch.Tensor
    columns: bool


@dataclass(kw_only=True)
class Record:
    parts: dict[Point, Taken] = dataclasses.field(default_factory=dict)
    positions: list[int] = dataclasses.field(default_factory=list)

    def keep(self, layer: int, name: str, value: torch.Tensor, *, columns: bool = False) -> None:
        """Store one tensor of the first micro-batch's forward pass; ignore those of later micro-batches.

        Later micro-batches are fillers of weight zero, added so that all ranks run equally many.

        layer, name: the fields of the Point.
        value: the activations on this rank, [..., columns].
        columns: True if each tensor-parallel rank holds a slice of the columns.
        """
        point = Point(layer=layer, name=name)
        if point not in self.parts:
            flat = value.detach().float().reshape(-1, value.shape[-1])
            self.parts[point] = Taken(point=point, part=flat.clone(), columns=columns)


@contextlib.contextmanager
def record(backend: MegatronBackend) -> Iterator[Record]:
    """Yield a Record that forward hooks fill with this rank's activations; remove the hooks at the end.

    The Record has the activations at each Point, and the positions of this rank's tokens in the sample.
    """
    taken, handles = Record(), []

    # The hooks: of a module's output, of its argument, and of the token positions.
    def output(module, layer: int, name: str, *, columns: bool = False) -> None:
        def hook(_module, _args, result) -> None:
            taken.keep(layer, name, result[0] if isinstance(result, tuple) else result, columns=columns)

        handles.append(module.register_forward_hook(hook))

    def argument(module, layer: int, name: str, *, columns: bool = False) -> None:
        def hook(_module, args, kwargs) -> None:
            taken.keep(layer, name, args[0] if args else kwargs["hidden_states"], columns=columns)

        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def where(_module, args) -> None:
        if not taken.positions:  # in a single sequence, a token's position is its index
            taken.positions.extend(args[1].flatten().tolist())

    # Put them on this rank's chunks.
    for chunk in backend.chunks:
        model = chunk.module
        handles.append(model.register_forward_pre_hook(where))
        if model.pre_process:
            output(model.embedding, -1, "embedding")
        for block in model.decoder.layers:
            layer = block.layer_number - 1  # Megatron-Core counts from 1, over all stages
            argument(block, layer, "layer input")
            mixer = "delta net" if backend.shape.has_delta_net(layer) else "attention"
            argument(output_projection(block), layer, f"{mixer} core", columns=True)
            output(block.self_attention, layer, f"{mixer} output")
            mixture = "router" in dict(block.mlp.named_children())
            if mixture:
                output(block.mlp.router, layer, "router")
            output(block.mlp, layer, "experts output" if mixture else "mlp output")
            output(block, layer, "layer output")
        if model.post_process:
            output(model.decoder.final_layernorm, -1, "final norm")
    try:
        yield taken
    finally:
        for handle in handles:
            handle.remove()


def assemble(backend: MegatronBackend, taken: Record, num_tokens: int) -> list[dict[Point, list[torch.Tensor]]]:
    """Gather every rank's activations on the main rank, and join them to whole tensors.

    taken: this rank's activations, recorded in one forward pass.
    num_tokens: the tokens to keep; pads behind them are cut off.

    Returns, on the main rank, one dict per replica, {Point: list of [tokens, columns]}, as
    ``trace_sample`` does; [] on the other ranks.
    """
    ranks = backend.topology
    # Every rank reports the shapes of its parts and sends them in one tensor.
    parts = list(taken.parts.values())
    reports = gather_json(
        {
            "replica": ranks.data_rank,
            "tensor": ranks.tensor_rank,
            "context": ranks.context_rank,
            "positions": taken.positions,
            "parts": [[x.point.layer, x.point.name, list(x.part.shape), x.columns] for x in parts],
        }
    )
    flat = torch.cat([x.part.reshape(-1) for x in parts])
    if not ranks.is_main:
        dist.send(flat.contiguous(), 0)
        return []
    # The main rank sorts them by replica and Point, then joins each Point's parts.
    pieces: list[dict[Point, dict[tuple[int, int], torch.Tensor]]] = [{} for _ in range(ranks.data_size)]
    columns, positions = {}, {}
    for rank, report in enumerate(reports):
        sizes = [math.prod(shape) for _, _, shape, _ in report["parts"]]
        if rank:
            flat = torch.empty(sum(sizes), dtype=torch.float32, device=HOST.device)
            dist.recv(flat, rank)
        positions[report["context"]] = report["positions"]
        for (layer, name, shape, split), part in zip(report["parts"], flat.cpu().split(sizes), strict=True):
            point = Point(layer=layer, name=name)
            pieces[report["replica"]].setdefault(point, {})[report["tensor"], report["context"]] = part.view(shape)
            columns[point] = split
    return [
        {point: [x[:num_tokens] for x in join(parts, columns[point], positions)] for point, parts in replica.items()}
        for replica in pieces
    ]


def join(
    parts: Mapping[tuple[int, int], torch.Tensor], columns: bool, positions: Mapping[int, list[int]]
) -> list[torch.Tensor]:
    """Return one whole tensor of the forward pass, [tokens, columns], joined from the parts of a replica's ranks.

    The list has one tensor, or one for each tensor-parallel rank if these ranks hold copies.

    parts: {(tensor-parallel rank, context-parallel rank): tensor}.
    columns: True if tensor-parallel ranks hold slices of the columns. Otherwise they hold slices of
        the tokens (sequence parallelism), or a copy each.
    positions: {context-parallel rank: positions of its tokens in the sample}.
    """
    tensor_ranks, context_ranks = sorted({t for t, _ in parts}), sorted({c for _, c in parts})
    wholes = []
    for copy in tensor_ranks:
        context_parts = []
        for c in context_ranks:
            shards = [parts[t, c] for t in tensor_ranks]
            rows = len(positions[c])
            if columns:
                context_parts.append(torch.cat(shards, dim=1))
            elif len(shards[0]) < rows:
                context_parts.append(torch.cat(shards))
            else:
                context_parts.append(parts[copy, c])
        indices = torch.tensor([i for c in context_ranks for i in positions[c]])
        joined = torch.cat(context_parts)
        whole = torch.empty_like(joined)
        whole[indices] = joined
        wholes.append(whole)
        if columns or len(parts[copy, context_ranks[0]]) < len(positions[context_ranks[0]]):
            break  # tensor ranks hold no copies: there is one whole
    return wholes
