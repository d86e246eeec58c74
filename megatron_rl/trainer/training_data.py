"""The training data of a run: its rows are read, checked, and tokenized for the policy's model."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.config import DataConfig, EnvironmentConfig, PreferenceConfig, SftConfig
from megatron_rl.data.columns import RequiredColumn
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.data.rows import load_rows


def load_prompts(
    data: DataConfig,
    sft: SftConfig,
    pairs: PreferenceConfig,
    environment: EnvironmentConfig,
    seed: int,
    tokenizer,
    hf_config,
    required: Sequence[RequiredColumn],
) -> PromptDataset:
    """Return the training data, read and tokenized; raise ConfigError for the first row that cannot be trained on.

    seed: ``run.seed``.
    hf_config: the policy's Hugging Face config.
    required: the columns that the reward functions need in every row (``Reward.required_columns``).
    """
    return PromptDataset(
        load_rows(data.train),
        tokenizer,
        data,
        seed,
        context_tokens=context_tokens(pairs, hf_config),
        vocab_size=hf_config.vocab_size,
        required=required,
        held_out_share=sft.eval_share if sft.is_on else 0.0,
        responses=response_columns(sft, pairs, data),
        followed_by=None if environment.name is None else environment.role,
    )


def context_tokens(pairs: PreferenceConfig, hf_config) -> int:
    """Return the most tokens that a row may have: the context length, less one if a reward model is trained.

    A reward model reads its score at one extra token, which is added after the response.
    """
    return hf_config.max_position_embeddings - int(pairs.trains_reward_model)


def response_columns(sft: SftConfig, pairs: PreferenceConfig, data: DataConfig) -> tuple[tuple[str, str], ...]:
    """Return (column, its setting's name) of each response that the supervised steps read; () without such steps."""
    if not sft.is_on:
        return ()
    if pairs.is_on:
        return (pairs.chosen_key, "preference.chosen_key"), (pairs.rejected_key, "preference.rejected_key")
    return ((data.solution_key, "data.solution_key"),)
