"""The section of the training data: its files, its columns, and the text around a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_rl.config.checks import choose
from megatron_rl.config.ranges import Range
from megatron_rl.errors import ConfigError, quoted


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Names the training data and its columns, and turns a row into a prompt."""

    train: tuple[str, ...] = ()
    """Paths or patterns (`*.parquet`) of the training data: JSONL, JSON, CSV, Parquet, `save_to_disk`; required."""
    weights: tuple[Annotated[float, Range(0, 10**6, open_low=True)], ...] = ()
    """Share of each path of `data.train` in the prompts, relative to the others; `[]`: each row once an epoch."""
    prompt_key: str = "prompt"
    """Column of the prompt: a text; under `data.template=chat` a list of messages `{role, content}` as well."""
    answer_key: str = "answer"
    """Column of the answer, which reward functions are given as `answer`."""
    solution_key: str = "solution"
    """Column that supervised steps imitate: a text, or an episode as a list of messages."""
    messages_key: str | None = None
    """Column of a whole conversation, in place of prompt and solution (`data.template=chat`); null: none."""
    template: str = "{prompt}"
    """Text around the prompt, with `{prompt}` in it; or `chat`: the tokenizer's chat template."""
    system_prompt: str = ""
    """Text of a system message before the messages of each row that begins with none; needs `data.template=chat`."""
    max_prompt_tokens: Annotated[int, Range(1, 10**8)] = 512
    """Tokens of a prompt at most."""
    on_long_prompt: str = "fail"
    """For a row over the limit (a response beyond the context too): `fail` ends the run, naming it; `drop` goes on."""
    shuffle: bool = True
    """Whether each epoch has an order of its own, drawn from `run.seed`."""

    def __post_init__(self) -> None:
        if isinstance(self.train, str):
            raise ConfigError(
                f"data.train={quoted(self.train, 300)} is a text; give a list of paths, {quoted([self.train], 300)}"
            )
        if self.weights and len(self.weights) != len(self.train):
            raise ConfigError(
                f"data.weights has {len(self.weights)} numbers and data.train {len(self.train)} paths; give one each"
            )
        if self.system_prompt and self.template != "chat":
            raise ConfigError(
                f"data.system_prompt={quoted(self.system_prompt)} is a chat message, and data.template="
                f"{quoted(self.template)} is a text; write it in that, or set data.template=chat"
            )
        if self.messages_key is not None and self.template != "chat":
            raise ConfigError(
                f"data.messages_key={quoted(self.messages_key)} names conversations, and data.template="
                f"{quoted(self.template)} is a text; set data.template=chat"
            )
        choose("data.on_long_prompt", self.on_long_prompt, ("fail", "drop"))
        if self.template != "chat" and "{prompt}" not in self.template:
            raise ConfigError(f"data.template={quoted(self.template)} has no {{prompt}} in it; add it, or use 'chat'")
