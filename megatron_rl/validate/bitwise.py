"""The settings under which engine and trainer agree to the bit (rollout.bitwise)."""

from __future__ import annotations

import json

from megatron_rl.config import Config
from megatron_rl.errors import ConfigError


def check_bitwise(config: Config) -> None:
    """Raise ConfigError for settings under which ``rollout.bitwise`` cannot be had (docs/bitwise.md says why)."""
    if not config.rollout.bitwise:
        return
    parallel, fields = config.parallel, config.megatron.transformer
    refused: list[tuple[str, object, tuple[object, ...], str]] = [
        ("rollout.engine", config.rollout.engine, ("transformers",), "vLLM computes with kernels of its own"),
        ("parallel.sequence_parallel", parallel.sequence_parallel, (False,), "its sums have no order of ranks"),
        ("parallel.context", parallel.context, (1,), "its attention needs sequences whole on a rank"),
        ("parallel.expert", parallel.expert, (1,), "it is for dense models"),
        ("lora.rank", config.lora.rank, (None,), "adapters are added to a product here and merged in the engine"),
        ("model.layer_spec", config.model.layer_spec, ("auto", "torch"), "its layers are row-invariant ones"),
        ("model.logprob_kernel", config.model.logprob_kernel, ("auto", "torch"), "its kernel is a row-invariant one"),
        ("rollout.producer.mode", config.rollout.producer.mode, ("sync",), "rollouts ahead have older weights"),
        ("weight_sync.interval_steps", config.weight_sync.interval_steps, (1,), "the engine's weights would lag"),
        ("correction.old_logprobs", config.correction.old_logprobs, ("recompute", "auto"), "it would compare nothing"),
        ("replay.capacity_groups", config.replay.capacity_groups, (0,), "replayed groups have older weights"),
        *(
            (f"megatron.transformer.{name}", fields.get(name), (None, 0, 0.0), "dropout is another pass's noise")
            for name in ("attention_dropout", "hidden_dropout")
        ),
    ]
    for key, value, allowed, reason in refused:
        if value not in allowed:
            given, neutral = (x if isinstance(x, str) else json.dumps(x) for x in (value, allowed[-1]))
            raise ConfigError(
                f"rollout.bitwise=true cannot be had under {key}={given}: {reason}; set {key}={neutral}, or "
                "rollout.bitwise=false"
            )
    if config.train.num_rollouts == 0:
        raise ConfigError("rollout.bitwise=true compares rollouts, and train.num_rollouts=0 has none; set it to false")
