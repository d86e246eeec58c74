"""The section ``lora``: the linear layers that get a low-rank adapter, and the adapters' rank and scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_rl.config.checks import Range, choose
from megatron_rl.errors import ConfigError, quoted

PROJECTIONS = {  # a target → the Hugging Face names of its projections
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
TARGETS = tuple(PROJECTIONS)
DELTA_PROJECTIONS = {  # the same of gated delta nets (qwen3_next has two tensors of in_proj, qwen3_5 four)
    "in_proj": ("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    "out_proj": ("out_proj",),
}
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM's choices of max_lora_rank (config/lora.py, 0.32.0)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Puts low-rank adapters beside frozen linear layers: y = W x + (alpha / rank) · B A x (docs/lora.md).

    The equation is eq. 3 of Hu et al. 2021, arXiv:2106.09685. Targets have Megatron-Core's names:
    linear_qkv is q_proj, k_proj and v_proj, linear_proj is o_proj, linear_fc1 is gate_proj and
    up_proj, linear_fc2 is down_proj. In a mixture of experts the last two are in dense layers, in
    shared experts and in every routed expert. A gated delta net has in_proj and out_proj, which are
    not among the default targets. There is no dropout: under it, log-probs of engine and trainer
    would differ.
    """

    rank: Annotated[int, Range(1, 4096)] | None = None
    """Rank of the adapters, the number of rows of A; null: no adapters, every weight is trained."""
    alpha: Annotated[float, Range(0, 10**6, open_low=True)] = 32.0
    """Scale: an adapter's output B A x is multiplied by alpha / rank."""
    targets: tuple[str, ...] = TARGETS
    """Layers that get adapters: `linear_qkv`, `linear_proj`, `linear_fc1`, `linear_fc2`; also `in_proj`, `out_proj`."""

    def __post_init__(self) -> None:
        for name in self.targets:
            choose("lora.targets", name, (*TARGETS, *DELTA_PROJECTIONS))
        if len(set(self.targets)) != len(self.targets):
            raise ConfigError(f"lora.targets={quoted(list(self.targets))} names a layer twice; name each once")
        if not self.targets:
            raise ConfigError(
                "lora.targets=[] puts adapters nowhere; name a layer, or set lora.rank=null to train every weight"
            )
