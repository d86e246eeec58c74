"""The tokenizer of a run."""

from __future__ import annotations

from megatron_rl.config import Config
from megatron_rl.errors import ConfigError


def load_tokenizer(config: Config):
    """Return the run's tokenizer, or raise ConfigError if it has no end of sequence: no completion would end."""
    from transformers import AutoTokenizer

    path = config.model.tokenizer_path or config.model.hf_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no tokenizer can be loaded from {path!r} ({str(error).splitlines()[0]}); name one by model.tokenizer_path"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer of {path!r} has no eos_token, so no completion would end; add one to its "
            "tokenizer_config.json"
        )
    return tokenizer
