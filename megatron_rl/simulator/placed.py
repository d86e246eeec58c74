"""A model on its ranks: the sizes and settings on which its bytes and seconds depend."""

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
    """Holds a model's shape and degrees of parallelism, and the other settings on which its memory and time depend.

    recompute_layers: layers that are recomputed at a time, under full recompute.
    float32_gradients: whether gradients are float32 whatever the weights are.
    shards_optimizer: whether data-parallel ranks share the optimizer's state.
    keeps_reference: whether a reference policy's weights lie beside the policy's.
    """

    shape: ModelShape
    degrees: Degrees
    dtype: str
    sequence_parallel: bool
    full_recompute: bool
    recompute_layers: int
    float32_gradients: bool
    shards_optimizer: bool
    keeps_reference: bool
    lora: LoraConfig
    logprob_kernel: str

    @classmethod
    def of(cls, config: Config, shape: ModelShape, degrees: Degrees) -> Self:
        """Return the model of a configuration whose ``model.dtype`` is settled."""
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
            shards_optimizer=config.optimizer.distributed,
            keeps_reference=has_reference and config.reference.placement == "device" and not shape.value_head,
            lora=config.lora,
            logprob_kernel=config.model.logprob_kernel,
        )

    @property
    def element_bytes(self) -> int:
        """Return the bytes of a weight."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def sequence_shards(self) -> int:
        """Return the number of tensor ranks over which the tokens outside the linears are split."""
        return self.degrees.tensor_size if self.sequence_parallel else 1
