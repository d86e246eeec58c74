"""Low-rank adapters: which linear layers get one, and how wide it is."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.checks import at_least, choose
from megatron_rl.errors import ConfigError

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """y = W x + (alpha / rank) · B A x on the linear layers named in ``targets`` (Hu et al. 2021, arXiv:2106.09685, eq.
    3); W is frozen.

    ``rank``: rows of A; null: no adapters, every weight is trained. ``targets``: Megatron-Core's names: linear_qkv is
    q_proj, k_proj and v_proj, linear_proj o_proj, linear_fc1 gate_proj and up_proj, linear_fc2 down_proj. There is no
    dropout: under it the engine's log-probs and the trainer's would be of two models.
    """

    rank: int | None = None
    alpha: float = 32.0
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self) -> None:
        at_least("lora.rank", self.rank, 1)
        at_least("lora.alpha", self.alpha, 0.0, exclusive=True)
        for name in self.targets:
            choose("lora.targets", name, TARGETS)
        if len(set(self.targets)) != len(self.targets):
            raise ConfigError(f"lora.targets={list(self.targets)} names a layer twice; name each once")
        if not self.targets:
            raise ConfigError(
                "lora.targets=[] puts adapters nowhere; name a layer, or set lora.rank=null to train every weight"
            )
