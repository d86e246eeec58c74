"""The function ``reward.decided``: says of the beginning of a response that its reward is already fixed.

Contract: if the function returns True, the total reward of every continuation equals the reward of
the response that ends there. Then the advantage A is fixed given the tokens so far. So every later
token adds A · E[∇ log π(token | tokens before)] = 0 to the expected gradient, and may be left out
(docs/semantics.md#early-ends).
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np

from megatron_rl import users_code
from megatron_rl.config import RewardConfig
from megatron_rl.data.columns import RequiredColumn
from megatron_rl.errors import ConfigError, RewardError, quoted
from megatron_rl.reward.function import formatted_traceback
from megatron_rl.types import Prompt
from megatron_rl.users_code import exit_is_an_error

FIXED = ("prompt", "completion", "completion_ids")  # the arguments beside the row's columns

DecidedFunction = Callable[..., bool]


def resolve_decided(name: str) -> tuple[DecidedFunction, list[RequiredColumn]]:
    """Return the user's function, and the columns that every row must have: its parameters without default.

    name: ``reward.decided``, as ``module:function`` or ``./file.py:function``.

    Raises ConfigError for a name that is not found, and for an object that cannot be called as
    ``reward.decided`` is.
    """
    what = f"reward.decided={quoted(name, 300)}"
    function = users_code.resolve(name, {}, what=what, form="module:function")
    if inspect.isclass(function) or not callable(function):
        raise ConfigError(f"{what} is a {type(function).__name__}; name a function that returns True or False")
    called = function if inspect.isroutine(function) else type(function).__call__
    if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
        raise ConfigError(f"{what} is asynchronous, and a running sample waits for it; write it as a plain function")
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return function, []  # some C functions have no signature
    kinds = {parameter.kind for parameter in parameters}
    if positional := [x.name for x in parameters if x.kind is x.POSITIONAL_ONLY and x.default is x.empty]:
        raise ConfigError(f"{what} is called by keyword, and its parameter {positional[0]!r} takes none; drop the '/'")
    taken = {parameter.name for parameter in parameters}
    if inspect.Parameter.VAR_KEYWORD not in kinds and (missing := [key for key in FIXED if key not in taken]):
        raise ConfigError(
            f"{what} is called by keyword with {', '.join(FIXED)} and the row's columns, and does not take "
            f"{missing[0]!r}: take what you need by name and the rest by **columns"
        )
    needed = [
        RequiredColumn(name=x.name, needed_by=f"a parameter of {what}", null=True)
        for x in parameters
        if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY) and x.default is x.empty and x.name not in FIXED
    ]
    return function, needed


class Decided:
    """Asks the user's function about the samples of a run. It is an ``EarlyEnd`` (rollout/engines/early_end.py).

    The function is called as ``f(prompt=text, completion=text so far, completion_ids=[ids so far],
    **the row's columns)``. The text is the one that reward functions would get if the sample ended
    there. Two threads never call the function at once. An error of the function ends the run.

    every_tokens: the function is asked after every this many tokens.
    """

    def __init__(
        self,
        config: RewardConfig,
        decode: Callable[[list[int]], str],
        enter: Callable[[str], AbstractContextManager] = lambda name: contextlib.nullcontext(),
    ) -> None:
        """Resolve the function.

        decode: a function from token ids to their text, without special tokens.
        enter: returns a context that bounds the time of a call in the main thread; its argument is
            the call's name. In another thread ``reward.deadline_s`` bounds it.
        """
        self.name, self.every_tokens = config.decided, config.decided_every_tokens
        self._function, _ = resolve_decided(config.decided)
        self._decode, self._enter, self._deadline_s = decode, enter, config.deadline_s
        self._lock = threading.Lock()

    def ends(self, prompt: Prompt, sample_index: int, token_ids: Sequence[int]) -> bool:
        """Return whether the sample's reward is fixed after these tokens of its response.

        Raises RewardError if the function raises, exits, returns no bool, or another thread's call
        has not returned for ``reward.deadline_s``.
        """
        where = f"reward.decided={self.name!r} on sample {prompt.name}#{sample_index} after {len(token_ids)} tokens"
        if not self._lock.acquire(timeout=self._deadline_s):
            raise RewardError(
                f"{where}: an earlier call has not returned for reward.deadline_s={self._deadline_s:g} s; mend the "
                "function, or raise reward.deadline_s"
            )
        try:
            main = threading.current_thread() is threading.main_thread()
            with self._enter("reward") if main else contextlib.nullcontext():
                return self._answer(where, prompt, list(token_ids))
        finally:
            self._lock.release()

    def _answer(self, where: str, prompt: Prompt, token_ids: list[int]) -> bool:
        fixed = (prompt.text, self._decode(token_ids), token_ids)
        try:
            with exit_is_an_error():
                answer = self._function(**{**prompt.columns, **dict(zip(FIXED, fixed, strict=True))})
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too, as of a reward function
            raise RewardError(f"{where} failed; mend it:\n{formatted_traceback()}") from error
        if not isinstance(answer, (bool, np.bool_)):
            raise RewardError(
                f"{where} returned {answer!r:.80}, a {type(answer).__name__}; return True if the reward is fixed, "
                "else False"
            )
        return bool(answer)
