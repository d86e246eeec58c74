"""Reward functions: resolved by name, called on a batch, weighed, and what happens when one fails."""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import numbers
import operator
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.config import RewardConfig
from megatron_rl.types import ConfigError, RewardError, Rollout, Score

RewardFunction = Callable[..., Sequence[float | None]]

# By path, so that sympy is imported only by runs that use it.
BUILT_IN = {
    "arithmetic": "megatron_rl.reward.arithmetic:arithmetic",
    "math_verify": "megatron_rl.reward.math:math_verify",
}

_RESERVED = ("prompts", "completions", "completion_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFailure:
    """One function that failed on one sample; ``message`` is the traceback, or what was wrong with the value."""

    sample_id: str
    function: str
    message: str


class _WrongReturn(Exception):
    """A reward function returned something that is not one value per sample."""


def resolve(name: str) -> RewardFunction:
    """The callable behind a built-in name or ``module:function``. Raises ConfigError with the nearest way out."""
    path = BUILT_IN.get(name, name)
    module_name, separator, attribute = path.partition(":")
    if not (separator and module_name and attribute):
        nearest = difflib.get_close_matches(name, BUILT_IN, n=1, cutoff=0.5)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ConfigError(
            f"reward function {name!r} is not known; {hint}the built-ins are {', '.join(BUILT_IN)}; your own is written module:function"
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"reward function {name!r}: importing {module_name!r} failed with {type(error).__name__}: {error}; "
            "install it, or put the folder that holds it on PYTHONPATH"
        ) from error
    try:
        function = operator.attrgetter(attribute)(module)
    except AttributeError:
        candidates = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        nearest = difflib.get_close_matches(attribute, candidates, n=1, cutoff=0.0)
        hint = f"; the nearest it has is {nearest[0]!r}" if nearest else "; it defines no function"
        raise ConfigError(f"reward function {name!r}: module {module_name!r} has no {attribute!r}{hint}") from None
    _check_callable(name, function)
    return function


def _check_callable(name: str, function: object) -> None:
    if inspect.isclass(function):
        raise ConfigError(f"reward function {name!r} is a class; name an instance of it, made at the top level of the module")
    if not callable(function):
        raise ConfigError(f"reward function {name!r} is a {type(function).__name__}, which cannot be called; name a function")
    called = function if inspect.isroutine(function) else type(function).__call__
    if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
        raise ConfigError(f"reward function {name!r} is async, which is not supported yet; make it a plain def")


class Reward:
    """The configured reward functions as one.

    A reward function is any callable ``f(prompts, completions, completion_ids, **columns) -> list[float | None]``, called by
    keyword with lists of equal length: prompt texts, completion texts, completion token ids, and every column of the
    dataset as a list (None where a row lacks it; a column with the name of one of the first three is not passed). It returns
    one number per sample, or None where it does not apply.

    A function **fails on a sample** when it raises there, or gives a value that is not a finite number or None. When a call
    on the whole batch raises or returns a wrong number of values, nobody knows whose fault it was: the function is called
    again **one sample at a time**, and only those that fail alone are guilty. So a function must not depend on which samples
    it is called with, and may be called twice on the same one. If none fails alone, the batch call itself is the error.

    ``last_errors``: the failures of the last `score`, for metrics and the log.
    """

    def __init__(self, config: RewardConfig) -> None:
        """Raises ConfigError for no function, a repeated one, or one that does not resolve."""
        if not config.functions:
            raise ConfigError(f"reward.functions is empty; name one of {', '.join(BUILT_IN)}, or your own module:function")
        repeated = sorted({name for name in config.functions if config.functions.count(name) > 1})
        if repeated:
            raise ConfigError(f"reward.functions names {repeated[0]!r} more than once; name it once and raise its reward.weights")
        self.names = tuple(config.functions)
        self.last_errors: tuple[RewardFailure, ...] = ()
        self._functions = tuple(resolve(name) for name in self.names)
        self._weights = tuple(config.resolved_weights)
        self._on_error = config.on_error

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """[S] one Score per rollout, in order.

        ``total`` is the weighted sum over the functions that applied, None if none did. A sample on which any function failed
        meets ``reward.on_error``: ``fail`` raises RewardError with its id and the traceback, ``drop`` gives a total of None,
        ``zero`` a total of 0.0. Raises ConfigError where a function cannot take the dataset's columns.
        """
        self.last_errors = ()
        if not rollouts:
            return []
        failures: list[RewardFailure] = []
        values_by_function = []
        for name, function in zip(self.names, self._functions, strict=True):
            values, failed = self._apply(name, function, rollouts)
            values_by_function.append(values)
            failures.extend(failed)
        self.last_errors = tuple(failures)
        guilty = {failure.sample_id for failure in failures}
        return [
            self._combine(by_function, rollout.sample_id in guilty)
            for rollout, by_function in zip(rollouts, zip(*values_by_function, strict=True), strict=True)
        ]

    def _combine(self, by_function: tuple[float | None, ...], failed: bool) -> Score:
        if failed:
            return Score(total=0.0 if self._on_error == "zero" else None, by_function=by_function)
        applied = [weight * value for weight, value in zip(self._weights, by_function, strict=True) if value is not None]
        return Score(total=sum(applied) if applied else None, by_function=by_function)

    def _apply(self, name: str, function: RewardFunction, rollouts: Sequence[Rollout]) -> tuple[list[float | None], list[RewardFailure]]:
        """One function over the batch: [S] values (None where it failed) and its failures."""
        columns = sorted({key for rollout in rollouts for key in rollout.prompt.columns})
        _check_signature(name, function, columns)
        raw, batch_error = _call(function, rollouts, columns)
        outcomes: list[tuple[object, str | None]] = []
        if batch_error is None:
            outcomes = [(value, None) for value in raw]
        else:
            for rollout in rollouts:
                single, error = _call(function, [rollout], columns)
                outcomes.append((single[0], None) if error is None else (None, error))
        values: list[float | None] = []
        failures: list[RewardFailure] = []
        for rollout, (value, error) in zip(rollouts, outcomes, strict=True):
            error = error or _complaint(value)
            values.append(None if error or value is None else float(value))
            if error:
                failures.append(RewardFailure(sample_id=rollout.sample_id, function=name, message=error))
        if batch_error is not None and not any(error for _, error in outcomes):
            raise RewardError(
                f"reward function {name!r} failed on a batch of {len(rollouts)} samples ({rollouts[0].sample_id} to "
                f"{rollouts[-1].sample_id}) and on none of them alone; mend what depends on the batch:\n{batch_error}"
            )
        if failures and self._on_error == "fail":
            first = failures[0]
            raise RewardError(
                f"reward function {name!r} failed on sample {first.sample_id} "
                f"({len(failures)} of {len(rollouts)} samples failed); "
                f"mend it, or set reward.on_error to drop or zero:\n{first.message}"
            )
        return values, failures


def _check_signature(name: str, function: RewardFunction, columns: Sequence[str]) -> None:
    """Ask whether the call can bind before making it: the fault is the signature's, not a sample's."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # some C functions have none to look at; the call itself will tell
    passed = dict.fromkeys([*_RESERVED, *columns])
    try:
        signature.bind(**passed)
    except TypeError as error:
        raise ConfigError(
            f"reward function {name!r} cannot be called: {error}. It is called by keyword with {', '.join(passed)}: take the "
            "columns you need by name and the rest by **columns"
        ) from None


def _call(function: RewardFunction, rollouts: Sequence[Rollout], columns: Sequence[str]) -> tuple[list[object], str | None]:
    """(values, None), or ([], the traceback) where the function raised or returned a wrong number of values."""
    by_column = {key: [rollout.prompt.columns.get(key) for rollout in rollouts] for key in columns}
    fixed = {
        "prompts": [rollout.prompt.text for rollout in rollouts],
        "completions": [rollout.text for rollout in rollouts],
        "completion_ids": [list(rollout.response_ids) for rollout in rollouts],
    }
    try:
        return _as_list(function(**{**by_column, **fixed}), len(rollouts)), None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # noqa: BLE001
        # Timeouts of libraries (math-verify's) derive from it, so as not to be caught by the code they interrupt. Nothing is
        # lost: the traceback goes to the caller, which raises it or counts it.
        return [], traceback.format_exc()


def _as_list(returned: object, expected: int) -> list[object]:
    if not isinstance(returned, (list, tuple, np.ndarray)):
        kind = type(returned).__name__
        raise _WrongReturn(f"it returned a {kind} for {expected} samples; return a list of one number or None each")
    values = list(returned)
    if len(values) != expected:
        raise _WrongReturn(f"it returned {len(values)} values for {expected} samples; return one number or None each")
    return values


def _complaint(value: object) -> str | None:
    """What is wrong with one value, or None."""
    if value is None:
        return None
    if not isinstance(value, (numbers.Real, np.bool_)):
        return f"its value is {value!r:.80}, a {type(value).__name__}; return a finite number, or None where it does not apply"
    if not math.isfinite(value):
        return f"its value is {value!r}; return a finite number, or None where it does not apply"
    return None
