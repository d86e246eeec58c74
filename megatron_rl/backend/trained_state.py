"""Copies of a trained model's state, so that several models can take turns in one backend.

A TrainedState holds, on the host, everything that training changes: weights, AdamW's state,
gradients and counters. ``take`` copies the state out of the backend, and ``put`` copies it back,
bit for bit. In between, the backend may hold another model. With adapters (LoRA) the weights are
the adapters alone. The functions are not collectives, but every rank must call the same functions.

AdamW's tensors must exist first: ``begin_adam`` makes them, as torch's first step would, and leaves
zeros at step 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron_rl.backend.optimizer import AdamStep
from megatron_rl.backend.reference_weights import overwrite, trained
from megatron_rl.backend.trainable_model import TrainableModel
from megatron_rl.distributed.platform import HOST

if TYPE_CHECKING:
    from megatron_rl.model.lora.layer import Adapter

_MOVES_NOTHING = AdamStep(learning_rate=0.0, betas=(0.0, 0.0), epsilon=1.0, weight_decay=0.0, clip_grad=0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedState:
    """Holds this rank's shard of one model's training state, on the host.

    weights: the trained parameters, model chunk by model chunk.
    adam: AdamW's float32 master weights and moments.
    gradients: the buffers of the accumulated gradient; None if no gradient is accumulated.
    sums: the metric sums of the current optimizer step (``StepSums.values``).
    steps: AdamW's number of steps.
    weight_version: the number of optimizer steps that changed the weights.
    scale: alpha / rank of the adapters; None without adapters.
    """

    weights: Sequence[torch.Tensor]
    adam: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor] | None
    sums: torch.Tensor
    steps: int
    weight_version: int
    scale: float | None


def begin_adam(backend: TrainableModel) -> None:
    """Make AdamW's tensors, by a step that moves no weight, and set them to step 0. A collective.

    Call it before the first step.
    """
    backend.optimizer.set_adam(_MOVES_NOTHING)
    backend.optimizer.ghost_step()
    reset_adam(backend)


def reset_adam(backend: TrainableModel) -> None:
    """Set AdamW's moments and step count to zero, as before a first step."""
    with torch.no_grad():
        for moment in _moments(backend):
            moment.zero_()
    set_adam_steps(backend, 0)


def take_weights(backend: TrainableModel) -> list[torch.Tensor]:
    """Return host copies of this rank's trained parameters."""
    backend.schedule.gather_parameters()
    copies = _on_host(trained(backend.parameters()))
    HOST.synchronize()
    return copies


def put_weights(backend: TrainableModel, weights: Sequence[torch.Tensor], scale: float | None) -> None:
    """Overwrite the trained parameters, and leave AdamW's state as it is.

    The float32 master weights of 16-bit parameters stay as they are, too.

    weights: the new values, in the order of ``take_weights``.
    scale: alpha / rank of the adapters; None without adapters.
    """
    backend.schedule.gather_parameters()
    overwrite(trained(backend.parameters()), weights)
    set_scale(backend, scale)


def take_masters(backend: TrainableModel) -> list[torch.Tensor]:
    """Return host copies of the float32 masters of this rank's bfloat16 weights; [] if the weights are float32."""
    copies = _on_host(_masters(backend))
    HOST.synchronize()
    return copies


def put_masters(backend: TrainableModel, masters: Sequence[torch.Tensor]) -> None:
    """Overwrite the float32 masters of this rank's bfloat16 weights.

    masters: the new values, in the order of ``take_masters``.
    """
    overwrite(_masters(backend), masters)


def take(backend: TrainableModel) -> TrainedState:
    """Return a host copy of everything that training changes."""
    weights = take_weights(backend)
    state = TrainedState(
        weights=weights,
        adam=_on_host(_adam(backend)),
        gradients=_on_host(_gradients(backend)) if backend._accumulated else None,
        sums=backend._sums.values.clone(),
        steps=int(backend.optimizer.scheduler.num_steps),
        weight_version=backend.weight_version,
        scale=scale_of(backend),
    )
    HOST.synchronize()
    return state


def put(backend: TrainableModel, state: TrainedState) -> None:
    """Copy ``state`` into the backend's model and optimizer."""
    put_weights(backend, state.weights, state.scale)
    overwrite(_adam(backend), state.adam)
    set_adam_steps(backend, state.steps)
    backend.weight_version = state.weight_version
    backend.zero_grad()
    if state.gradients is not None:
        overwrite(_gradients(backend), state.gradients)
        backend._sums.values.copy_(state.sums)
        backend._accumulated = True


def set_adam_steps(backend: TrainableModel, steps: int) -> None:
    """Set the step count in AdamW's state.

    torch keeps it per parameter, Transformer Engine and Apex per parameter group.
    """
    for adam in _adams(backend):
        for state in adam.state.values():
            if "step" in state:
                state["step"].fill_(steps)
        for group in adam.param_groups:
            if "step" in group:
                group["step"] = group["step"] * 0 + steps
    backend.optimizer.scheduler.num_steps = steps


def scale_of(backend: TrainableModel) -> float | None:
    """Return alpha / rank of the model's adapters; None without adapters."""
    adapters = _adapters(backend)
    return adapters[0].scale if adapters else None


def set_scale(backend: TrainableModel, scale: float | None) -> None:
    """Set alpha / rank of the model's adapters to ``scale``; None is for a model without adapters: nothing is set."""
    for adapter in _adapters(backend):
        adapter.scale = scale


def _adapters(backend: TrainableModel) -> list[Adapter]:
    """Return this rank's adapters; [] if every weight is trained."""
    if not backend.shape.lora_rank:
        return []
    from megatron_rl.model.lora.adapters import adapters_of

    return adapters_of([chunk.module for chunk in backend.chunks])


def _adams(backend: TrainableModel) -> list[torch.optim.Optimizer]:
    return [part.optimizer for part in backend.optimizer.megatron.chained_optimizers if not part.is_stub_optimizer]


def _moments(backend: TrainableModel) -> Iterator[torch.Tensor]:
    for adam in _adams(backend):
        for group in adam.param_groups:
            for parameter in group["params"]:
                yield from (adam.state[parameter][name] for name in ("exp_avg", "exp_avg_sq"))


def _adam(backend: TrainableModel) -> list[torch.Tensor]:
    """Return the float32 master weights and the moments that AdamW steps with.

    The master of a float32 parameter may be a view of the parameter.
    """
    masters = [p for adam in _adams(backend) for group in adam.param_groups for p in group["params"]]
    return [*masters, *_moments(backend)]


def _masters(backend: TrainableModel) -> list[torch.Tensor]:
    masters = backend.optimizer.masters
    return [] if masters is None else masters.tensors


def _gradients(backend: TrainableModel) -> list[torch.Tensor]:
    return [x.grad_data for chunk in backend.chunks for x in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def _on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]
