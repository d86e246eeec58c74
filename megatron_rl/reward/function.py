"""A single reward function: resolved by name, checked against the dataset's columns, called on a list of samples."""

from __future__ import annotations

import asyncio
import inspect
import numbers
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl import users_code
from megatron_rl.config.reward import REWARD_MODEL
from megatron_rl.data.columns import ANSWER, RequiredColumn
from megatron_rl.errors import ConfigError
from megatron_rl.reward.forms import (
    GROUND_TRUTH,
    LISTS,
    Form,
    Messages,
    VerlForm,
    hint_of,
    in_form,
    invoke,
    signature_of,
)
from megatron_rl.types import Rollout
from megatron_rl.users_code import exit_is_an_error, is_reward

RewardFunction = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]

MATH = "math_verify"
# Given as paths, so that only runs that use math_verify import sympy.
BUILT_IN = {
    "arithmetic": "megatron_rl.reward.arithmetic:arithmetic",
    MATH: "megatron_rl.reward.math:math_verify",
}

MODELS = (REWARD_MODEL,)  # built-in functions that hold a model, which reward.model_path names
ENVIRONMENT = "environment"  # no function, but the reward that the rollout's environment gave (reward.py)

_MAX_TRACEBACK = 20_000  # characters; an error that quotes its whole batch would fill the log


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Holds one reward function's result on one sample.

    value: the reward; None if the function does not apply or failed.
    error: the traceback, or a sentence that says how the value is wrong; None without an error.
    """

    value: float | None = None
    error: str | None = None


class _WrongReturn(Exception):
    """Signals that a reward function did not return one value per sample."""


def resolve(name: str, completions: str = "text", model_path: str | None = None) -> tuple[Form | None, RewardFunction]:
    """Return (form, callable) of a reward function, named by a built-in name or as ``module:function``.

    The form says how the function is called (forms.py); it is None for a built-in function.

    completions: ``reward.completions``, "text" or "messages".
    model_path: ``reward.model_path``, for the function ``reward_model``.

    Raises ConfigError, with advice, for a name that cannot be resolved.
    """
    if name in MODELS:
        from megatron_rl.reward.reward_model import RewardModelScore  # brings torch along

        return None, RewardModelScore(model_path)
    function = users_code.resolve(
        name, BUILT_IN, what=f"reward function {name!r}", form="module:function", also=(*MODELS, ENVIRONMENT)
    )
    _check_callable(name, function)
    return (None, function) if name in BUILT_IN else in_form(name, function, completions)


def _check_callable(name: str, function: object) -> None:
    if inspect.isclass(function):
        raise ConfigError(
            f"reward function {name!r} is a class; name an instance of it, made at the top level of the module"
        )
    if not callable(function):
        raise ConfigError(
            f"reward function {name!r} is a {type(function).__name__}, which cannot be called; name a function"
        )
    called = function if inspect.isroutine(function) else type(function).__call__
    if inspect.isasyncgenfunction(called):
        raise ConfigError(
            f"reward function {name!r} is an async generator; return the list of values instead of yielding them"
        )


def check_signature(name: str, function: RewardFunction, columns: Sequence[str]) -> None:
    """Raise ConfigError if ``function`` does not take the dataset's ``columns`` and the three fixed arguments.

    The fixed arguments are ``prompts``, ``completions`` and ``completion_ids``.
    """
    if isinstance(function, VerlForm):
        return  # it gets only the columns that it names
    try:
        signature = signature_of(function)
    except ValueError:
        return  # some C functions have no signature; the call itself shows a fault
    keywords = dict.fromkeys([*LISTS, *columns])
    try:
        signature.bind(**keywords)
    except TypeError as error:
        raise ConfigError(
            f"reward function {name!r} cannot be called: {error}. It is called by keyword with {', '.join(keywords)}: "
            "take the columns you need by name and the rest by **columns"
        ) from None


def required_columns(parameters: Mapping[str, Sequence[str]]) -> list[RequiredColumn]:
    """Return the columns that every row must have because a reward function needs them.

    The answer column of `math_verify` gets a check that parses each answer at the run's start. So a
    bad answer is found before anything is trained.

    A user's function gets a null in a row as None. The built-in functions need an answer, so null
    is refused for them.

    parameters: function name → the columns that it needs (`needed_parameters`).
    """
    needed = {}
    for name, columns in parameters.items():
        if name in MODELS:
            continue
        if name in BUILT_IN:
            fault = fault_of_gold if name == MATH else None
            column = RequiredColumn(name=ANSWER, needed_by=f"read by reward function {name!r}", null=False, fault=fault)
            if ANSWER not in needed or needed[ANSWER].fault is None:
                needed[ANSWER] = column
            continue
        for column in columns:
            what = "ground_truth" if column == GROUND_TRUTH else "a parameter"
            needed_by = f"{what} of reward function {name!r}"
            found = RequiredColumn(name=column, needed_by=needed_by, null=True, or_answer=column == GROUND_TRUTH)
            needed.setdefault(column, found)
    return list(needed.values())


def fault_of_gold(gold: object) -> str | None:
    """Return why `math_verify` cannot compare completions with a gold answer, with advice; None if it can."""
    from megatron_rl.reward.math import read_gold  # brings sympy along

    try:
        read_gold(str(gold))
    except ValueError as error:
        return str(error)
    return None


def needed_parameters(function: RewardFunction) -> list[str]:
    """Return the dataset's columns that a call must pass: the function's parameters without default.

    The fixed arguments ``prompts``, ``completions`` and ``completion_ids`` are left out.
    """
    if isinstance(function, VerlForm):
        return function.needed
    try:
        parameters = signature_of(function).parameters.values()
    except ValueError:
        return []  # some C functions have no signature
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        parameter.name
        for parameter in parameters
        if parameter.kind in by_keyword and parameter.default is parameter.empty and parameter.name not in LISTS
    ]


def columns_of(rollouts: Sequence[Rollout]) -> list[str]:
    return sorted({key for rollout in rollouts for key in rollout.prompt.columns})


def arguments_of(rollouts: Sequence[Rollout], columns: Sequence[str]) -> dict[str, list]:
    """Return the keyword arguments of a reward function for a list of rollouts: name → list over the rollouts.

    A column named like a fixed argument (``prompts``, ``completions``, ``completion_ids``) is not
    passed.
    """
    by_column = {key: [rollout.prompt.columns.get(key) for rollout in rollouts] for key in columns}
    fixed = {
        "prompts": [rollout.prompt.text for rollout in rollouts],
        "completions": [rollout.text for rollout in rollouts],
        "completion_ids": [list(rollout.response_ids) for rollout in rollouts],
    }
    return {**by_column, **fixed}


def conversations_of(rollouts: Sequence[Rollout]) -> list[Messages | None]:
    return [rollout.prompt.messages for rollout in rollouts]


def call(
    function: RewardFunction, arguments: Mapping[str, list], conversations: Sequence[Messages | None]
) -> tuple[list[Outcome], str | None]:
    """Call a reward function. Return (an outcome per sample, None), or ([], the reason) if the call fails.

    The function's parameters decide whether it gets lists of texts, lists of messages, or one
    sample at a time (forms.py).

    A call fails if it raises, calls ``sys.exit`` or ``os._exit``, or returns a wrong number of
    values. The reason is the traceback, or a sentence about the returned value. A coroutine is run
    to its end in a new event loop. KeyboardInterrupt is raised again: in a rank it comes from the
    user.

    arguments, conversations: as for ``invoke`` (forms.py).
    """
    try:
        with exit_is_an_error():
            returned = invoke(function, arguments, conversations)
            if inspect.isawaitable(returned):
                returned = asyncio.run(_awaited(returned))
        return [outcome_of(value) for value in _as_list(returned, len(arguments["completions"]))], None
    except KeyboardInterrupt:
        raise
    except _WrongReturn as error:
        return [], str(error)
    except BaseException as error:  # noqa: BLE001
        # Timeouts of libraries (math-verify's) derive from BaseException, so that the code that they interrupt
        # does not catch them. Nothing is lost: the traceback goes to the caller, which raises or counts it.
        return [], f"{hint_of(error)}{formatted_traceback()}"


def formatted_traceback() -> str:
    """Return the traceback of the exception being handled, or its end if it is long."""
    text = traceback.format_exc()
    return text if len(text) <= _MAX_TRACEBACK else f"[…]{text[-_MAX_TRACEBACK:]}"


async def _awaited(awaitable: Awaitable) -> object:
    return await awaitable


def _as_list(returned: object, expected: int) -> list[object]:
    if not isinstance(returned, (list, tuple, np.ndarray)):
        kind = type(returned).__name__
        raise _WrongReturn(f"it returned a {kind} for {expected} samples; return a list of one number or None each")
    values = list(returned)
    if len(values) != expected:
        raise _WrongReturn(f"it returned {len(values)} values for {expected} samples; return one number or None each")
    return values


def outcome_of(value: object) -> Outcome:
    """Return the Outcome of a value that a function or an environment gave.

    A value that is neither None nor a finite number becomes an error.
    """
    if value is None:
        return Outcome()
    if not isinstance(value, (numbers.Real, np.bool_)):
        fault = (
            f"its value is {value!r:.80}, a {type(value).__name__}; return a finite number, or None where it does not "
            "apply"
        )
        return Outcome(error=fault)
    if not is_reward(value):
        return Outcome(
            error=f"its value is {value!r:.80}; return a finite number (float32), or None where it does not apply"
        )
    return Outcome(value=float(value))
