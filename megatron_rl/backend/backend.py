"""MegatronBackend, the library's main class: forward, forward_backward, optim_step and export.

train.py uses it, and other programs can. In this sketch ``samples`` are this rank's samples,
``groups`` their prompts' numbers and ``order`` their positions in the batch. ``signal`` marks the
samples to train on. examples/library/one_step.py is a whole program:

    backend = MegatronBackend(config, total_steps=100)
    batch = backend.gather(samples, groups, order)          # every rank gets the lengths of all samples
    plan = backend.plan_training(batch, signal, drops=True) # the same plan on every rank
    batch = backend.fetch_rows(batch, plan)                 # each rank gets the tokens that it will run
    for mini_batch, digest in zip(plan.mini_batches, plan.fingerprints()):
        inputs = LossInputs(advantages=..., weights=...)    # the loss reads these numbers
        backend.forward_backward(batch, mini_batch, inputs, fingerprint=digest)  # gradients add up
        result = backend.optim_step(mini_batch.kind)        # one reduction over ranks, one step
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl import hub
from megatron_rl.algorithm.objective import Objective
from megatron_rl.algorithm.sharing import token_coupling
from megatron_rl.backend import batch_exchange
from megatron_rl.backend.batch import Batch
from megatron_rl.backend.build import build_parts, build_reference
from megatron_rl.backend.packing import FlatInputs, PackedMicroBatch
from megatron_rl.backend.part import BackendPart, Recorded
from megatron_rl.backend.trainable_model import TrainableModel
from megatron_rl.config import Config, LossConfig
from megatron_rl.distributed import topology
from megatron_rl.distributed.platform import HOST
from megatron_rl.model.head import head_weight
from megatron_rl.model.logprob.linear import linear_logprob
from megatron_rl.model.parts import parts_of
from megatron_rl.model.settings import ModelSettings
from megatron_rl.types import BatchPlan, LossInputs, Sample, StepKind, StepPlan
from megatron_rl.weights.export import BUCKET_BYTES, export_weights, named_weights
from megatron_rl.weights.file_plan import FileSizes
from megatron_rl.weights.mapping import adapter_entries
from megatron_rl.weights.model_folder import Parameters, save_hugging_face

if TYPE_CHECKING:
    from megatron_rl.algorithm.own_policy import OwnPolicy
    from megatron_rl.storage.remote import RemotePath

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogProbs:
    """Holds a batch's log-probs and their gap to the engine's log-probs.

    flat: float32 [T], one number for each response token, sample after sample; 0 for a token that
        was in no pass.
    sums: sums over the loss tokens of the pass: ``tokens`` (their count), ``logprob_gap_abs`` (sum
        of |gap|), ``logprob_gap_k3`` (sum of k3 estimates) and ``logprob_gap_max`` (largest |gap|).
    recorded: the data that optional features (backend/part.py) recorded in the pass, such as routed
        experts. The optimizer steps read it.
    """

    flat: np.ndarray
    sums: Mapping[str, float]
    recorded: tuple[Recorded, ...] = ()


class MegatronBackend(TrainableModel):
    """Trains the policy and computes its log-probs. Methods are collectives unless their docstrings say otherwise."""

    sum_names = (
        *("loss", "tokens", "entropy", "kl", "clipped", "ratio"),
        *("logprob_gap_abs", "logprob_gap_k3", "logprob_gap_max"),
    )
    num_maxima = 1

    def __init__(
        self, config: Config, *, hf_config=None, weights: Mapping[str, torch.Tensor] | None = None, total_steps: int = 1
    ) -> None:
        """Build the policy; TrainableModel describes the arguments."""
        super().__init__(config, hf_config=hf_config, weights=weights, total_steps=total_steps, lora=config.lora)

    def _build(self, *arguments: object) -> None:
        super()._build(*arguments)
        config = self.config
        # a coefficient of 0 takes the KL out of the loss; the KL is still measured
        loss = dataclasses.replace(config.loss, kl_coefficient=0.0) if config.kl_in_reward else config.loss
        self.objective = Objective(loss, self._sum_over_context)
        self._frozen_checksum: str | None = None

    def _build_parts(self) -> tuple[BackendPart, ...]:
        return build_parts(self)

    @property
    def has_gradient(self) -> bool:
        """Return whether a gradient is accumulated; the answer is the same on every rank."""
        return self._accumulated

    def objective_of(self, term: OwnPolicy) -> Objective:
        """Return a loss that sums ``term`` over tokens, to be given to ``forward_backward``. Not a collective.

        term: a function that takes a micro-batch's PolicyTokens and returns each token's loss
            (algorithm/own_policy.py).
        """
        return Objective(LossConfig(), self._sum_over_context, term=term)

    def _sum_over_context(self, sums: torch.Tensor) -> torch.Tensor:
        """Add up ``sums`` over the context-parallel ranks, in place; no gradient passes through."""
        if self.topology.context_size > 1:
            dist.all_reduce(sums, group=self.topology.context_group)
        return sums

    def _logprobs(
        self, hidden: torch.Tensor, targets: torch.Tensor, *, train_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return linear_logprob(
            hidden,
            head_weight(self.chunks[-1].module),
            targets,
            temperature=self.config.rollout.temperature,
            vocab_size=self.shape.vocab_size,
            tensor_rank=self.topology.tensor_rank,
            group=self.topology.tensor_group,
            train_entropy=train_entropy,
            reduce_hidden_grad=not self.config.parallel.sequence_parallel,
            into_main_grad=True,
            kernel=parts_of(ModelSettings.of(self.config)).logprob_kernel,
        )

    # ---- forward and backward --------------------------------------------------------------------------------------

    def forward(self, batch: Batch, plan: BatchPlan) -> LogProbs:
        """Return the log-probs of the plan's samples under the current weights, on every rank.

        The batch must hold the rows (tokens, loss mask, log-probs) that the plan needs here;
        ``fetch_rows`` brings them.
        """

        def read(microbatch: PackedMicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, dict]:
            logprobs, _ = self._logprobs(hidden, microbatch.targets)
            return logprobs, {"gap": logprobs - microbatch.rollout_logprobs}

        with contextlib.ExitStack() as parts:
            recordings = [parts.enter_context(part.recording()) for part in self.schedule.parts if part.records]
            flat, kept = self._read(batch, plan, read)
        gaps = torch.zeros(3, dtype=torch.float64, device=HOST.device)
        highest = torch.zeros(1, dtype=torch.float64, device=HOST.device)
        for measured in kept:
            gap = measured["gap"].double()
            gaps += torch.stack([gap.abs().sum(), ((-gap).exp() + gap - 1).sum(), torch.ones_like(gap).sum()])
            highest = torch.cat([highest, gap.abs()]).max()[None]  # with ``highest``: the gap may be empty
        if plan.mini_batches[0].kind is StepKind.REAL:
            dist.all_reduce(gaps)
            dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        absolute, k3, tokens = gaps.tolist()
        sums = {"tokens": tokens, "logprob_gap_abs": absolute, "logprob_gap_k3": k3, "logprob_gap_max": highest.item()}
        recorded = tuple(recording.gather(batch, plan) for recording in recordings)
        return LogProbs(flat=flat, sums=sums, recorded=recorded)

    def check_samples(self, batch: Batch) -> None:
        """Raise ValueError, on every rank alike, if a sample of a rollout lacks data that a feature in use needs.

        Under ``rollout.routing_replay=rollout``, for example, a sample must have routed experts.
        """
        for part in self.parts:
            part.check(batch.facts)

    def logprobs(self, batch: Batch, chosen: np.ndarray) -> LogProbs:
        """Return the log-probs of the samples ``chosen`` (bool [S]), after one forward pass over them.

        It plans the pass, fetches the samples' contents and calls ``forward``.
        """
        plan = self.plan_pass(batch, chosen)
        return self.forward(self.fetch_rows(batch, plan), plan)

    def gather_rollout_logprobs(self, batch: Batch) -> np.ndarray:
        """Return the engine's log-prob of each response token, float32 [T] sample after sample, on every rank."""
        return batch_exchange.gather_flat(batch.facts, batch.local, self.topology.rank, lambda sample: sample.logprobs)

    def gather_loss_mask(self, batch: Batch) -> np.ndarray:
        """Return whether each response token carries loss, bool [T] sample after sample, on every rank."""
        return (
            batch_exchange.gather_flat(batch.facts, batch.local, self.topology.rank, lambda sample: sample.loss_mask)
            > 0
        )

    def replicate(self, samples: Sequence[Sample]) -> Batch:
        """Return a batch of samples that every rank holds already; it needs no ``fetch_rows``. Not a collective."""
        facts = batch_exchange.replicated_facts(samples)
        batch_exchange.refuse_too_long(facts, self.shape.context_tokens)
        if token_coupling(self.config.megatron):
            facts = dataclasses.replace(facts, response_inputs=None)
        return Batch(facts=facts, local=samples, rows=dict(enumerate(samples)))

    def forward_backward(
        self,
        batch: Batch,
        mini_batch: StepPlan,
        inputs: LossInputs,
        *,
        fingerprint: bytes,
        supervised: bool = False,
        objective: Objective | None = None,
    ) -> None:
        """Add the mini-batch's gradient to the accumulated gradient; call it any number of times per ``optim_step``.

        fingerprint: the digest of the plan of this mini-batch; ranks compare it before they start.
        supervised: whether the loss is −Σ w · log π, where w is ``inputs.weights`` and may be negative
            (algorithm/linear_loss.py).
        objective: the loss of this call; None takes the run's loss.

        Raises ValueError if called within ``reference_weights`` under ``reference.placement=device``:
        it would run the reference policy, a separate model without gradients.
        """
        chosen = objective or self.objective
        self._add_gradient(batch, mini_batch, inputs, fingerprint, chosen, supervised=supervised, reads=False)

    def forward_backward_logprobs(
        self, batch: Batch, mini_batch: StepPlan, inputs: FlatInputs, *, fingerprint: bytes, objective: Objective
    ) -> np.ndarray:
        """Add the mini-batch's gradient as ``forward_backward`` does; return the log-probs of the samples that ran.

        Returns float32 [T] like ``LogProbs.flat``, on every rank. ``forward_backward`` describes the
        arguments.
        """
        reported = self._add_gradient(batch, mini_batch, inputs, fingerprint, objective, supervised=False, reads=True)
        return self._spread(batch, mini_batch, reported)

    def _add_gradient(
        self,
        batch: Batch,
        mini_batch: StepPlan,
        inputs: FlatInputs,
        fingerprint: bytes,
        objective: Objective,
        *,
        supervised: bool,
        reads: bool,
    ) -> list[dict]:
        if self.chunks[0] is not self.optimizer.chunks[0]:
            raise ValueError(
                "forward_backward() within reference_weights() would train the reference, under "
                "reference.placement=device"
            )
        compute = objective.supervised if supervised else objective.policy

        def loss(microbatch: PackedMicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, dict]:
            logprobs, entropy = self._logprobs(hidden, microbatch.targets, train_entropy=objective.trains_entropy)
            total, sums = compute(microbatch, logprobs, entropy)
            read = {"numbers": logprobs.detach(), "flat": microbatch.flat} if reads else {}
            return total, {"sums": sums, **read}

        return self._accumulate(batch, mini_batch, inputs, fingerprint, loss)

    # ---- weights ---------------------------------------------------------------------------------------------------

    def export(self, *, bucket_bytes: int = BUCKET_BYTES, merges: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, tensor) for every weight, whole and with adapters merged in, on every rank.

        All ranks must run the iterator to its end. A tensor is valid until the next one is asked
        for; copy it out before.

        bucket_bytes: the most bytes that are gathered at once (weights/export.py). With adapters, the
            merged copy of one parameter's shard comes on top.
        merges: False leaves the adapters out and gives the frozen weights.
        """
        parameters = self._exported(merges=merges)
        yield from export_weights(parameters.chunks, self.shape, self.topology, bucket_bytes=bucket_bytes)

    def _exported(self, *, merges: bool = True) -> Parameters:
        """Wait for a pending gather of parameters, and return this rank's parameters for an export.

        merges: whether adapters are merged into the weights.
        """
        self.schedule.gather_parameters()
        chunks = [named_weights(chunk.module) for chunk in self.chunks]
        if self.shape.lora_rank:
            from megatron_rl.model.lora.adapters import MergedParameters

            chunks = [MergedParameters(chunk.module, merges=merges) for chunk in self.chunks]
        return Parameters(chunks=chunks, shape=self.shape, topology=self.topology)

    def export_adapters(self, *, bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of the adapters alone, as ``export`` yields weights.

        The names are PEFT's, without ``base_model.model.``. Raises ValueError if the model has no
        adapters.
        """
        if not self.shape.lora_rank:
            raise ValueError("export_adapters() has nothing to export: every weight is trained; set lora.rank")
        self.schedule.gather_parameters()
        parameters = [dict(chunk.module.named_parameters()) for chunk in self.chunks]
        yield from export_weights(
            parameters, self.shape, self.topology, bucket_bytes=bucket_bytes, entries=adapter_entries
        )

    def frozen_checksum(self) -> str | None:
        """Return the checksum of the weights without adapters; None if every weight is trained.

        Only the first call reads the weights.
        """
        if self.shape.lora_rank and self._frozen_checksum is None:
            from megatron_rl.weights.checksum import Checksum

            checksums, total = {}, Checksum()
            for name, tensor in self.export(merges=False):
                checksums[name] = Checksum()
                checksums[name].update(name, tensor)
            for name in sorted(checksums):  # the order of experts in an export depends on parallel.expert
                total.extend(checksums[name])
            self._frozen_checksum = total.value()
        return self._frozen_checksum

    def keep_reference(self) -> None:
        """Make the policy's current weights the reference policy's, held as ``reference.placement`` says."""
        if self.reference is None:
            self.reference = build_reference(self)
        self.reference.keep()

    @contextlib.contextmanager
    def reference_weights(self) -> Iterator[None]:
        """Return a context within which ``forward``, ``logprobs`` and ``export`` use the reference policy's weights.

        The optimizer's state is not touched. Optional features, such as the replay of routed experts,
        are off meanwhile.
        """
        if self.reference is None:
            raise ValueError("there is no reference policy yet: call keep_reference() first")
        schedule, parts = self.schedule, self.schedule.parts
        schedule.parts = ()
        try:
            with self.reference.reading():
                yield
        finally:
            schedule.parts = parts

    def save_hugging_face(self, path: pathlib.Path | RemotePath, tokenizer, *, limits: FileSizes | None = None) -> None:
        """Write the policy as a Hugging Face directory; each rank writes its own files (weights/model_folder.py).

        Adapters are merged into the weights. They are also written as PEFT's directory,
        ``<path>_adapter``, if PEFT can read all of them.

        limits: bounds on the files' bytes; None takes the defaults.
        """
        model = self.config.model
        save_hugging_face(
            self._exported(),
            self.hf_config,
            tokenizer,
            path,
            source=model.hf_path,
            tokenizer_source=model.tokenizer_path,
            limits=limits,
        )
        adapters = path.with_name(f"{path.name}_adapter")
        lost = ""
        if self.shape.lora_rank:
            from megatron_rl.weights.peft import lost_by_peft

            lost = lost_by_peft(self.shape)
        if self.shape.lora_rank and not lost:
            self.save_adapters(adapters)
        elif self.topology.is_main:
            _remove(adapters)  # an earlier run may have left it
            if lost:
                log.warning("%s is not written: %s", adapters.name, lost)

    def save_adapters(self, path: pathlib.Path | RemotePath) -> None:
        """Write the adapters as PEFT's directory. All ranks take part, and the main rank writes.

        Raises ValueError if the model has no adapters, and ConfigError if PEFT would leave some
        out.
        """
        from megatron_rl.weights.peft import adapter_config, save_peft

        config = adapter_config(self.shape, hub.repo_of(self.config.model.hf_path))
        if self.topology.is_main:
            save_peft(self.export_adapters(), config, path)
        else:
            _run_through(self.export_adapters())

    def close(self, *, leave_world: bool = True) -> None:
        """Destroy the process groups, a critic's too; the process may build another backend afterwards.

        leave_world: False keeps torch's default process group.
        """
        self.retire()
        topology.destroy(leave_world=leave_world)


def _remove(folder: pathlib.Path | RemotePath) -> None:
    """Remove a folder of adapters, on disk or in an object store, if it exists."""
    if isinstance(folder, pathlib.Path):
        shutil.rmtree(folder, ignore_errors=True)
        return
    from megatron_rl.weights.peft import CONFIG
    from megatron_rl.weights.store_folder import clear

    clear(folder, CONFIG)


def _run_through(tensors: Iterator) -> None:
    for _ in tensors:
        pass
