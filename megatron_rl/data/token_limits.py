"""The limits that a model sets on the tokens of a row: the length of its context, and the ids of its vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.errors import ConfigError

_FEW_CHARACTERS = 32  # per token of the limit; a text of no more is tokenized without another check


class TokenLimits:
    """Holds a model's limits on tokens and the tokenizer that makes the tokens.

    context_tokens: the model's context in tokens; None: no limit.
    vocab_size: the number of tokens that the model knows; None: no limit.
    """

    def __init__(self, tokenizer, context_tokens: int | None, vocab_size: int | None) -> None:
        self.context_tokens, self.vocab_size = context_tokens, vocab_size
        self._tokenizer = tokenizer
        self._longest_token: int | None = None

    def is_endless(self, length: int, limit: int) -> bool:
        """Return whether a text is so long that it must exceed ``limit`` tokens, without tokenizing it.

        length: the number of characters of the text.
        """
        if length <= _FEW_CHARACTERS * limit:
            return False
        if self._longest_token is None:
            self._longest_token = max(map(len, self._tokenizer.get_vocab()), default=0)
        return length > max(self._longest_token, _FEW_CHARACTERS) * limit

    def check_vocabulary(self, row: str, text: str, token_ids: Sequence[int]) -> None:
        """Raise ConfigError for a token id that is not in the model's vocabulary.

        row: the row's name, for the message.
        text: what was tokenized, for the message: the name of a column, or "the prompt".
        """
        if self.vocab_size is not None and (largest := max(token_ids, default=0)) >= self.vocab_size:
            raise ConfigError(
                f"{row}: {text} has the token {largest}, and the model's vocabulary ends at "
                f"{self.vocab_size - 1}: the tokenizer of {self._tokenizer.name_or_path!r} is not the model's; name "
                "the right one by model.tokenizer_path"
            )
