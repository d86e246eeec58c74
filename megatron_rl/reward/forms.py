"""The forms of reward functions: lists of texts (ours), lists of messages (TRL's), and verl's compute_score.

| parameters of the function                                                       | form       | a call gets       |
|----------------------------------------------------------------------------------|------------|-------------------|
| ``completions`` of type ``list[list[dict]]``, or ``reward.completions=messages`` | MESSAGES   | lists of messages |
| ``solution_str``                                                                 | VERL       | one sample        |
| ``solution_strs``                                                                | VERL_BATCH | lists of texts    |
| any others                                                                       | TEXTS      | lists of texts    |

The verl forms follow verl 0.9.1, ``NaiveRewardManager`` and ``BatchRewardManager``. The form of
messages follows TRL 1.16, ``GRPOTrainer``.
"""

from __future__ import annotations

import asyncio
import enum
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from megatron_rl.data.columns import ANSWER
from megatron_rl.errors import ConfigError

LISTS = ("prompts", "completions", "completion_ids")
GROUND_TRUTH = "reward_model.ground_truth"  # the field of verl's rows that holds the answer
EXTRA = {"num_turns": None, "rollout_reward_scores": {}}  # fields that verl's naive manager adds to extra_info
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_ONE_SAMPLE, _BATCH = "solution_str", "solution_strs"

Messages = Sequence[Mapping[str, Any]]


class Form(enum.Enum):
    """Names the ways to call a reward function. A member's value is the phrase that describes the way in the log."""

    TEXTS = "takes lists, its completions are texts"
    MESSAGES = "takes lists, its prompts and completions are lists of chat messages (TRL's conversational form)"
    VERL = "is verl's: it is called with one sample"
    VERL_BATCH = "is verl's for batches: it is called with lists"


class Conversational:
    """Calls a reward function with lists of chat messages instead of texts, as TRL does for conversational prompts.

    Example: the function gets ``completions == [[{"role": "assistant", "content": "7"}], [{"role":
    "assistant", "content": "8"}]]``.
    """

    def __init__(self, function: Callable) -> None:
        self.function = function

    def call(self, arguments: Mapping[str, list], conversations: Sequence[Messages | None]) -> object:
        """Return the function's result on a list of samples. A prompt that is a text becomes a user's message.

        arguments, conversations: as for ``invoke``.
        """
        prompts = [
            [{"role": "user", "content": text}] if asked is None else [dict(message) for message in asked]
            for text, asked in zip(arguments["prompts"], conversations, strict=True)
        ]
        completions = [[{"role": "assistant", "content": text}] for text in arguments["completions"]]
        return self.function(**{**arguments, "prompts": prompts, "completions": completions})


class VerlForm:
    """Calls a function in the form of verl's compute_score, with each sample alone or with lists of samples.

    ``ground_truth`` is the row's field ``reward_model.ground_truth``. In a row without this field
    it is the row's answer (``data.answer_key``). ``extra_info`` is a copy of the column of this
    name, with the fields that verl adds (EXTRA). If the function returns a mapping for a sample,
    its ``score`` is the value.

    needed: the columns, or fields such as ``reward_model.ground_truth``, that every row must have.
    """

    def __init__(self, name: str, function: Callable, *, batched: bool) -> None:
        """Read the function's parameters.

        name: the function's name, for messages.
        batched: whether a call gets lists of samples.

        Raises ConfigError for a parameter that has no default and that verl would not pass.
        """
        self._function, self._batched = function, batched
        known = {f"{one}s" if batched else one: one for one in _VERL}
        parameters = inspect.signature(function).parameters.values()
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self._taken = {key: one for key, one in known.items() if takes_all or key in {p.name for p in parameters}}
        single = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        required = [p.name for p in parameters if p.default is p.empty and p.kind not in single]
        if unknown := [key for key in required if key not in known]:
            raise ConfigError(
                f"reward function {name!r} {_form_of(batched).value}, and its parameter {unknown[0]!r} has no default "
                f"and is none of {', '.join(known)}; give it a default"
            )
        columns = {"data_source": "data_source", "ground_truth": GROUND_TRUTH}
        self.needed = [columns[known[key]] for key in required if known[key] in columns]

    @property
    def form(self) -> Form:
        return _form_of(self._batched)

    def call(self, arguments: Mapping[str, list], conversations: Sequence[Messages | None]) -> object:
        """Return a list of one score per sample, or an awaitable of this list. Arguments as for ``invoke``."""
        samples = [self._sample(arguments, number) for number in range(len(arguments["completions"]))]
        if self._batched:
            lists = {key: [sample.get(one) for sample in samples] for key, one in self._taken.items()}
            returned = self._function(**lists)
            return _scores_once(returned) if inspect.isawaitable(returned) else _scores(returned)
        found = [self._function(**{key: sample[key] for key in self._taken if key in sample}) for sample in samples]
        return _gathered(found) if any(map(inspect.isawaitable, found)) else _scores(found)

    def _sample(self, arguments: Mapping[str, list], number: int) -> dict[str, object]:
        row = {name: values[number] for name, values in arguments.items()}
        held, extra = row.get("reward_model"), row.get("extra_info")
        sample = {"solution_str": row["completions"]}
        if isinstance(held, Mapping) and "ground_truth" in held:
            sample["ground_truth"] = held["ground_truth"]
        elif GROUND_TRUTH in row or ANSWER in row:
            sample["ground_truth"] = row[GROUND_TRUTH if GROUND_TRUTH in row else ANSWER]
        if "data_source" in row:
            sample["data_source"] = row["data_source"]
        sample["extra_info"] = {**(extra or {}), **EXTRA} if extra is None or isinstance(extra, Mapping) else extra
        return sample


def in_form(name: str, function: Callable, completions: str) -> tuple[Form, Callable | Conversational | VerlForm]:
    """Return (form, object): the way to call a user's reward function, and the object that ``invoke`` calls.

    completions: ``reward.completions``, "text" or "messages". It decides only if the annotated type
        of the function's parameter ``completions`` does not.

    Raises ConfigError for a function whose parameters belong to two forms, or that requires a
    parameter which verl does not pass.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return Form.TEXTS, function  # some C functions have no signature
    verl = [key for key in (_ONE_SAMPLE, _BATCH) if key in parameters]
    lists = [key for key in LISTS if key in parameters]
    if len(verl) + bool(lists) > 1:
        raise ConfigError(
            f"reward function {name!r} takes {' and '.join([*verl, *lists])}, so that its form is ambiguous: "
            f"{_ONE_SAMPLE} is verl's for one sample, {_BATCH} verl's for a batch, {', '.join(LISTS)} are lists of "
            "ours and of TRL's; keep the parameters of one, and rename a column of such a name"
        )
    if verl:
        found = VerlForm(name, function, batched=verl == [_BATCH])
        return found.form, found
    typed = _typed_form(parameters["completions"].annotation) if "completions" in parameters else None
    form = typed or (Form.MESSAGES if completions == "messages" else Form.TEXTS)
    return form, Conversational(function) if form is Form.MESSAGES else function


def invoke(function: Callable, arguments: Mapping[str, list], conversations: Sequence[Messages | None]) -> object:
    """Call a reward function as its form demands, and return its result on a list of samples.

    arguments: keyword → list over the samples. The keywords are the dataset's columns, ``prompts``,
        ``completions`` (both texts) and ``completion_ids``.
    conversations: the chat messages of each sample's prompt; None for a prompt that is a text.
    """
    if isinstance(function, Conversational | VerlForm):
        return function.call(arguments, conversations)
    return function(**arguments)


def signature_of(function: Callable | Conversational) -> inspect.Signature:
    """Return the signature of the user's function. Raises ValueError for a C function without a signature."""
    return inspect.signature(function.function if isinstance(function, Conversational) else function)


def hint_of(error: BaseException) -> str:
    """Return advice if an error shows that a function wants messages and got texts; otherwise an empty text."""
    if isinstance(error, TypeError) and "string indices must be integers" in str(error):
        return (
            "it may be written for completions that are chat messages, as TRL's for conversational data, and it is "
            "given texts: set reward.completions=messages, or type its parameter list[list[dict]]\n"
        )
    return ""


def _form_of(batched: bool) -> Form:
    return Form.VERL_BATCH if batched else Form.VERL


def _typed_form(annotation: object) -> Form | None:
    """Return the form (MESSAGES or TEXTS) that the type of ``completions`` fits; None if it fits neither or both.

    annotation: the type in the function's signature; ``inspect.Parameter.empty`` if it has none.
    """
    if annotation is inspect.Parameter.empty:
        return None
    words = (annotation if isinstance(annotation, str) else str(annotation)).replace(" ", "").lower()
    outer = words.replace("typing.", "").replace("collections.abc.", "")
    objects = any(word in outer for word in ("dict", "mapping", "message"))
    texts = any(f"{kind}[str]" in outer for kind in ("list", "sequence", "iterable", "collection"))
    if objects == texts:
        return None
    return Form.MESSAGES if objects else Form.TEXTS


async def _gathered(values: Sequence[object]) -> list[object]:
    async def one(value: object) -> object:
        return await value if inspect.isawaitable(value) else value

    return _scores(await asyncio.gather(*map(one, values)))


async def _scores_once(returned: Awaitable) -> object:
    return _scores(await returned)


def _scores(returned: object) -> object:
    """Return the list ``returned`` with each mapping in it replaced by the mapping's ``score``.

    If ``returned`` is no list, it is returned unchanged.
    """
    if not isinstance(returned, list | tuple):
        return returned
    return [value["score"] if isinstance(value, Mapping) and "score" in value else value for value in returned]
