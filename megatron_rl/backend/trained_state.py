"""Keeps trained models that share one backend apart: their weights, AdamW, gradients and counters.

A TrainedState holds copies on the host of everything of a backend that training moves, of one
model. ``take`` copies it out, ``put`` copies it in, to the bit; between the two the backend may
hold another model's. With adapters that is the adapters and their moments alone; without them every
weight. Not a collective, but every rank must do the same.

AdamW's tensors must exist (``begin_adam``): a fresh model's are zeros at step 0, as torch makes
them in a first step.
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
    """Holds one model's share of this rank, on the host.

    weights: the trained parameters, chunk by chunk. adam: masters and moments.
    gradients: the accumulated gradient's buffers; None where none is accumulated.
    sums: of the current optimizer step. steps: AdamW's. scale: of the adapters' products; None
        without adapters.
    """

    weights: Sequence[torch.Tensor]
    adam: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor] | None
    sums: torch.Tensor
    steps: int
    weight_version: int
    scale: float | None


def begin_adam(backend: TrainableModel) -> None:
    """Make AdamW's tensors, zeros at step 0, by a step that moves nothing. A collective, before the first step."""
    backend.optimizer.set_adam(_MOVES_NOTHING)
    backend.optimizer.ghost_step()
    reset_adam(backend)


def reset_adam(backend: TrainableModel) -> None:
    """Set AdamW's moments and steps to zero, as before a first step."""
    with torch.no_grad():
        for moment in _moments(backend):
            moment.zero_()
    set_adam_steps(backend, 0)


def take_weights(backend: TrainableModel) -> list[torch.Tensor]:
    """Return copies of the trained parameters on the host."""
    backend.schedule.gather_parameters()
    copies = _on_host(trained(backend.parameters()))
    HOST.synchronize()
    return copies


def put_weights(backend: TrainableModel, weights: Sequence[torch.Tensor], scale: float | None) -> None:
    """Overwrite the trained parameters, and no state of AdamW; float32 masters of half-precision weights stay."""
    backend.schedule.gather_parameters()
    overwrite(trained(backend.parameters()), weights)
    set_scale(backend, scale)


def take(backend: TrainableModel) -> TrainedState:
    """Return a copy of all that training has moved."""
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
    """Make the backend's model the one of ``state``."""
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
    """Set AdamW's steps: torch keeps one per parameter, Transformer Engine's and Apex's one per group."""
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
    """Set alpha / rank of the model's adapters."""
    for adapter in _adapters(backend):
        adapter.scale = scale


def _adapters(backend: TrainableModel) -> list[Adapter]:
    """Return this rank's adapters; none where every weight is trained."""
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
    """Return the masters and moments that AdamW steps with; a master may be a view of its float32 parameter."""
    masters = [p for adam in _adams(backend) for group in adam.param_groups for p in group["params"]]
    return [*masters, *_moments(backend)]


def _gradients(backend: TrainableModel) -> list[torch.Tensor]:
    return [x.grad_data for chunk in backend.chunks for x in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def _on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]
