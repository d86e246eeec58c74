"""The training data of a run: its rows, read, checked and tokenized for the policy's model."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.config import Config
from megatron_rl.data.columns import RequiredColumn
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.data.rows import load_rows
from megatron_rl.trainer.supervised import response_columns


def load_prompts(config: Config, tokenizer, hf_config, required: Sequence[RequiredColumn]) -> PromptDataset:
    """Return the training data, read and tokenized; raise ConfigError for the first row that cannot be trained.

    hf_config: the policy's Hugging Face config.
    required: the columns that every row must have (``Reward.required_columns``).
    """
    return PromptDataset(
        load_rows(config.data.train),
        tokenizer,
        config.data,
        config.run.seed,
        context_tokens=context_tokens(config, hf_config),
        vocab_size=hf_config.vocab_size,
        required=required,
        held_out_share=config.sft.eval_share if config.sft.is_on else 0.0,
        responses=response_columns(config),
        followed_by=None if config.environment.name is None else config.environment.role,
    )


def context_tokens(config: Config, hf_config) -> int:
    """Return the most tokens of a row: the model's context, less the place that a reward model's score is read at."""
    return hf_config.max_position_embeddings - int(config.trains_reward_model)
