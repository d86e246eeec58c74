"""The function that builds the inference engine that a run's settings choose. Every rank calls it."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.config import Config, RolloutConfig
from megatron_rl.errors import ConfigError
from megatron_rl.rollout.engines.engine import Engine
from megatron_rl.rollout.engines.placement import RankLocation, refuse_delta, refuse_sharing, role_of, shares_device


def place_engine(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    *,
    location: RankLocation,
    device: torch.device,
    dtype: torch.dtype,
    vocab_size: int,
    has_trainer: bool = False,
) -> tuple[Engine, tuple[int, int] | None, bool]:
    """Build the inference engine that the settings choose, and begin its start. Return before the engine serves.

    has_trainer: whether there is a trainer. ``rollout.bitwise`` needs one, since it makes the
        engine's log-probs equal the trainer's.

    Returns three values: the engine, this rank's share of the prompts, and whether trainer and
    engine take turns on one GPU. The share is (this rank's number among the ranks that sample
    prompts, the number of these ranks), or None for a rank that samples none.

    Raises ConfigError if the engines do not fit the ranks, or cannot share the GPU as the settings
    ask.
    """
    role = role_of(config.rollout, location)
    shared = shares_device(config.rollout, device)
    refuse_sharing(config.rollout, config.weight_sync, shared)
    refuse_delta(config.rollout, config.weight_sync, shared)
    match config.rollout:
        case RolloutConfig(bitwise=True):
            if not has_trainer:
                raise ConfigError(
                    "rollout.bitwise=true compares the engine with a trainer, and a server has no trainer; set "
                    "rollout.bitwise=false"
                )
            from megatron_rl.model.settings import ModelSettings
            from megatron_rl.rollout.engines.bitwise import BitwiseEngine

            engine = BitwiseEngine(
                ModelSettings.of(config), tokenizer, config.rollout, deadline_s=config.run.deadline_s
            )
        case RolloutConfig(engine="transformers"):
            from megatron_rl.rollout.engines.embedded import TransformersEngine

            engine = TransformersEngine(
                config.model.hf_path, tokenizer, config.rollout, seed=config.run.seed, dtype=dtype, device=device
            )
        case RolloutConfig(engine="vllm"):
            from megatron_rl.rollout.vllm.build import vllm_engine

            engine = vllm_engine(config, tokenizer, location=location, role=role, device=device, vocab_size=vocab_size)
    return engine, role.share, shared
