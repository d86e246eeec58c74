"""The sections of prompts: the training data, trained groups that are used again, prompts that are asked again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from megatron_rl.config.checks import Range, choose
from megatron_rl.errors import ConfigError, quoted

AUTO = "auto"  # of data.template
# Arguments of transformers' apply_chat_template, and what the run itself gives; no template has
# such a variable.
NO_VARIABLES = (
    *("conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
    "return_assistant_tokens_mask",
)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Names the training data and its columns, and turns a row into a prompt.

    A column's name may have dots: `reward_model.ground_truth` is the field `ground_truth` of the
    column `reward_model`.
    """

    train: tuple[str, ...] = ()
    """Paths, patterns or names on the hub (docs/object-storage.md): JSONL, JSON, CSV, Parquet, folders; required."""
    weights: tuple[Annotated[float, Range(0, 10**6, open_low=True)], ...] = ()
    """Share of each path of `data.train` in the prompts, relative to the others; `[]`: each row once an epoch."""
    prompt_key: str = "prompt"
    """Column of the prompt: a text, or a list of messages `{role, content}`, which the chat template writes."""
    answer_key: str = "answer"
    """Column of the answer, which reward functions are given as `answer`."""
    solution_key: str = "solution"
    """Column that supervised steps imitate: a text, or an episode as a list of messages."""
    messages_key: str | None = None
    """Column of a whole conversation, in place of prompt and solution (`data.template=chat`); null: none."""
    template: str = AUTO
    """Text with `{prompt}` in it; `chat`: the tokenizer's chat template; `auto`: that for messages, else the prompt."""
    system_prompt: str = ""
    """Text of a system message before the messages of each row that begins with none; needs `data.template=chat`."""
    template_columns: tuple[str, ...] = ("tools", "documents", "chat_template_kwargs")
    """Columns that the chat template reads as variables, where a row has them; the last one is an object of several."""
    template_variables: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template for every row, such as `{enable_thinking: false}`; a row's columns come first."""
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
        if self.system_prompt and self.template not in ("chat", AUTO):
            raise ConfigError(
                f"data.system_prompt={quoted(self.system_prompt)} is a chat message, and data.template="
                f"{quoted(self.template)} is a text; write it in that, or set data.template=chat"
            )
        if self.messages_key is not None and self.template not in ("chat", AUTO):
            raise ConfigError(
                f"data.messages_key={quoted(self.messages_key)} names conversations, and data.template="
                f"{quoted(self.template)} is a text; set data.template=chat"
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
    """Keeps trained groups with the most signal, which stand in for groups without signal (docs/async.md)."""

    capacity_groups: Annotated[int, Range(0, 10**6)] = 0
    """Groups kept, those with the most signal: Σ|A| · Σ_f std of reward function f; 0: none."""
    max_age_versions: Annotated[int, Range(1)] | None = 16
    """Weight versions between a group's oldest token and the step that trains it again; null: no limit."""
    max_uses: Annotated[int, Range(1)] = 1
    """Number of times that a group is replayed."""
    recompute_logprobs: bool = True
    """true: π_old and the weights π_old/μ are the current policy's; false: π_old is the engine's at sampling time."""


@dataclass(frozen=True, kw_only=True)
class RerollConfig:
    """Asks prompts again whose whole group failed: every reward was at most `reroll.fail_threshold`."""

    max_groups: Annotated[int, Range(0, 10**6)] = 0
    """Prompts that are asked again in one rollout at most; 0: never."""
    start_fraction: Annotated[float, Range(0, 1)] = 0.5
    """Share of training before which no prompt is asked again."""
    fail_threshold: Annotated[float, Range(-(10**9))] = 0.0
    """A group failed where every reward is at most this."""
    capacity_prompts: Annotated[int, Range(1)] = 1024
    """Prompts that wait at most; when more fail, the one that waited longest leaves."""
    max_attempts: Annotated[int, Range(1)] = 1
    """Number of times that a prompt is asked again."""
