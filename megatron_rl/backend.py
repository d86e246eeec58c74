"""MegatronBackend: forward, forward_backward, optim_step, export. The library's front door; train.py is one user of it.

    backend = MegatronBackend(config, total_steps=100)
    batch = backend.gather(samples, groups, order)          # facts to everyone
    plan = backend.plan("train", batch, signal)             # the same on every rank
    backend.load_rows(batch, plan)                          # rows where they are needed
    for mini_batch in plan.mini_batches:
        backend.forward_backward(batch, mini_batch, inputs) # as often as you like: gradients add
        result = backend.optim_step(mini_batch.kind)        # one reduction, one step

examples/library/one_step.py is this, whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl import exchange, topology
from megatron_rl.config import Config
from megatron_rl.cost import CostFit
from megatron_rl.loss.objective import Objective
from megatron_rl.model.attention import ContextShard
from megatron_rl.model.build import build_model
from megatron_rl.model.head import head_weight
from megatron_rl.model.logprob import linear_logprob
from megatron_rl.offload import OffloadedBytes
from megatron_rl.optimizer import REFUSED_OPTIMIZER_FIELDS, Optimizer
from megatron_rl.packing import PackedAhead, PackedMicroBatch, pack_microbatch
from megatron_rl.passthrough import resolve_fields
from megatron_rl.plan import plan_rules, plan_steps, split_mini_batches
from megatron_rl.platform import HOST
from megatron_rl.schedule import Schedule, check_lockstep, measured_sums
from megatron_rl.signal import refuse_uncounted_losses
from megatron_rl.types import BatchFacts, ConfigError, LossInputs, MiniBatchPlan, Sample, StepKind, StepPlan, StepResult
from megatron_rl.weights.export import (
    BUCKET_BYTES,
    HuggingFaceReader,
    MemoryReader,
    WeightReader,
    export_weights,
    load_weights,
    save_hugging_face,
)
from megatron_rl.weights.fused import file_tensors

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # isort: skip
from megatron.core.optimizer import OptimizerConfig  # isort: skip

_SEAM = "the token-sum seam owns it"
REFUSED_DDP_FIELDS = {
    "average_in_collective": f"{_SEAM}: data-parallel ranks add, they are not averaged",
    "use_distributed_optimizer": "it is set by optimizer.distributed",
    "use_megatron_fsdp": "its buffers have no ghost step yet",
    "num_distributed_optimizer_instances": "a silent rank would not know the second reduction",
}
SUMS = ("loss", "tokens", "entropy", "kl", "clipped", "ratio")


@dataclass(slots=True, kw_only=True)
class Batch:
    """Facts of all samples, the rows this rank produced, and the rows that the current plan brought."""

    facts: BatchFacts
    local: Sequence[Sample]
    rows: Mapping[int, Sample] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogProbs:
    """Old log-probs, flat over the batch's response tokens (float32, 0 where not passed), and sums of their gap to the engine's."""

    flat: np.ndarray
    sums: Mapping[str, float]


class MegatronBackend:
    """The policy on this rank: model, schedule, optimizer. Every method is a collective unless it says otherwise."""

    def __init__(self, config: Config, *, hf_config=None, weights: Mapping[str, torch.Tensor] | None = None, total_steps: int = 1):
        """hf_config, weights (by the names of checkpoint files): taken from ``model.hf_path`` unless given. total_steps: where the
        learning rate's decay ends.

        Raises ConfigError for settings that cannot work together.
        """
        self.config = config
        refuse_uncounted_losses(config)
        ddp_fields = self._ddp_fields()
        parallel = config.parallel
        self.topology = topology.initialize(
            tensor=parallel.tensor, pipeline=parallel.pipeline, virtual_pipeline=parallel.virtual_pipeline, context=parallel.context,
            expert=parallel.expert, expert_tensor=parallel.expert_tensor, deadline_s=config.run.deadline_s, seed=config.run.seed,
        )  # fmt: skip
        if hf_config is None:
            from transformers import AutoConfig

            hf_config = AutoConfig.from_pretrained(config.model.hf_path)
        self.hf_config = hf_config
        models, self.shape = build_model(config, hf_config, self.topology)
        load_weights(models, self.shape, self.topology, self._reader(weights))
        ddp = DistributedDataParallelConfig(**ddp_fields)
        # later chunks' gradients are reduced behind the first's backward: Megatron-LM does not bucket them
        self.chunks = [DistributedDataParallel(m.config, ddp, m, disable_bucketing=i > 0) for i, m in enumerate(models)]
        self.schedule = Schedule(self.chunks, self.topology)
        self.optimizer = Optimizer(self.chunks, config, self.topology, total_steps=total_steps)
        self.objective = Objective(config.loss, self._sum_over_context)
        self.rules = plan_rules(config, self.topology, self.shape)
        self.fit = CostFit(self.rules.cost)
        self.weight_version = 0
        self.step_index = 0
        self._sums = torch.zeros(len(SUMS), dtype=torch.float64)
        self._accumulated = False
        self._packer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="packing")
        self._copies = torch.cuda.Stream() if HOST.is_cuda else None
        self._reference: list[torch.Tensor] | None = None
        self.zero_grad()

    def _sum_over_context(self, sums: torch.Tensor) -> torch.Tensor:
        """Adds what each context rank's tokens gave; no gradient passes."""
        if self.topology.context_size > 1:
            dist.all_reduce(sums, group=self.topology.context_group)
        return sums

    def _ddp_fields(self) -> dict:
        """DDP's fields, ours and ``megatron.ddp``'s; ConfigError for any field of ``megatron.*`` that may not be set."""
        given = self.config.megatron
        resolve_fields(given.optimizer, OptimizerConfig, "megatron.optimizer", REFUSED_OPTIMIZER_FIELDS)
        fields = resolve_fields(given.ddp, DistributedDataParallelConfig, "megatron.ddp", REFUSED_DDP_FIELDS)
        if given.ddp.get("overlap_param_gather") and not self.config.optimizer.distributed:
            raise ConfigError(
                "megatron.ddp.overlap_param_gather=true needs optimizer.distributed=true, which shards the parameters it gathers"
            )
        return {"grad_reduce_in_fp32": True, **fields, "use_distributed_optimizer": self.config.optimizer.distributed}

    def _reader(self, weights: Mapping[str, torch.Tensor] | None) -> WeightReader:
        if weights is not None:
            return MemoryReader(weights)
        if self.config.model.init == "pretrained":
            return HuggingFaceReader(self.config.model.hf_path)
        from transformers import AutoModelForCausalLM

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config.run.seed)
            model = AutoModelForCausalLM.from_config(self.hf_config)
            return MemoryReader(file_tensors(model.state_dict(), self.hf_config.model_type))

    def reset_optimizer(
        self, *, total_steps: int, lr: float | None = None, weight_decay: float | None = None, constant: bool = False
    ) -> None:
        """A fresh AdamW over the same weights: moments and schedule at zero (between a supervised warm-up and RL)."""
        self.optimizer.refuse_offloaded("reset_optimizer()")
        self.optimizer = Optimizer(
            self.chunks, self.config, self.topology, total_steps=total_steps, lr=lr, weight_decay=weight_decay, constant=constant
        )
        self.optimizer.zero_grad()

    # ---- the batch -------------------------------------------------------------------------------------------------

    def gather(self, samples: Sequence[Sample], groups: Sequence[int], order: Sequence[int]) -> Batch:
        """Makes a batch of every rank's samples; see exchange.gather_facts."""
        facts = exchange.gather_facts(samples, groups, order)
        longest = int(facts.total_tokens.max(initial=0))
        if longest > self.shape.context_tokens:
            name = facts.sample_ids[int(facts.total_tokens.argmax())]
            raise ValueError(f"sample {name} has {longest} tokens and the model's context is {self.shape.context_tokens}")
        return Batch(facts=facts, local=samples)

    def plan(self, purpose: str, batch: Batch, signal: np.ndarray, *, drops: bool, samples: np.ndarray | None = None) -> StepPlan:
        """Not a collective. "logprob" takes the batch whole; any other purpose splits it in mini-batches."""
        members = np.arange(batch.facts.num_samples) if samples is None else samples
        whole = purpose == "logprob"
        mini_batches = [members] if whole else split_mini_batches(members, self.config.train.samples_per_mini_batch)
        merge = not whole and self.config.skip.steps == "merge" and drops
        facts = batch.facts
        return plan_steps(
            purpose, mini_batches, facts.total_tokens, signal, self.rules, drops=drops, merge=merge, sample_ids=facts.sample_ids
        )

    def load_rows(self, batch: Batch, plan: StepPlan) -> None:
        """Brings the rows that the plan's micro-batches need to the ranks that run them.

        Ranks compare the plan first: all-to-alls of other sizes than the peer's end in gloo's ``terminate``, without a Python error.
        """
        whole = hashlib.sha256(b"".join(plan.fingerprints())).digest()
        check_lockstep(self.step_index, plan.mini_batches[0].kind, whole, self.topology)
        needed = exchange.needed_rows(plan, self.topology)
        batch.rows = exchange.bring_rows(batch.facts, batch.local, needed, self.topology)

    def _pack(self, batch: Batch, mini_batch: MiniBatchPlan, inputs: LossInputs | None) -> PackedAhead:
        place = self.topology
        context = ContextShard(rank=place.context_rank, size=place.context_size, group=place.context_group)
        pad = self.hf_config.pad_token_id if isinstance(self.hf_config.pad_token_id, int) else 0
        pack = partial(
            pack_microbatch, facts=batch.facts, rows=batch.rows, inputs=inputs, pad_multiple=self.rules.pad_multiple,
            pad_token=max(pad, 0), needs_tokens=place.is_first_stage, needs_loss=place.is_last_stage, device=HOST.device,
            context=context, for_transformer_engine=self.shape.layer_spec == "transformer_engine",
        )  # fmt: skip
        return PackedAhead(list(mini_batch.microbatches(place.data_rank)), pack, self._packer, self._copies)

    def _logprobs(self, hidden: torch.Tensor, targets: torch.Tensor, *, train_entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        return linear_logprob(
            hidden, head_weight(self.chunks[-1].module), targets, temperature=self.config.rollout.temperature,
            vocab_size=self.shape.vocab_size, tensor_rank=self.topology.tensor_rank, group=self.topology.tensor_group,
            train_entropy=train_entropy, reduce_hidden_grad=not self.config.parallel.sequence_parallel,
        )  # fmt: skip

    # ---- forward and backward --------------------------------------------------------------------------------------

    def forward(self, batch: Batch, plan: StepPlan) -> LogProbs:
        """Log-probs of the plan's samples under the current weights, on every rank. Rows must have been loaded for this plan."""
        (mini_batch,) = plan.mini_batches
        check_lockstep(self.step_index, mini_batch.kind, plan.fingerprints()[0], self.topology)
        flat = torch.zeros(int(batch.facts.response_offsets[-1]), dtype=torch.float32, device=HOST.device)
        gaps = torch.zeros(3, dtype=torch.float64, device=HOST.device)
        highest = torch.zeros(1, dtype=torch.float64, device=HOST.device)

        def keep(microbatch: PackedMicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, dict]:
            logprobs, _ = self._logprobs(hidden, microbatch.targets)
            return logprobs.sum(), {"logprobs": logprobs, "flat": microbatch.flat, "gap": logprobs - microbatch.rollout_logprobs}

        for chunk in self.chunks:
            chunk.eval()
        for kept in self.schedule.run(mini_batch, self._pack(batch, mini_batch, None), keep, forward_only=True):
            if self.topology.reports_loss:
                flat[torch.from_numpy(kept["flat"]).to(flat.device)] = kept["logprobs"]
                gap = kept["gap"].double()
                gaps += torch.stack([gap.abs().sum(), ((-gap).exp() + gap - 1).sum(), torch.ones_like(gap).sum()])
                highest = torch.cat([highest, gap.abs()]).max()[None]  # a micro-batch may hold no loss token at all
        for chunk in self.chunks:
            chunk.train()
        if mini_batch.kind is StepKind.REAL:
            dist.all_reduce(flat)
            dist.all_reduce(gaps)
            dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        absolute, k3, tokens = gaps.tolist()
        sums = {"tokens": tokens, "logprob_gap_abs": absolute, "logprob_gap_k3": k3, "logprob_gap_max": highest.item()}
        return LogProbs(flat=flat.cpu().numpy(), sums=sums)

    def logprobs(self, batch: Batch, chosen: np.ndarray) -> LogProbs:
        """``forward`` over the samples chosen [S] bool, under a plan of its own."""
        plan = self.plan("logprob", batch, chosen, drops=True)
        self.load_rows(batch, plan)
        return self.forward(batch, plan)

    def gather_rollout_logprobs(self, batch: Batch) -> np.ndarray:
        """The engine's own log-probs of the whole batch, flat over response tokens, float32, on every rank."""
        return exchange.gather_flat(batch.facts, batch.local, self.topology.rank, lambda sample: sample.logprobs)

    def gather_loss_mask(self, batch: Batch) -> np.ndarray:
        """[T] bool, flat over response tokens, on every rank: where a token carries loss."""
        return exchange.gather_flat(batch.facts, batch.local, self.topology.rank, lambda sample: sample.loss_mask) > 0

    def forward_backward(
        self, batch: Batch, mini_batch: MiniBatchPlan, inputs: LossInputs, *, fingerprint: bytes, supervised: bool = False
    ) -> None:
        """Adds the mini-batch's gradient to what has been accumulated. Several calls may precede one ``optim_step``."""
        self.optimizer.refuse_offloaded("forward_backward()")
        check_lockstep(self.step_index, mini_batch.kind, fingerprint, self.topology)
        self._accumulated = self._accumulated or mini_batch.kind is StepKind.REAL
        objective = self.objective.supervised if supervised else self.objective.policy

        def loss(microbatch: PackedMicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, dict]:
            logprobs, entropy = self._logprobs(hidden, microbatch.targets, train_entropy=self.objective.trains_entropy)
            total, sums = objective(microbatch, logprobs, entropy)
            return total, {"sums": sums}

        kept = self.schedule.run(mini_batch, self._pack(batch, mini_batch, inputs), loss, forward_only=False)
        if kept and self.topology.reports_loss:
            self._sums += torch.stack([each["sums"] for each in kept]).sum(0).cpu()  # one copy to the host per step

    def zero_grad(self) -> None:
        """Throws away what ``forward_backward`` has accumulated. ``optim_step`` ends with it; not a collective."""
        self.optimizer.zero_grad()
        self.schedule.forget_measured()
        self._sums.zero_()
        self._accumulated = False

    def optim_step(self, kind: StepKind) -> StepResult:
        """Reduces and finalizes once what ``forward_backward`` accumulated, and steps; a GHOST steps without a gradient."""
        if kind is StepKind.GHOST and self._accumulated:
            raise ValueError("optim_step(GHOST) would discard the gradient that forward_backward has accumulated; step with StepKind.REAL")
        outcome = self.optimizer.step(kind)
        self._accumulated = False
        sums = dict.fromkeys(SUMS, 0.0)
        if kind is StepKind.REAL:
            measured = np.zeros_like(self.fit.sums)
            measured[self.topology.pipeline_rank] = measured_sums(self.schedule.take_laps())
            total = torch.cat([self._sums, torch.from_numpy(measured).flatten()]).to(HOST.device)
            dist.all_reduce(total)
            reduced = total.cpu()
            sums = dict(zip(SUMS, reduced[: len(SUMS)].tolist(), strict=True))
            self._calibrate(reduced[len(SUMS) :].view(measured.shape).numpy())
        self._sums.zero_()
        self.step_index += 1
        self.weight_version += int(outcome.applied)
        return StepResult(kind=kind, grad_norm=outcome.grad_norm, learning_rate=outcome.learning_rate, applied=outcome.applied, sums=sums)

    def offload(self) -> OffloadedBytes:
        """Gradients and optimizer state leave the device until ``restore``, for an engine that shares it; says how many bytes.

        Weights stay: ``forward``, ``export`` and the reference policy work meanwhile. What trains, saves or loads raises ValueError.
        Not a collective. Raises ValueError where a gradient is accumulated, which would be lost.
        """
        if self._accumulated:
            raise ValueError(
                "offload() would discard the gradient that forward_backward has accumulated; call optim_step or zero_grad first"
            )
        return self.optimizer.offload()

    def restore(self) -> None:
        """Undoes ``offload``, to the bit; nothing where there is nothing to undo. Not a collective."""
        self.optimizer.restore()

    def _calibrate(self, measured: np.ndarray) -> None:
        """Takes one step's measured micro-batches, of all ranks; they move later plans where ``plan.calibrate`` is on."""
        self.fit.add(measured)
        if self.config.plan.calibrate:
            self.rules = dataclasses.replace(self.rules, cost=self.fit.model())

    def gradient(self) -> dict[str, torch.Tensor]:
        """The accumulated gradient under Hugging Face names, whole, reduced. For tests and tools: it consumes the reduction,
        so ``optim_step`` must not follow; call ``zero_grad()``."""
        if self.config.optimizer.distributed and self.topology.data_size * self.topology.context_size > 1:
            raise ValueError("gradient() needs optimizer.distributed=false: a reduce-scatter leaves each rank its shard only")
        self.optimizer._reduce_gradients()
        gradients = [{name: p.main_grad for name, p in chunk.module.named_parameters()} for chunk in self.chunks]
        return {name: x.clone() for name, x in export_weights(gradients, self.shape, self.topology)}

    # ---- weights ---------------------------------------------------------------------------------------------------

    def export(self, *, bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight under its Hugging Face name, whole, on every rank; must be run to its end on all ranks.

        A tensor is valid until the next is asked for: copy it out before. bucket_bytes bounds the memory: ``weights.export``.
        """
        self.schedule.gather_parameters()
        parameters = [dict(chunk.module.named_parameters()) for chunk in self.chunks]
        yield from export_weights(parameters, self.shape, self.topology, bucket_bytes=bucket_bytes)

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for chunk in self.chunks for p in chunk.module.parameters()]

    def keep_reference(self) -> None:
        """Keeps the current weights in host memory as the reference policy. Not a collective but for the parameter gather."""
        self.schedule.gather_parameters()
        self._reference = [p.detach().to("cpu", copy=True) for p in self._parameters()]

    @contextlib.contextmanager
    def reference_weights(self) -> Iterator[None]:
        """Within it the model computes with the reference weights; parameters only, the optimizer's masters are untouched."""
        if self._reference is None:
            raise ValueError("there is no reference policy yet: call keep_reference() first")
        self.schedule.gather_parameters()
        parameters = self._parameters()
        current = [p.detach().clone() for p in parameters]
        try:
            _overwrite(parameters, self._reference)
            yield
        finally:
            _overwrite(parameters, current)

    def save_hugging_face(self, path: pathlib.Path, tokenizer) -> None:
        """Writes the policy as a Hugging Face directory; the main rank writes, all take part."""
        if self.topology.is_main:
            save_hugging_face(self.export(), self.hf_config, tokenizer, path)
        else:
            for _ in self.export():
                pass

    def close(self, *, leave_world: bool = True) -> None:
        """Takes the groups down. The process may build another backend after it."""
        for chunk in self.chunks:
            chunk.grad_accs.clear()  # autograd's hooks hold the chunk and the chunk them, through C++: no collector sees the cycle
            if chunk.ddp_config.use_distributed_optimizer and chunk.ddp_config.overlap_param_gather:
                chunk.disable_forward_pre_hook(param_sync=False)
        self._packer.shutdown(cancel_futures=True)
        topology.destroy(leave_world=leave_world)


@torch.no_grad()
def _overwrite(parameters: Sequence[torch.nn.Parameter], values: Sequence[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
