"""The sections ``data`` (training data), ``replay`` (groups trained again) and ``reroll`` (prompts sampled again)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from megatron_rl.config.checks import Range, choose
from megatron_rl.errors import ConfigError, quoted

AUTO = "auto"  # a value of data.template
# Arguments of transformers' apply_chat_template, and names that the run itself passes: a row or a
# setting may give no template variable of these names.
NO_VARIABLES = (
    *("conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
    "return_assistant_tokens_mask",
)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Names the training data and its columns, and sets how a row becomes a prompt.

    A column's name may have dots: `reward_model.ground_truth` is the field `ground_truth` of the
    column `reward_model`.
    """

    train: tuple[str, ...] = ()
    """Required: paths, patterns, URLs or hub names (docs/object-storage.md) of JSONL, JSON, CSV, Parquet or folders."""
    weights: tuple[Annotated[float, Range(0, 10**6, open_low=True)], ...] = ()
    """Relative share of each path of `data.train` in the prompts; `[]`: each row once an epoch."""
    prompt_key: str = "prompt"
    """Column of the prompt: a text, or a list of messages `{role, content}` for the chat template."""
    answer_key: str = "answer"
    """Column of the answer; reward functions get it as `answer`."""
    solution_key: str = "solution"
    """Column of the response that supervised steps imitate: a text, or an episode as a list of messages."""
    messages_key: str | None = None
    """Column of a whole conversation, in place of prompt and solution (`data.template=chat`); null: none."""
    template: str = AUTO
    """Text with `{prompt}` in it; `chat`: the tokenizer's template; `auto`: `chat` for messages, else no change."""
    system_prompt: str = ""
    """Text of a system message for rows that begin with no system message; needs `data.template=chat`."""
    template_columns: tuple[str, ...] = ("tools", "documents", "chat_template_kwargs")
    """Columns that the chat template gets as variables; `chat_template_kwargs` is a mapping of several variables."""
    template_variables: dict[str, Any] = field(default_factory=dict)
    """Chat template variables for every row, such as `{enable_thinking: false}`; a row's own columns replace them."""
    max_prompt_tokens: Annotated[int, Range(1, 10**8)] = 512
    """Largest number of tokens of a prompt."""
    on_long_prompt: str = "fail"
    """Prompt over `max_prompt_tokens`, or row over the model's context: `fail` ends the run; `drop` omits the row."""
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
        if self.system_prompt and self.template not in ("chat", AUTO):
            raise ConfigError(
                f"data.system_prompt={quoted(self.system_prompt)} is a chat message, and data.template="
                f"{quoted(self.template)} makes plain text; write the system prompt into it, or set data.template=chat"
            )
        if self.messages_key is not None and self.template not in ("chat", AUTO):
            raise ConfigError(
                f"data.messages_key={quoted(self.messages_key)} names conversations, and data.template="
                f"{quoted(self.template)} makes plain text; set data.template=chat"
            )
        named = {"data.template_columns": self.template_columns, "data.template_variables": self.template_variables}
        for key, names in named.items():
            taken = next((name for name in names if name in NO_VARIABLES), None)
            if taken is not None:
                raise ConfigError(f"{key} names {taken!r}, which is no variable of a template; leave it out")
        if self.template_variables and self.template not in ("chat", AUTO):
            raise ConfigError(
                f"data.template_variables={quoted(self.template_variables)} are the chat template's, and data.template="
                f"{quoted(self.template)} is a text; set data.template=chat"
            )
        choose("data.on_long_prompt", self.on_long_prompt, ("fail", "drop"))
        if self.template not in ("chat", AUTO) and "{prompt}" not in self.template:
            raise ConfigError(
                f"data.template={quoted(self.template)} has no {{prompt}} in it; add it, or use 'chat' or 'auto'"
            )


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Keeps trained groups with large advantages, to train them again in place of later groups without signal.

    A group without signal has no sample with a gradient. A rollout replaces such groups by kept ones
    (docs/async.md).
    """

    capacity_groups: Annotated[int, Range(0, 10**6)] = 0
    """Number of trained groups kept: those of largest Σ |advantage| · Σ_f std(rewards of function f); 0: none."""
    max_age_versions: Annotated[int, Range(1)] | None = 16
    """Largest number of weight versions from a group's oldest token to its replay; null: no limit."""
    max_uses: Annotated[int, Range(1)] = 1
    """Largest number of times that a group is replayed."""
    recompute_logprobs: bool = True
    """A replayed group's π_old: true: by the current policy; false: the engine's, from when it sampled the group."""


@dataclass(frozen=True, kw_only=True)
class RerollConfig:
    """Samples a prompt again if its whole group failed: every reward was at most `reroll.fail_threshold`."""

    max_groups: Annotated[int, Range(0, 10**6)] = 0
    """Largest number of prompts that are sampled again in one rollout; 0: none."""
    start_fraction: Annotated[float, Range(0, 1)] = 0.5
    """Fraction of the run, from its start, in which no prompt is sampled again."""
    fail_threshold: Annotated[float, Range(-(10**9))] = 0.0
    """A group failed, and its prompt may be sampled again, if every reward of it is at most this number."""
    capacity_prompts: Annotated[int, Range(1)] = 1024
    """Largest number of prompts that wait to be sampled again; of more, the one that waited longest is removed."""
    max_attempts: Annotated[int, Range(1)] = 1
    """Largest number of times that a prompt is sampled again, each after its group failed."""
