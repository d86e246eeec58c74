"""Builds the parts and the reference of a policy's backend, each imported where it is chosen."""

from __future__ import annotations

from megatron_rl.backend.part import BackendPart, ReferenceWeights
from megatron_rl.backend.trainable_model import TrainableModel


def build_parts(model: TrainableModel) -> tuple[BackendPart, ...]:
    """Build the parts of a policy, whose chunks exist. Raises ConfigError for a model that one does not fit."""
    match model.config.rollout.routing_replay:
        case "off":
            return ()
        case _:
            from megatron_rl.backend.routing_replay import build_replayed_experts

            return (build_replayed_experts(model),)


def build_reference(model: TrainableModel) -> ReferenceWeights:
    """Build what keeps a policy's reference under ``reference.placement``; its first ``keep`` fills it."""
    from megatron_rl.backend.reference_weights import DeviceCopy, HostCopy

    match model.config.reference.placement:
        case "host":
            return HostCopy(model)
        case placement:
            assert placement == "device", placement
            return DeviceCopy(model)
