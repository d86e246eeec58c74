"""The optimizer step, real or ghost: the one caller of Megatron-Core's optimizer and of the gradient reduction.

A ghost step is the step of a mini-batch from which all samples were dropped. Under
``skip.ghost=dense`` it equals, bit for bit, the step that a run without drops takes: a step with an
all-zero gradient. It runs no forward, backward, reduction or norm. Moments decay, momentum and
weight decay move the weights, and step count and schedule advance. Under ``freeze`` it changes
nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_rl.backend.gradient_norm import use_accurate_norm
from megatron_rl.config.model import MegatronConfig
from megatron_rl.config.optimizer import OptimizerConfig as OptimizerSettings
from megatron_rl.distributed import platform  # noqa: F401  (before megatron.core)
from megatron_rl.distributed.collectives import reduce_on_host
from megatron_rl.distributed.platform import HOST
from megatron_rl.distributed.topology import Topology
from megatron_rl.errors import ConfigError, NonFiniteGradient
from megatron_rl.model.megatron_fields import Refusals, resolve_fields
from megatron_rl.types import StepKind

import megatron.core.optimizer as megatron_optimizer  # isort: skip
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads  # isort: skip
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer  # isort: skip
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32  # isort: skip
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # isort: skip

if TYPE_CHECKING:  # only a run in bfloat16, or whose engine shares the device, imports them
    from megatron_rl.backend.masters import Masters
    from megatron_rl.backend.offload import Offload, OffloadedBytes
    from megatron_rl.weights.model_shape import ModelShape

_SECTION = "it is set by optimizer.{}"
_OWNED_FIELDS = {
    "lr": _SECTION.format("lr"),
    "min_lr": _SECTION.format("min_lr"),
    "weight_decay": _SECTION.format("weight_decay"),
    "adam_beta1": _SECTION.format("betas"),
    "adam_beta2": _SECTION.format("betas"),
    "adam_eps": _SECTION.format("epsilon"),
    "clip_grad": _SECTION.format("clip_grad"),
    "use_distributed_optimizer": _SECTION.format("distributed"),
    "bf16": "it is set by model.dtype",
    "fp16": "fp16 needs a loss scale, which the token-sum seam does not apply; use bfloat16",
    "params_dtype": "it is set by model.dtype",
    "optimizer": _SECTION.format("algorithm"),
    **dict.fromkeys(
        (field.name for field in dataclasses.fields(OptimizerConfig) if field.name.startswith("muon_")),
        "Megatron-Core's Muon is not used; optimizer.algorithm=muon has optimizer.momentum",
    ),
    "overlap_param_gather_with_optimizer_step": "it starts a gather that a silent rank would never join",
    "overlap_param_gather": "it is set by megatron.ddp.overlap_param_gather",
    "decoupled_weight_decay": "ghost steps are defined for AdamW, whose weight decay is decoupled",
    **dict.fromkeys(("decoupled_lr", "decoupled_min_lr"), "one learning rate, optimizer.lr, is scheduled and reported"),
    **dict.fromkeys(
        ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"),
        "gradients, masters and moments are of float32; another dtype needs use_precision_aware_optimizer",
    ),
    "timers": "no timers of Megatron-LM's are made here",
}
_UNSUPPORTED_FIELDS = {
    "use_precision_aware_optimizer": "a checkpoint would lose its moments and masters: Megatron-Core (0.16.1 "
    "optimizer/distrib_optimizer.py) hands out copies of states below float32, and Transformer Engine keeps masters as "
    "16-bit remainders",
    "optimizer_cpu_offload": "rollouts offload the optimizer's state and checkpoints read it; both would miss the "
    "copies that this option keeps",
    "reuse_grad_buf_for_mxfp8_param_ag": "weights in FP8 are not built here",
    "loss_scale": "the gradient would be divided by a scale that the token-sum seam does not apply",
    "use_layer_wise_distributed_optimizer": "optimizer.distributed shards the states of AdamW and Muon",
    "optimizer_cuda_graph": "a ghost step runs outside of the graph",
    "grad_norm_skip_threshold": "it is read by a step of Megatron-Core's that is not called here",
}
REFUSED_OPTIMIZER_FIELDS = Refusals.of(OptimizerConfig, owned=_OWNED_FIELDS, unsupported=_UNSUPPORTED_FIELDS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """Holds the outcome of one optimizer step.

    grad_norm: the global gradient norm before clipping; 0.0 for a ghost step (all samples dropped).
    learning_rate: the rate of this step.
    applied: False for a ghost step under ``skip.ghost=freeze``, and for a step that was skipped
        because its gradient was not finite.
    """

    grad_norm: float
    learning_rate: float
    applied: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdamStep:
    """Holds AdamW's settings for one step, in place of the section ``optimizer`` and its schedule.

    weight_decay: applied to every weight, biases and norms too, as in ``torch.optim.AdamW``.
    clip_grad: a gradient of a larger global norm is scaled down to this norm; 0 turns clipping off.
    """

    learning_rate: float
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    clip_grad: float


def choose_kernel(kernel: str) -> str:
    """Make Megatron-Core use the Adam that ``optimizer.kernel`` names; return its package's name."""
    candidates = ("transformer_engine", "apex", "torch") if kernel == "auto" else (kernel,)
    for name in candidates:
        adam = _adam_class(name)
        if adam is not None:
            # distrib_optimizer has a name Adam too, by default Transformer Engine's, and asserts on
            # the optimizer's class (0.16.1, 0.19.2)
            megatron_optimizer.Adam = distrib_optimizer.Adam = adam
            megatron_optimizer.USING_PYTORCH_OPTIMIZER = name == "torch"
            return name
    raise ConfigError(
        f"optimizer.kernel={kernel} cannot be imported here; install it (python -m megatron_rl.doctor says how), or "
        "use optimizer.kernel=auto"
    )


def _adam_class(name: str) -> type | None:
    if name == "torch":
        return torch.optim.AdamW
    if not HOST.is_cuda:
        return None
    try:
        if name == "transformer_engine":
            from transformer_engine.pytorch.optimizers import FusedAdam
        else:
            from apex.optimizers import FusedAdam
    except (ImportError, FileNotFoundError, AttributeError):  # the last two: half installed; the doctor reports it
        return None
    return FusedAdam


class Optimizer:
    """Runs AdamW over this rank's model chunks, with a learning-rate schedule.

    masters: the float32 masters of bfloat16 weights; None if the weights are float32.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        settings: OptimizerSettings,
        topology: Topology,
        *,
        shape: ModelShape,
        megatron: MegatronConfig,
        dtype: str,
        ghost: str,
        total_steps: int,
    ):
        """Build AdamW or Muon, and the schedule, by ``settings``.

        dtype: ``model.dtype``.
        ghost: ``skip.ghost``.
        total_steps: the step at which the learning rate's decay ends, unless
            ``settings.decay_steps`` sets it.
        """
        self.chunks = list(chunks)
        self.topology = topology
        self.on_nonfinite = settings.on_nonfinite
        self.ghost = ghost
        self.kernel = choose_kernel(settings.kernel)
        self._offload: Offload | None = None  # before the first ``offload``
        use_accurate_norm()
        try:
            self._megatron = get_megatron_optimizer(megatron_config(settings, megatron, dtype), self.chunks)
        except OSError as error:
            folder = megatron.optimizer.get("config_logger_dir")
            raise ConfigError(
                f"megatron.optimizer.config_logger_dir={folder} cannot be written ({error}); name a folder that can be"
            ) from error
        if self.kernel == "torch" and HOST.is_cuda:
            self._fuse_adam()
        match settings.algorithm:
            case "adam":
                pass
            case "muon":
                from megatron_rl.backend.muon import use_muon

                use_muon(self._megatron, self.chunks, shape, topology, momentum=settings.momentum)
            case other:
                raise AssertionError(other)
        self.masters = self._find_masters() if dtype == "bfloat16" else None
        self.scheduler = OptimizerParamScheduler(
            self._megatron,
            init_lr=settings.lr / (settings.warmup_steps + 1),
            max_lr=settings.lr,
            min_lr=min(settings.min_lr, settings.lr),
            lr_warmup_steps=settings.warmup_steps,
            lr_decay_steps=max(settings.decay_steps or total_steps, settings.warmup_steps + 1, 1),
            lr_decay_style=settings.schedule,
            start_wd=settings.weight_decay,
            end_wd=settings.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    def _find_masters(self) -> Masters:
        from megatron_rl.backend.masters import Masters

        return Masters(self._megatron.chained_optimizers)

    def _fuse_adam(self) -> None:
        """Make torch's AdamW step by its fused kernel; Megatron-Core (0.16.1, 0.19.2) does not ask for it.

        The fused kernel reads and writes each moment and weight once. The default does so once per
        operation: on an H100 it took 41.6 ms for 1.5 billion parameters
        (docs/evidence/performance.md).
        """
        for part in self._megatron.chained_optimizers:
            for group in [] if part.is_stub_optimizer else part.optimizer.param_groups:
                group["fused"], group["foreach"] = True, False

    @property
    def megatron(self):
        """Return Megatron-Core's optimizer object. Raises ValueError while its tensors are offloaded."""
        self.refuse_offloaded("reading or stepping the optimizer")
        return self._megatron

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        return float(self._megatron.param_groups[0]["lr"])

    def offload(self) -> OffloadedBytes:
        """Free the device memory of gradients and of AdamW's state until ``restore``; return the freed bytes.

        Gradients are zeros between steps, so they are dropped. AdamW's moments and master weights
        are copied to the host. Parameters stay. Master weights of float32 parameters stay too,
        since they are views of DDP's parameter buffer. Not a collective.
        """
        if any(chunk.ddp_config.nccl_ub for chunk in self.chunks):
            raise ValueError("offload() would release buffers that NCCL has registered; set megatron.ddp.nccl_ub=false")
        if self._offload is None:
            from megatron_rl.backend.offload import Offload

            self._offload = Offload()
        buffers = [x for chunk in self.chunks for x in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        gathered = [x.param_data for x in buffers if x.param_data is not None]
        adams = [x.optimizer for x in self._megatron.chained_optimizers if not x.is_stub_optimizer]
        masters = [p for adam in adams for group in adam.param_groups for p in group["params"]]
        state = [
            x
            for adam in adams
            for tensors in adam.state.values()
            for x in tensors.values()
            if isinstance(x, torch.Tensor)
        ]
        return self._offload.release(
            zeros=[x.grad_data for x in buffers],
            state=[*masters, *state],
            staying=[*gathered, *(p for chunk in self.chunks for p in chunk.module.parameters())],
        )

    def restore(self) -> None:
        """Undo ``offload``: the tensors have their contents again, gradients are zero. Not a collective."""
        if self._offload is not None:
            self._offload.restore()

    def refuse_offloaded(self, what: str) -> None:
        """Raise ValueError while gradients and optimizer state are off the device.

        what: the operation that needs them, for the message.
        """
        if self._offload is not None and self._offload.released is not None:
            raise ValueError(
                f"{what} needs the gradients and the optimizer state, {self._offload.released.total:,} bytes of which "
                "left this rank's device in offload(); call restore() first"
            )

    def zero_grad(self) -> None:
        self.refuse_offloaded("zero_grad()")
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def step(self, kind: StepKind, adam: AdamStep | None = None) -> StepOutcome:
        """Take an optimizer step with a gradient (REAL) or without one (GHOST), then set the gradients to zero.

        A REAL step reduces, clips and applies the accumulated gradient. A GHOST step has no
        gradient: under ``skip.ghost=dense`` it acts as if the gradient were zero, else it changes
        nothing.

        adam: the settings of this step; None takes the section ``optimizer`` and its schedule.
        """
        self.refuse_offloaded("optim_step()")
        if adam is not None:
            self.set_adam(adam)
        learning_rate = self.learning_rate
        if kind is StepKind.GHOST:
            applied = self.ghost == "dense"
            if applied:
                self.ghost_step()
            return StepOutcome(grad_norm=0.0, learning_rate=learning_rate, applied=applied)
        self.reduce_gradients()
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        if self._any_rank(not math.isfinite(norm)):
            if self.on_nonfinite == "fail":
                raise NonFiniteGradient(
                    f"the gradient norm is {norm} on rank {self.topology.rank}; look for infinite rewards, advantages "
                    "or log-probs in this step's samples, lower optimizer.lr, or pass over such steps with "
                    "optimizer.on_nonfinite=skip"
                )
            # the weights stay; the gather is ended so that the next forward does not wait for one
            self._end_parameter_gather()
            self.zero_grad()
            return StepOutcome(grad_norm=norm, learning_rate=learning_rate, applied=False)
        self._clip(norm, None if adam is None else adam.clip_grad)
        self.megatron.step_with_ready_grads()
        self.scheduler.step(1)
        self.zero_grad()
        return StepOutcome(grad_norm=norm, learning_rate=learning_rate, applied=True)

    def ghost_step(self) -> None:
        """Take an AdamW step with a gradient of zero, without reducing gradients or computing their norm."""
        self.zero_grad()
        self.megatron.prepare_grads()
        self.megatron.step_with_ready_grads()
        self.scheduler.step(1)
        # ``param_gather_dispatched`` is cleared in finish_grad_sync alone, which a ghost does not
        # call: without a gather here the next forward would use replicas that silently differ.
        self._end_parameter_gather()
        self.zero_grad()

    def _end_parameter_gather(self) -> None:
        for chunk in self.chunks:
            if chunk.ddp_config.use_distributed_optimizer and chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def reduce_gradients(self) -> None:
        """Sum the gradients over ranks, once; nothing is divided.

        The order is: data parallel, then sequence-parallel parameters and q/k norms, then tied
        embeddings.
        """
        self.refuse_offloaded("the reduction of gradients")
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_grad_reduce:
                chunk.start_grad_sync()
        finalize_model_grads(self.chunks, None)

    def gather_gradients(self) -> None:
        """Make the reduced gradient whole on every rank; the distributed optimizer left each rank a shard.

        Without the distributed optimizer it does nothing.
        """
        for group in (g for chunk in self.chunks for g in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)):
            if not group.ddp_config.use_distributed_optimizer:
                continue
            size, rank = (
                group.intra_distributed_optimizer_instance_size,
                group.intra_distributed_optimizer_instance_rank,
            )
            for bucket in group.buckets:
                shard = bucket.grad_data.chunk(size)[rank].clone()
                dist.all_gather_into_tensor(
                    bucket.grad_data, shard, group=group.intra_distributed_optimizer_instance_group
                )

    def set_adam(self, adam: AdamStep) -> None:
        """Set AdamW's settings for the next step. After that step the schedule sets rate and weight decay again."""
        for optimizer in self.megatron.chained_optimizers:
            for group in [] if optimizer.is_stub_optimizer else optimizer.optimizer.param_groups:
                group["lr"], group["betas"] = adam.learning_rate, adam.betas
                group["eps"], group["weight_decay"] = adam.epsilon, adam.weight_decay

    def _clip(self, norm: float, asked: float | None) -> None:
        """Scale the gradients down to the norm ``asked`` if their norm is larger.

        norm: the gradients' global norm.
        asked: None takes ``optimizer.clip_grad``; 0 turns clipping off.
        """
        for optimizer in self.megatron.chained_optimizers:
            most = 0.0 if optimizer.is_stub_optimizer else optimizer.config.clip_grad if asked is None else asked
            if most <= 0.0:
                continue
            parameters = optimizer.get_parameters()
            if parameters:
                decoupled = optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                clip_grad_by_total_norm_fp32(parameters, max_norm=most, total_norm=norm, use_decoupled_grad=decoupled)

    def _any_rank(self, flag: bool) -> bool:
        return bool(reduce_on_host(torch.tensor([float(flag)]), dist.ReduceOp.MAX).item())


def megatron_config(settings: OptimizerSettings, megatron: MegatronConfig, dtype: str) -> OptimizerConfig:
    """Return Megatron-Core's OptimizerConfig: this package's values, then the user's from ``megatron.optimizer``.

    settings: the section ``optimizer``.
    dtype: ``model.dtype``.

    Raises ConfigError for a field that the user may not set.
    """
    bf16 = dtype == "bfloat16"
    extra = resolve_fields(megatron.optimizer, OptimizerConfig, "megatron.optimizer", REFUSED_OPTIMIZER_FIELDS)
    fields = dict(
        optimizer="adam",
        lr=settings.lr,
        min_lr=min(settings.min_lr, settings.lr),
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.epsilon,
        clip_grad=settings.clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=settings.distributed,
        overlap_param_gather=bool(megatron.ddp.get("overlap_param_gather", False)),
    )
    return OptimizerConfig(**{**fields, **extra})
