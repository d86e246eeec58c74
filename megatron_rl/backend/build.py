"""The choice of a policy's optional parts and of its reference weights; a run imports only what is chosen."""

from __future__ import annotations

from megatron_rl.backend.part import BackendPart, ReferenceWeights
from megatron_rl.backend.trainable_model import TrainableModel


def build_parts(model: TrainableModel) -> tuple[BackendPart, ...]:
    """Return a policy's optional parts (backend/part.py), after its model chunks were built.

    Raises ConfigError if a part does not fit the model.
    """
    match model.config.rollout.routing_replay:
        case "off":
            return ()
        case _:
            from megatron_rl.backend.routing_replay import build_replayed_experts

            return (build_replayed_experts(model),)


def build_reference(model: TrainableModel) -> ReferenceWeights:
    """Return the object that keeps a policy's reference weights, on the host or on the device.

    ``reference.placement`` says where. The object holds no weights before its ``keep``.
    """
    from megatron_rl.backend.reference_weights import DeviceCopy, HostCopy

    match model.config.reference.placement:
        case "host":
            return HostCopy(model)
        case placement:
            assert placement == "device", placement
            return DeviceCopy(model)
