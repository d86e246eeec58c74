"""The run's total reward: the weighted sum of the reward functions' values, which this process or workers compute."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.config import RewardConfig
from megatron_rl.distributed.time_limit import time_limit
from megatron_rl.errors import ConfigError, RewardError
from megatron_rl.reward.forms import Form
from megatron_rl.reward.function import (
    BUILT_IN,
    ENVIRONMENT,
    Outcome,
    RewardFunction,
    arguments_of,
    call,
    check_signature,
    columns_of,
    conversations_of,
    needed_parameters,
    outcome_of,
    required_columns,
    resolve,
)
from megatron_rl.types import Rollout, Score

log = logging.getLogger(__name__)

MOST_KINDS = 20  # kinds of errors that are logged


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFailure:
    """Describes a reward function's failure on a sample.

    message: the traceback, or a sentence that says how the value is wrong.
    """

    sample_id: str
    function: str
    message: str

    @property
    def last_line(self) -> str:
        """Return the line that says what went wrong: a traceback's last line, or any other message's first line."""
        lines = [line for line in self.message.splitlines() if line.strip()] or [""]
        return (lines[-1] if "Traceback" in self.message else lines[0])[:300]

    @property
    def kind(self) -> str:
        """Return the failure's kind: the exception's class, or the message without its numbers and quoted words.

        Only the first failure of each kind is logged in full.
        """
        if "Traceback" in self.message:
            return self.last_line.partition(":")[0]
        return re.sub(r"'[^']*'|[-\d.]+", "", self.last_line)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answers:
    """Holds one reward function's results on a batch of S samples.

    outcomes: [S], one Outcome per sample.
    unexplained: (samples, traceback) of each call that failed on several samples, though it failed
        on none of them alone.
    """

    outcomes: Sequence[Outcome]
    unexplained: Sequence[tuple[Sequence[Rollout], str]]


class Reward:
    """Scores rollouts with the configured reward functions as one.

    A reward function is any callable ``f(prompts, completions, completion_ids, **columns) ->
    list[float | None]``, plain or ``async``. It is called by keyword with lists of equal length:
    prompt texts, completion texts, completion token ids, and each column of the dataset (None for a
    row without it). A column with the name of one of the first three is not passed. The function
    returns a number per sample, or None if it does not apply to the sample.

    With ``reward.num_workers``, worker processes call the functions on a group at a time. Functions
    that ``reward.in_process`` names, and all functions without workers, are called in this process
    on the whole batch. Only a worker can be interrupted, so ``reward.deadline_s`` bounds only
    functions in workers.

    Two more forms of functions are recognised by their parameters (forms.py). TRL's functions take
    completions as lists of messages. verl's ``compute_score`` takes one sample or a batch.

    A function **fails on a sample** if it raises or exits, or if its value is neither a finite
    number nor None. In a worker it also fails if it takes too long or kills its process. If a call
    on several samples fails as a whole, it is unknown which sample caused that. Then the function
    is called again **one sample at a time**, and it fails on the samples on which these calls fail.
    So a function must not depend on the other samples of a call, and may be called more than once
    on a sample. If none of these calls fails, the error of the first call is raised.

    The name ``environment`` is no function: its value is the sum of the rewards that the sample's
    environment gave. A sample that its environment gave up (``Rollout.excluded``) has no total, and
    no function is called on it.

    last_errors: the failures of the last `score` call. Each Score has its own failures too, and the
        log has the first failure of each kind in full.
    required_columns: the columns that every row of the data must have.
    recognised: for each function of the user's, a sentence that says with what arguments it is called.
    """

    def __init__(self, config: RewardConfig, import_s: float | None = None, *, episodes: bool = False) -> None:
        """Resolve the functions, here or in workers.

        import_s: the maximum of seconds for the imports in this process. If they take longer, the
            process ends. None: no limit.
        episodes: whether a response holds several turns. If so, functions that take messages are
            refused.

        Raises ConfigError for no function, for a repeated one, and for one that cannot be resolved.
        """
        # The names.
        if not config.functions:
            raise ConfigError(
                f"reward.functions is empty; name one of {', '.join([*BUILT_IN, ENVIRONMENT])}, or your own "
                "module:function"
            )
        repeated = sorted({name for name in config.functions if config.functions.count(name) > 1})
        if repeated:
            raise ConfigError(
                f"reward.functions names {repeated[0]!r} more than once; name it once and raise its reward.weights"
            )
        self.names = tuple(config.functions)
        self.last_errors: tuple[RewardFailure, ...] = ()
        self._kinds_logged: set[tuple[str, str]] = set()
        self._weights = tuple(config.resolved_weights)
        self._on_error = config.on_error
        # The functions of this process, then the workers'.
        called = [name for name in self.names if name != ENVIRONMENT]
        in_workers = [name for name in called if config.num_workers and name not in config.in_process]
        with time_limit("the import of reward.functions", import_s):
            here = [name for name in called if name not in in_workers]
            found = {name: resolve(name, config.completions, config.model_path) for name in here}
        self._functions: dict[str, RewardFunction] = {name: function for name, (_, function) in found.items()}
        forms = {name: form for name, (form, _) in found.items()}
        self.pool = None
        if in_workers:
            from megatron_rl.reward.pool import Pool

            settings = (config.deadline_s, config.worker_environment, config.completions)
            self.pool = Pool(in_workers, config.num_workers, *settings)
            forms |= self.pool.forms
        # Their forms and their columns.
        try:
            self.recognised = _recognised({name: forms[name] for name in called}, episodes)
        except ConfigError:
            self.close()
            raise
        parameters = {name: needed_parameters(function) for name, function in self._functions.items()}
        parameters |= self.pool.needed_parameters if self.pool else {}
        self.required_columns = required_columns({name: parameters[name] for name in called})
        if config.decided is not None:
            self._check_decided(config, import_s)

    def _check_decided(self, config: RewardConfig, import_s: float | None) -> None:
        """Resolve ``reward.decided``, and require its columns. If it cannot be called, end the workers and raise."""
        from megatron_rl.reward.decided import resolve_decided

        try:
            with time_limit("the import of reward.decided", import_s):
                _, needed = resolve_decided(config.decided)
        except ConfigError:
            self.close()
            raise
        known = {column.name for column in self.required_columns}
        self.required_columns += [column for column in needed if column.name not in known]
        self.recognised += [
            f"reward.decided={config.decided!r} is asked after every {config.decided_every_tokens} tokens of a sample"
        ]

    @property
    def runs_apart(self) -> bool:
        """Return whether worker processes call every reward function, so that ``score`` may run in another thread."""
        return self.pool is not None and not self._functions

    def close(self) -> None:
        """End the workers. A second call does nothing."""
        if self.pool is not None:
            self.pool.close()

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """Return [S], one Score per rollout, in order.

        ``total`` is the weighted sum over the functions that applied; None if none did. For a
        sample on which a function failed, ``reward.on_error`` decides: ``drop`` and ``retry_sample``
        give a total of None, ``zero`` a total of 0.0. ``fail`` raises RewardError with the sample's id and the
        traceback, without waiting for the other samples.

        Raises ConfigError if a function cannot take the dataset's columns.
        """
        self.last_errors = ()
        scores = iter(self._score([rollout for rollout in rollouts if rollout.excluded is None]))
        nothing = Score(total=None, by_function=(None,) * len(self.names))
        return [next(scores) if rollout.excluded is None else nothing for rollout in rollouts]

    def _score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        if not rollouts:
            return []
        from_workers = self._ask_workers(rollouts)
        failures: list[RewardFailure] = []
        values_by_function = []
        for name in self.names:
            answers = from_workers[name] if name in from_workers else self._answers_here(name, rollouts)
            failed = self._failures(name, answers, rollouts)
            without = {failure.sample_id for failure in failed}
            pairs = zip(rollouts, answers.outcomes, strict=True)
            values_by_function.append([None if x.sample_id in without else outcome.value for x, outcome in pairs])
            failures.extend(failed)
        self.last_errors = tuple(failures)
        self._log_new_kinds(failures)
        # If several functions failed on a sample, its score names the first.
        errors = {failure.sample_id: failure.last_line for failure in reversed(failures)}
        return [
            self._combine(by_function, errors.get(rollout.sample_id))
            for rollout, by_function in zip(rollouts, zip(*values_by_function, strict=True), strict=True)
        ]

    def _answers_here(self, name: str, rollouts: Sequence[Rollout]) -> _Answers:
        if name != ENVIRONMENT:
            return _call_here(name, self._functions[name], rollouts, stop_at_failure=self._on_error == "fail")
        without = [rollout.sample_id for rollout in rollouts if rollout.environment_reward is None]
        if without:
            raise RewardError(
                f"reward.functions names {ENVIRONMENT!r} and sample {without[0]} comes from no environment; name one "
                "by environment.name, or a function"
            )
        return _Answers(outcomes=[outcome_of(rollout.environment_reward) for rollout in rollouts], unexplained=())

    def _ask_workers(self, rollouts: Sequence[Rollout]) -> dict[str, _Answers]:
        if self.pool is None:
            return {}
        work = self.pool.score(rollouts, stop_at_failure=self._on_error == "fail")
        return {
            name: _Answers(outcomes=work.outcomes[number], unexplained=work.unexplained(number))
            for number, name in enumerate(self.pool.functions)
        }

    def _log_new_kinds(self, failures: Sequence[RewardFailure]) -> None:
        """Log the first failure of each kind with its sample and traceback; the metric reward/errors counts all."""
        for failure in failures:
            kind = (failure.function, failure.kind)
            if kind in self._kinds_logged or len(self._kinds_logged) >= MOST_KINDS:
                continue
            self._kinds_logged.add(kind)
            log.warning(
                "reward function %r failed on sample %s, and reward.on_error=%s goes on; further errors of this kind "
                "are counted in reward/errors and not logged:\n%s",
                *(failure.function, failure.sample_id, self._on_error, failure.message),
            )

    def _combine(self, by_function: tuple[float | None, ...], error: str | None) -> Score:
        if error is not None:
            total = 0.0 if self._on_error == "zero" else None
            return Score(total=total, by_function=by_function, error=error)
        applied = [
            weight * value for weight, value in zip(self._weights, by_function, strict=True) if value is not None
        ]
        return Score(total=sum(applied) if applied else None, by_function=by_function)

    def _failures(self, name: str, answers: _Answers, rollouts: Sequence[Rollout]) -> list[RewardFailure]:
        """Return a RewardFailure for each sample on which one function failed.

        A call that raised on several samples, and on none of them alone, failed on all of them: a
        service may answer again by then, or the value may depend on the other samples.

        Raises RewardError for a failure under ``on_error=fail``, and for a call that returned no
        value per sample, though it does for each sample alone.
        """
        together: dict[str, str] = {}
        for samples, error in answers.unexplained:
            said = (
                f"failed on a batch of {len(samples)} samples ({samples[0].sample_id} to {samples[-1].sample_id}) and "
                f"on none of them alone"
            )
            if self._on_error == "fail" or "Traceback" not in error:
                raise RewardError(f"reward function {name!r} {said}; mend what depends on the batch:\n{error}")
            together |= dict.fromkeys((sample.sample_id for sample in samples), f"it {said}:\n{error}")
        failures = [
            RewardFailure(sample_id=rollout.sample_id, function=name, message=error)
            for rollout, outcome in zip(rollouts, answers.outcomes, strict=True)
            if (error := outcome.error or together.get(rollout.sample_id))
        ]
        if failures and self._on_error == "fail":
            first = failures[0]
            raise RewardError(
                f"reward function {name!r} failed on sample {first.sample_id} "
                f"({len(failures)} of {len(rollouts)} samples had failed by then); "
                f"mend it, or set reward.on_error to drop, zero or retry_sample:\n{first.message}"
            )
        return failures


@contextlib.contextmanager
def opened_reward(
    config: RewardConfig, import_s: float | None = None, *, episodes: bool = False
) -> Iterator[Reward | None]:
    """Yield the run's Reward for a ``with`` block, and end its workers afterwards. Without functions, yield None.

    import_s, episodes: as for Reward.
    """
    if not config.functions:
        yield None
        return
    with contextlib.closing(Reward(config, import_s, episodes=episodes)) as reward:
        yield reward


def _recognised(forms: Mapping[str, Form | None], episodes: bool) -> list[str]:
    """Return a sentence for each function of the user's, which says with what arguments it will be called.

    forms: function name → how it is called (forms.py ``Form``); None for a built-in function.

    Raises ConfigError for a function that takes messages if a response holds several turns
    (``episodes``).
    """
    for name, form in forms.items():
        if form is Form.MESSAGES and episodes:
            raise ConfigError(
                f"reward function {name!r} {form.value}, and a response of environment.name or "
                "rollout.endpoint.agent holds several turns, which are given as one text: set reward.completions=text, "
                "and take list[str]"
            )
    return [f"reward function {name!r} {form.value}" for name, form in forms.items() if form is not None]


def _call_here(name: str, function: RewardFunction, rollouts: Sequence[Rollout], *, stop_at_failure: bool) -> _Answers:
    """Call one function on the whole batch in this process.

    If the call fails, the function is called on each sample alone.

    stop_at_failure: whether no further sample is tried once a sample has failed alone.
    """
    columns = columns_of(rollouts)
    check_signature(name, function, columns)
    outcomes, batch_error = call(function, arguments_of(rollouts, columns), conversations_of(rollouts))
    if batch_error is None:
        return _Answers(outcomes=outcomes, unexplained=())
    outcomes, found_guilty = [], False
    for rollout in rollouts:
        single, error = call(function, arguments_of([rollout], columns), conversations_of([rollout]))
        outcomes += single if error is None else [Outcome(error=error)]
        found_guilty |= error is not None
        if found_guilty and stop_at_failure:
            break
    outcomes += [Outcome()] * (len(rollouts) - len(outcomes))
    return _Answers(outcomes=outcomes, unexplained=() if found_guilty else [(rollouts, batch_error)])
