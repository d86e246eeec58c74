"""A model together with the parallelism and settings on which its memory and time depend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from megatron_rl.config import Config, LoraConfig
from megatron_rl.model.costs import full_recompute
from megatron_rl.simulator.degrees import Degrees
from megatron_rl.weights.model_shape import ModelShape

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedModel:
    """Holds a model's shape, its degrees of parallelism, and the settings on which its memory and time depend.

    full_recompute: whether all activations of a layer are recomputed in the backward pass.
    recompute_layers: the number of layers that are recomputed at a time, under full recompute.
    float32_gradients: whether gradients are float32 even if weights are not.
    algorithm: ``optimizer.algorithm``.
    shards_optimizer: whether the optimizer's state is sharded over data-parallel ranks.
    keeps_reference: whether a reference policy's weights lie beside the policy's on the GPU.
    lora: the settings of LoRA adapters, such as their rank.
    logprob_kernel: what computes log-probs from logits: ``torch``, ``triton`` or ``auto``.
    """

    shape: ModelShape
    degrees: Degrees
    dtype: str
    sequence_parallel: bool
    full_recompute: bool
    recompute_layers: int
    float32_gradients: bool
    algorithm: str
    shards_optimizer: bool
    keeps_reference: bool
    lora: LoraConfig
    logprob_kernel: str

    @classmethod
    def of(cls, config: Config, shape: ModelShape, degrees: Degrees) -> Self:
        """Return the PlacedModel of a configuration on GPUs with the given degrees of parallelism.

        config: the configuration; its ``model.dtype`` must not be ``auto``.
        """
        users = config.megatron.transformer
        has_reference = config.loss.kl_coefficient != 0 or config.preference.needs_reference
        return cls(
            shape=shape,
            degrees=degrees,
            dtype=config.model.dtype,
            sequence_parallel=config.parallel.sequence_parallel,
            full_recompute=full_recompute(users),
            recompute_layers=users.get("recompute_num_layers") or 1,
            float32_gradients=config.megatron.ddp.get("grad_reduce_in_fp32", True),
            algorithm=config.optimizer.algorithm,
            shards_optimizer=config.optimizer.distributed,
            keeps_reference=has_reference and config.reference.placement == "device" and not shape.value_head,
            lora=config.lora,
            logprob_kernel=config.model.logprob_kernel,
        )

    @property
    def element_bytes(self) -> int:
        """Return the number of bytes of one weight."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def sequence_shards(self) -> int:
        """Return the number of tensor-parallel ranks over which sequence parallelism splits tokens; 1 without it."""
        return self.degrees.tensor_size if self.sequence_parallel else 1
