"""A model that this rank trains: its chunks, schedule and optimizer, and the planning and exchange of its batches.

The policy (backend/backend.py), the critic and the reward model (critic/) are subclasses. Each adds
the numbers that it computes from the hidden states, log-probs or values, and its loss.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithm.repeats import reads_engine_logprobs
from megatron_rl.algorithm.sharing import shares_prompts, token_coupling
from megatron_rl.algorithm.signal import refuse_uncounted_losses
from megatron_rl.backend import batch_exchange
from megatron_rl.backend.batch import Batch
from megatron_rl.backend.megatron_ddp import distributed_fields
from megatron_rl.backend.optimizer import AdamStep, Optimizer
from megatron_rl.backend.packing import FlatInputs, PackedAhead, PackedMicroBatch, Packer
from megatron_rl.backend.part import BackendPart, ReferenceWeights
from megatron_rl.backend.schedule import Schedule, check_lockstep, measured_sums
from megatron_rl.backend.step_sums import StepSums
from megatron_rl.config import Config, LoraConfig
from megatron_rl.config.optimizer import OptimizerConfig
from megatron_rl.distributed import topology
from megatron_rl.distributed.collectives import reduce_on_host
from megatron_rl.distributed.cuda_environment import prepare_cuda, wanted_variables
from megatron_rl.distributed.platform import HOST, send
from megatron_rl.model.build import build_model, settled_shape
from megatron_rl.model.settings import ModelSettings
from megatron_rl.planning.cost import CostFit
from megatron_rl.planning.plan import plan_rules, plan_steps, split_mini_batches
from megatron_rl.planning.tokens import tokens_of
from megatron_rl.types import BatchPlan, Sample, StepKind, StepPlan, StepResult
from megatron_rl.weights.config_json import load_hf_config, random_state
from megatron_rl.weights.export import StageEntries, export_weights, load_weights
from megatron_rl.weights.fused import file_tensors
from megatron_rl.weights.mapping import adapter_entries, trained_entries
from megatron_rl.weights.model_dtype import settle_dtype
from megatron_rl.weights.reader import HuggingFaceReader, MemoryReader, WeightReader, check_tensors

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # isort: skip

if TYPE_CHECKING:
    from megatron_rl.backend.offload import OffloadedBytes

log = logging.getLogger(__name__)

REMEMBERED_STEPS = 50  # optimizer steps with a gradient (StepKind.REAL) whose seconds are kept


class TrainableModel:
    """Trains a model on this rank. Every method is a collective unless its docstring says otherwise.

    sum_names: keys of ``StepResult.sums``. Each micro-batch's loss gives its ``sums`` in this
        order, float64 [len(sum_names)].
    num_maxima: how many of the last names hold a maximum (of values ≥ 0) instead of a sum.
    training, reading: the ``purpose`` of the model's plans: of plans for optimizer steps, and of plans
        for forward passes without a gradient. A plan's fingerprint depends on it.
    reference: a policy's reference weights; None before ``keep_reference``.
    parts: optional features (backend/part.py).
    """

    sum_names: tuple[str, ...]
    num_maxima: int = 0
    training, reading = "train", "logprob"
    reference: ReferenceWeights | None = None
    parts: tuple[BackendPart, ...] = ()

    def __init__(
        self,
        config: Config,
        *,
        hf_config=None,
        weights: Mapping[str, torch.Tensor] | None = None,
        total_steps: int = 1,
        value_head: bool = False,
        lora: LoraConfig | None = None,
        grid: topology.Topology | None = None,
    ) -> None:
        """Build the model and its optimizer. Raises ConfigError for settings that cannot work together.

        hf_config: the model's Hugging Face config; None reads it from ``model.hf_path``.
        weights: tensors by their names in checkpoint files; None reads or draws them as
            ``model.init`` says.
        total_steps: the optimizer steps after which the learning rate's decay ends.
        value_head: whether the model gives one number per token, not one per vocabulary entry
            (model/head.py).
        lora: the adapters' settings. None, or a rank of None, means no adapters: every weight is
            trained.
        grid: an existing topology; None builds one from the section ``parallel``.
        """
        refuse_uncounted_losses(config.megatron, config.skip)
        if hf_config is None:
            hf_config = load_hf_config(config.model.hf_path, provider=config.model.provider)
        model = settle_dtype(config.model, hf_config, on_gpu=HOST.is_cuda)
        self.config = config = dataclasses.replace(config, model=model)
        wanted = wanted_variables(config.run, config.parallel, config.megatron, config.rollout, config.weight_sync)
        prepare_cuda(wanted, deterministic=config.run.deterministic)
        with contextlib.nullcontext() if grid else topology.undone_on_failure():
            self.topology = grid or self._join()
            self._build(hf_config, weights, total_steps, value_head, lora)

    def _build(
        self,
        hf_config,
        weights: Mapping[str, torch.Tensor] | None,
        total_steps: int,
        value_head: bool,
        lora: LoraConfig | None,
    ) -> None:
        """Build model, schedule and optimizer on ``self.topology``. ``__init__`` describes the arguments."""
        config = self.config
        ddp_fields = distributed_fields(config.megatron, distributed_optimizer=config.optimizer.distributed)
        self.hf_config, settings = hf_config, ModelSettings.of(config)
        self.shape = settled_shape(settings, hf_config, self.topology, value_head=value_head)
        reader = self._reader(weights)  # raises if config and files differ, before the model takes memory
        models, _ = build_model(settings, hf_config, self.topology, value_head=value_head)
        if lora is not None and lora.rank is not None:
            from megatron_rl.model.lora.adapters import put_adapters

            self.shape = put_adapters(models, self.shape, lora, self.topology, config.run.seed)
        ddp = DistributedDataParallelConfig(**ddp_fields)
        # as in Megatron-LM, later chunks are not bucketed: the first chunk's backward hides their reduction
        self.chunks = [DistributedDataParallel(m.config, ddp, m, disable_bucketing=i > 0) for i, m in enumerate(models)]
        self.parts = self._build_parts()
        self.schedule = Schedule(self.chunks, self.topology, self.shape.windows, self.parts)
        fields = dict(shape=self.shape, megatron=config.megatron, dtype=config.model.dtype, ghost=config.skip.ghost)
        self._make_optimizer = partial(Optimizer, self.chunks, topology=self.topology, **fields)
        self.optimizer = self._make_optimizer(config.optimizer, total_steps=total_steps)
        self._load(reader)
        self.rules = plan_rules(
            config.plan,
            self.topology,
            self.shape,
            sequence_parallel=config.parallel.sequence_parallel,
            fp8=bool(config.megatron.transformer.get("fp8")),
            share_prompts=shares_prompts(config.plan, config.parallel, config.megatron, self.shape.layer_spec),
        )
        self.fit = CostFit(self.rules.cost)
        self.weight_version = self.step_index = 0
        self.optimizer_s: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._sums = StepSums(self.sum_names, self.num_maxima)
        self.packer = Packer.of_rank(self.topology, hf_config.pad_token_id, self.shape.layer_spec, self.parts)
        self._packing_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="packing")
        self._copies = torch.cuda.Stream() if HOST.is_cuda else None
        self.zero_grad()

    def _build_parts(self) -> tuple[BackendPart, ...]:
        return ()

    def _join(self) -> topology.Topology:
        config = self.config
        return topology.initialize(config.parallel, deadline_s=config.run.deadline_s, seed=config.run.seed)

    def _reader(self, weights: Mapping[str, torch.Tensor] | None) -> WeightReader:
        if weights is not None:
            return MemoryReader(weights)
        model, seed = self.config.model, self.config.run.seed
        if model.init == "pretrained":
            reader = HuggingFaceReader(model.hf_path)
            check_tensors(reader, self.shape, allow_unread=model.allow_unread_tensors)
            return reader
        state = random_state(self.hf_config, self.shape, model.hf_path, seed=seed, device=HOST.device)
        return MemoryReader(file_tensors(state, self.hf_config.model_type))

    def _load(self, reader: WeightReader) -> None:
        """Load the weights, and the float32 masters of bfloat16 weights, from a reader of their tensors."""
        self.optimizer.refuse_offloaded("loading weights")
        halves, masters = None, self.optimizer.masters
        if self.config.optimizer.spread_masters:
            from megatron_rl.weights.spread import SpreadReader

            halves = SpreadReader(reader, self.config.run.seed)
        chunks, also = [chunk.module for chunk in self.chunks], masters and masters.set
        load_weights(chunks, self.shape, self.topology, reader, halves=halves, also=also)
        if halves is not None and not halves.found and self.topology.is_main:
            why = "the files are finer than bfloat16" if masters else "float32 weights have no masters"
            log.warning("optimizer.spread_masters=true changes nothing: %s", why)

    def reset_optimizer(self, *, total_steps: int, settings: OptimizerConfig | None = None) -> None:
        """Replace the optimizer by a fresh AdamW over the same weights, with moments and schedule at the start.

        The float32 masters of bfloat16 weights stay as they are.

        settings: an optimizer section, such as the supervised start's; None takes
            ``config.optimizer``.
        """
        self.optimizer.refuse_offloaded("reset_optimizer()")
        optimizer = self._make_optimizer(settings or self.config.optimizer, total_steps=total_steps)
        if optimizer.masters is not None:
            optimizer.masters.take(self.optimizer.masters)
        self.optimizer = optimizer
        optimizer.zero_grad()

    # ---- the batch -------------------------------------------------------------------------------------------------

    def gather(self, samples: Sequence[Sample], groups: Sequence[int], order: Sequence[int]) -> Batch:
        """Return a batch of every rank's samples; ``batch_exchange.gather_facts`` describes the arguments."""
        trains_by_engine = reads_engine_logprobs(self.config)
        facts = batch_exchange.gather_facts(
            samples, groups, order, num_experts=self.shape.num_experts, trains_by_engine=trains_by_engine
        )
        batch_exchange.refuse_too_long(facts, self.shape.context_tokens)
        if token_coupling(self.config.megatron):  # then unused tokens change other tokens' numbers: read them all
            facts = dataclasses.replace(facts, response_inputs=None)
        return Batch(facts=facts, local=samples)

    def plan_training(self, batch: Batch, signal: np.ndarray, *, drops: bool) -> BatchPlan:
        """Return the plan of the batch's optimizer steps, one per mini-batch. Not a collective.

        signal: bool [S], the samples with signal (an advantage other than 0).
        drops: whether samples without signal are left out.
        """
        return self._plan(self.training, self.step_members(batch, drops=drops), batch, signal, drops=drops)

    def step_members(self, batch: Batch, *, drops: bool) -> list[np.ndarray]:
        """Return the samples of each of the batch's optimizer steps, before any is dropped. Not a collective.

        drops: whether samples without signal are left out.
        """
        skip = self.config.skip
        merge = skip.steps == "merge" and drops and skip.mode != "off"
        return split_mini_batches(
            np.arange(batch.facts.num_samples),
            self.config.train.samples_per_mini_batch,
            merge=merge,
            groups=batch.facts.groups,
            group_size=self.config.rollout.unequal_group_size,
        )

    def plan_pass(self, batch: Batch, chosen: np.ndarray, *, drops: bool = True) -> BatchPlan:
        """Return the plan of one forward pass over the samples ``chosen`` (bool [S]). Not a collective.

        drops: True leaves all other samples out. False plans a pass over the whole batch, whatever
            is chosen.
        """
        members = np.arange(batch.facts.num_samples)
        return self._plan(self.reading, [members], batch, chosen, drops=drops)

    def _plan(
        self, purpose: str, mini_batches: list[np.ndarray], batch: Batch, signal: np.ndarray, **cut: bool
    ) -> BatchPlan:
        facts, rules = batch.facts, self.rules
        tokens = tokens_of(facts, share_prompts=rules.share_prompts, windows=self.shape.windows)
        return plan_steps(purpose, mini_batches, tokens, signal, rules, sample_ids=facts.sample_ids, **cut)

    def fetch_rows(self, batch: Batch, plan: BatchPlan) -> Batch:
        """Return the batch with the rows (samples' contents) that this rank needs for the plan's micro-batches.

        Ranks compare the plan first. Without that, unequal plans give an all-to-all unequal sizes,
        and gloo ends the process without a Python error.
        """
        whole = hashlib.sha256(b"".join(plan.fingerprints())).digest()
        check_lockstep(self.step_index, plan.mini_batches[0].kind, whole, self.topology)
        every_stage = any(part.every_stage for part in self.parts)
        needed = batch_exchange.needed_rows(plan, self.topology, every_stage=every_stage)
        rows = batch_exchange.exchange_rows(batch.facts, batch.local, needed, self.topology)
        return dataclasses.replace(batch, rows=rows)

    def _pack(self, batch: Batch, mini_batch: StepPlan, inputs: FlatInputs | None) -> PackedAhead:
        pack = partial(self.packer.pack, batch=batch, inputs=inputs, rules=self.rules)
        microbatches = list(mini_batch.microbatches(self.topology.data_rank))
        return PackedAhead(microbatches, pack, self._packing_thread, self._copies)

    # ---- forward and backward --------------------------------------------------------------------------------------

    def _read(
        self, batch: Batch, plan: BatchPlan, read: Callable[[PackedMicroBatch, torch.Tensor], tuple[torch.Tensor, dict]]
    ) -> tuple[np.ndarray, list[dict]]:
        """Run a forward pass without a gradient over a plan of one mini-batch; return the results of ``read``.

        The batch must hold the samples that this rank runs (``Batch.rows``).

        read: a function of a micro-batch and the hidden states [N, H] at its loss positions. It
            returns N numbers, such as log-probs, and a dict.

        Returns (numbers, dicts). The numbers are float32 [T] over response tokens, sample after
        sample, on every rank; 0 stands for a token that was not read. The dicts are those of this
        rank's micro-batches, [] except on the last pipeline stage's first tensor rank.
        """
        (mini_batch,) = plan.mini_batches
        check_lockstep(self.step_index, mini_batch.kind, plan.fingerprints()[0], self.topology)

        def keep(microbatch: PackedMicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, dict]:
            numbers, more = read(microbatch, hidden)
            return numbers.sum(), {**more, "numbers": numbers, "flat": microbatch.flat}

        for chunk in self.chunks:
            chunk.eval()
        reports = self.schedule.run(mini_batch, self._pack(batch, mini_batch, None), keep, forward_only=True)
        for chunk in self.chunks:
            chunk.train()
        reported = reports if self.topology.reports_loss else []
        return self._spread(batch, mini_batch, reported), reported

    def _spread(self, batch: Batch, mini_batch: StepPlan, reported: Sequence[Mapping]) -> np.ndarray:
        """Return float32 [T] on every rank: all ranks' numbers, such as log-probs, one per response token.

        A token without a number has 0.

        reported: one mapping for each micro-batch of this rank. Its ``numbers`` are the micro-batch's
            numbers, and its ``flat`` holds their indices in the result.
        """
        flat = torch.zeros(int(batch.facts.response_offsets[-1]), dtype=torch.float32, device=HOST.device)
        for report in reported:
            flat[send(torch.from_numpy(report["flat"]), flat.device)] = report["numbers"]
        if mini_batch.kind is StepKind.REAL:
            dist.all_reduce(flat)
        return flat.cpu().numpy()

    def _accumulate(
        self,
        batch: Batch,
        mini_batch: StepPlan,
        inputs: FlatInputs,
        fingerprint: bytes,
        loss: Callable[[PackedMicroBatch, torch.Tensor], tuple[torch.Tensor, dict]],
    ) -> list[dict]:
        """Add the mini-batch's gradient; return the dict that ``loss`` returned for each micro-batch.

        Returns [] except on the last pipeline stage's first tensor rank.

        inputs: the inputs of the loss at each token.
        fingerprint: the digest of the mini-batch's plan; ranks compare it before they start.
        loss: a function of a micro-batch and the hidden states at its loss positions. It returns a
            scalar sum, and a dict whose ``sums`` are float64 [len(sum_names)].
        """
        self.optimizer.refuse_offloaded("forward_backward()")
        check_lockstep(self.step_index, mini_batch.kind, fingerprint, self.topology)
        self._accumulated = self._accumulated or mini_batch.kind is StepKind.REAL
        reports = self.schedule.run(mini_batch, self._pack(batch, mini_batch, inputs), loss, forward_only=False)
        reported = reports if self.topology.reports_loss else []
        if reported:
            self._sums.add([each["sums"] for each in reported])
        return reported

    def zero_grad(self) -> None:
        """Discard the accumulated gradient; ``optim_step`` ends with this call. Not a collective."""
        self.optimizer.zero_grad()
        self.schedule.forget_measured()
        self._sums.zero()
        for part in self.parts:
            part.forget_sums()
        self._accumulated = False

    def optim_step(self, kind: StepKind, adam: AdamStep | None = None) -> StepResult:
        """Take an optimizer step; a step with a gradient (REAL) first reduces the accumulated gradient, once.

        A GHOST step has no gradient: under ``skip.ghost=dense`` AdamW steps on zeros, else the
        step is only counted. A HELD step is always only counted: weights, moments, schedule and
        weight version stay.

        adam: AdamW's settings of this step; None takes the run's settings.

        Raises ValueError for a GHOST or HELD step if a gradient is accumulated: it would be lost.
        """
        if kind is not StepKind.REAL and self._accumulated:
            raise ValueError(
                f"optim_step({kind.value}) would discard the gradient that forward_backward has accumulated; step "
                "with StepKind.REAL, or call zero_grad first"
            )
        sums = dict.fromkeys(self.sum_names, 0.0)
        if kind is StepKind.HELD:
            self.step_index += 1
            rate = self.optimizer.learning_rate
            return StepResult(kind=kind, grad_norm=0.0, learning_rate=rate, applied=False, sums=sums)
        HOST.synchronize()
        started = time.perf_counter()
        outcome = self.optimizer.step(kind, adam)
        self._accumulated = False
        if kind is StepKind.REAL:
            sums = self._reduce_sums()
            self._time_step(started)
        self._sums.zero()
        self.step_index += 1
        self.weight_version += int(outcome.applied)
        return StepResult(kind=kind, sums=sums, **dataclasses.asdict(outcome))

    def _reduce_sums(self) -> dict[str, float]:
        """Return {name: the step's metric sum over all ranks}, those of optional features (``parts``) included.

        It also adds the step's measured times to the cost model's fit.
        """
        measured = np.zeros_like(self.fit.sums)
        measured[self.topology.pipeline_rank] = measured_sums(self.schedule.take_laps())
        sums, reduced = self._sums.reduce(torch.from_numpy(measured))
        self._calibrate(reduced.numpy())
        for part in self.parts:
            sums |= part.take_sums()
        return sums

    def _time_step(self, started: float) -> None:
        """Record how long an optimizer step took: the least time of any rank, since that rank waited least for others.

        started: the value of ``time.perf_counter`` at the step's start.
        """
        HOST.synchronize()
        spent_s = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
        self.optimizer_s.append(reduce_on_host(spent_s, dist.ReduceOp.MIN).item())

    def offload(self) -> OffloadedBytes:
        """Free the device memory of gradients and optimizer state until ``restore``; return the freed bytes.

        An inference engine can then use the memory. Weights stay, so ``forward``, ``export`` and
        the reference policy work meanwhile. Training, saving and loading raise ValueError. Not a
        collective.

        Raises ValueError if a gradient is accumulated: it would be lost.
        """
        if self._accumulated:
            raise ValueError(
                "offload() would discard the gradient that forward_backward has accumulated; call optim_step or "
                "zero_grad first"
            )
        return self.optimizer.offload()

    def restore(self) -> None:
        """Undo ``offload``, bit for bit; do nothing if nothing is offloaded. Not a collective."""
        self.optimizer.restore()

    def _calibrate(self, measured: np.ndarray) -> None:
        """Add one step's measured times to the cost model's fit; under ``plan.calibrate`` later plans use the fit.

        measured: float64 [pipeline stages, NUM_SUMS], the step's ``measured_sums`` (backend/schedule.py)
            of each stage, summed over its ranks.
        """
        self.fit.add(measured)
        if self.config.plan.calibrate:
            self.rules = dataclasses.replace(self.rules, cost=self.fit.model())

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return this rank's parameters, model chunk by model chunk. Not a collective."""
        return [p for chunk in self.chunks for p in chunk.module.parameters()]

    def gradient(self) -> dict[str, torch.Tensor]:
        """Return {weight: its accumulated gradient}, whole and reduced over ranks; for tests and tools.

        Weights have Hugging Face's names, adapters PEFT's (``….q_proj.lora_A.weight``). The call
        uses up the step's one reduction: call ``zero_grad()`` after it, not ``optim_step``.
        """
        self.optimizer.reduce_gradients()
        self.optimizer.gather_gradients()
        gradients = [
            {name: p.main_grad for name, p in chunk.module.named_parameters() if p.requires_grad}
            for chunk in self.chunks
        ]
        return {
            name: x.clone()
            for name, x in export_weights(gradients, self.shape, self.topology, entries=self.trained_entries)
        }

    def frozen_checksum(self) -> str | None:
        """Return the checksum of the frozen weights; None if every weight is trained."""
        return None

    @property
    def trained_entries(self) -> StageEntries:
        """Return the function that lists a pipeline stage's trained weights: its adapters if it has any, else all.

        ``weights.export.StageEntries`` describes its arguments. Not a collective.
        """
        return adapter_entries if self.shape.lora_rank else trained_entries

    def retire(self) -> None:
        """End the model's threads and remove its hooks; its process groups stay. Not a collective."""
        self.schedule.drop_hooks()
        self._packing_thread.shutdown(cancel_futures=True)
