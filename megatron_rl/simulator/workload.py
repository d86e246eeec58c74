"""The samples of a simulated update: their lengths and rewards, recorded by a run or drawn from distributions.

A trace is JSON lines. A run writes one rollout a line, with a list over its samples for each key
(``Recorder`` in observability/trace.py):

    {"rollout": 3, "group": [17, 17], "prompt_tokens": [90, 90], "response_tokens": [41, 97],
     "loss_tokens": [41, 97], "response_inputs": [40, 96], "reward": [1, null]}

A line may also be one sample, with a number for each key. Lines of equal ``rollout`` form one
rollout; without the key all lines do. These keys have defaults or conditions:

- ``loss_tokens`` is the number of response tokens with loss; by default all.
- ``response_inputs`` is the number of response tokens before the last loss token, which are those
  that the model reads; by default all but the last.
- ``reward: null`` is a sample that was excluded from its group.
- ``reward_functions`` is {function's name: list of its rewards}. ``advantage.estimator=gdpo`` needs
  it if there are several functions.

Other keys are ignored.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.algorithm.advantage import GroupRewards, advantages
from megatron_rl.algorithm.sharing import token_coupling
from megatron_rl.algorithm.signal import has_signal
from megatron_rl.config import AdvantageConfig, Config, RewardConfig, TrainConfig
from megatron_rl.data.solution import Solution
from megatron_rl.errors import ConfigError
from megatron_rl.json_text import read_bytes
from megatron_rl.planning.plan import split_mini_batches
from megatron_rl.planning.tokens import SampleTokens

log = logging.getLogger(__name__)

TOKENS = ("group", "prompt_tokens", "response_tokens", "loss_tokens")
MOST_BYTES = 1 << 30  # the most bytes of a trace: a sample takes about 30


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """Holds the samples of one update as arrays [S]: int64 tokens and groups, float64 rewards.

    A reward is NaN for a sample that is excluded from its group.

    response_inputs: int64 [S], the number of response tokens that the model reads, those before the
        last loss token; None if the model reads all.
    by_function: {reward function's name: float64 [S] rewards}, NaN for samples to which the function
        did not apply; {} if only the weighted sum of rewards is known.
    supervised: True if the samples are the responses of one supervised step. Then all of them
        train.

    Example: a group of two: ``prompt_tokens=[5, 5], response_tokens=[10, 12], loss_tokens=[10, 12],
    rewards=[1, 0], groups=[0, 0]``.
    """

    prompt_tokens: np.ndarray
    response_tokens: np.ndarray
    loss_tokens: np.ndarray
    rewards: np.ndarray
    groups: np.ndarray
    by_function: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    response_inputs: np.ndarray | None = None
    supervised: bool = False

    @property
    def lengths(self) -> np.ndarray:
        """Return [S] int64, the number of tokens that the model reads of each sample, prompt and response together."""
        return self.prompt_tokens + self.read_response_tokens

    @property
    def read_response_tokens(self) -> np.ndarray:
        """Return [S] int64, how many response tokens the model reads.

        They are those before the last loss token; all if ``response_inputs`` is None.
        """
        return self.response_tokens if self.response_inputs is None else self.response_inputs

    def tokens(self, *, share_prompts: bool, windows: tuple[int, ...] = ()) -> SampleTokens:
        """Return the samples' numbers of tokens, without pads, as the SampleTokens that the planner takes.

        share_prompts: whether a group's prompt, which its samples have in common, runs once for
            several samples.
        windows: the sizes of the model's sliding attention windows.
        """
        if not share_prompts:
            return SampleTokens.alone(self.lengths, windows)
        return SampleTokens(
            own=self.read_response_tokens, prompt=self.prompt_tokens, group=self.groups, windows=windows
        )

    def mini_batches(self, train: TrainConfig, *, merge: bool) -> list[np.ndarray]:
        """Return one array for each optimizer step, the indices of its samples; supervised samples form one step.

        merge: whether all samples form one step.
        """
        size = None if self.supervised else train.samples_per_mini_batch
        return split_mini_batches(np.arange(len(self.rewards)), size, merge=merge)

    def epochs(self, train: TrainConfig) -> int:
        """Return the number of times that each sample is trained on."""
        return 1 if self.supervised else train.epochs_per_rollout

    def signal(self, advantage: AdvantageConfig, reward: RewardConfig, *, epsilon: float) -> np.ndarray:
        """Return [S] bool, True for a sample with a loss token and an |advantage| above ``epsilon``.

        The advantages are computed from the rewards alone. Raises ConfigError if GDPO's rewards by
        function are missing.
        """
        rewards = self.rewards
        columns, weights = rewards[:, None], ()
        if advantage.estimator == "gdpo" and self.by_function:
            names, weights = reward.functions, reward.resolved_weights
            unknown = [name for name in names if name not in self.by_function]
            if unknown or not names:
                raise ConfigError(
                    f"advantage.estimator=gdpo needs each function's rewards: reward.functions={list(names)} and the "
                    f"trace has those of {list(self.by_function)}; name these in reward.functions, or choose another "
                    "estimator"
                )
            columns = np.stack([self.by_function[name] for name in names], axis=1)
        group_rewards = GroupRewards(
            totals=rewards,
            groups=self.groups,
            included=~np.isnan(rewards),
            loss_tokens=self.loss_tokens,
            by_function=columns,
            function_weights=weights,
        )
        values = advantages(
            group_rewards,
            estimator=advantage.estimator,
            epsilon=advantage.epsilon,
            whiten=advantage.whiten,
            arguments=advantage.arguments,
            moves_equal_rewards=advantage.moves_equal_rewards,
        )
        return has_signal(values, self.loss_tokens, advantage_epsilon=epsilon)


def read_trace(path: str | pathlib.Path) -> list[Workload]:
    """Return one Workload per rollout of a trace file, or of ``trace.jsonl`` in a run's folder.

    If the last line has no newline and cannot be read, as after an interrupted write, it is left out
    with a warning in the log.

    Raises ConfigError ``<file>:<line>: ...`` for any other malformed line.
    """
    path = pathlib.Path(path)
    file = path / "trace.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"--trace {file} does not exist; give a file of JSON lines, or the folder of a run that has trained a "
            "rollout"
        )
    rollouts: dict[int, list[dict]] = {}
    content = read_bytes(file, "a trace", most_bytes=MOST_BYTES, error=ConfigError)
    *lines, rest = content.decode("utf-8", "replace").split("\n")
    for number, line in enumerate([*lines, rest], start=1):
        if not line.strip():
            continue
        try:
            _add(rollouts, line, f"{file}:{number}")
        except ConfigError:
            if number <= len(lines):
                raise
            log.warning("%s:%d is cut off and was left out; the run was interrupted while writing it", file, number)
    if not rollouts:
        raise ConfigError(f"--trace {file} holds no sample; give a file of JSON lines")
    return [_workload(parts) for _, parts in sorted(rollouts.items())]


def _add(rollouts: dict[int, list[dict]], line: str, where: str) -> None:
    """Parse one line of a trace, and append its samples to their rollout's list in ``rollouts``.

    where: ``<file>:<line>``, for error messages.
    """
    try:
        row = json.loads(line)
        whole = isinstance(row["reward"], list)
        row.setdefault("loss_tokens", row["response_tokens"])
        columns = {name: _column(row[name], np.int64) for name in TOKENS} | {
            "reward": _column(row["reward"], np.float64)
        }
        columns |= {f"of {name}": _column(x, np.float64) for name, x in row.get("reward_functions", {}).items()}
        if "response_inputs" in row:
            columns["response_inputs"] = _column(row["response_inputs"], np.int64)
        else:
            response, loss = columns["response_tokens"], columns["loss_tokens"]
            columns["response_inputs"] = np.where(loss > 0, response - 1, 0)
        sizes = {name: len(x) for name, x in columns.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"lists of different lengths: {sizes}")
        rollout = int(row.get("rollout", 0))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{where}: {line[:80]!r} is no sample of a trace ({type(error).__name__}: {error}); each line needs "
            "prompt_tokens, response_tokens, reward and group, a number or a list over a rollout's samples each"
        ) from error
    parts = rollouts.setdefault(rollout, [])
    if parts and (whole or columns.keys() != parts[0].keys()):
        raise ConfigError(
            f"{where}: rollout {rollout} came before, and its groups would mix with these; number rollouts over the "
            "whole file"
        )
    parts.append(columns)


def _column(given: object, kind: type) -> np.ndarray:
    values = given if isinstance(given, list) else [given]
    return np.array([np.nan if value is None else value for value in values], dtype=kind).reshape(len(values))


def _workload(parts: list[dict]) -> Workload:
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    by_function = {name.removeprefix("of "): x for name, x in columns.items() if name.startswith("of ")}
    tokens = {name: columns[name] for name in (*TOKENS[1:], "response_inputs")}
    return Workload(**tokens, groups=columns["group"], rewards=columns["reward"], by_function=by_function)


def of_responses(responses: Sequence[Solution], rows_per_step: int, *, pairs: bool) -> list[Workload]:
    """Return one Workload for each supervised step, in the order of the data set.

    responses: the prompt and response of each row; with ``pairs`` two for each row, the chosen one
        first.
    rows_per_step: the number of rows of a step.
    pairs: whether rows are pairs of a chosen and a rejected response.
    """
    of_row = 2 if pairs else 1
    size, steps = rows_per_step * of_row, []
    for first in range(0, len(responses), size):
        step = responses[first : first + size]
        masks = [response.loss_mask or (True,) * len(response.response_ids) for response in step]
        steps.append(
            Workload(
                prompt_tokens=np.array([len(response.prompt.token_ids) for response in step]),
                response_tokens=np.array([len(mask) for mask in masks]),
                loss_tokens=np.array([sum(mask) for mask in masks]),
                response_inputs=np.array(
                    [len(mask) - 1 - mask[::-1].index(True) if any(mask) else 0 for mask in masks]
                ),
                rewards=np.zeros(len(step)),
                groups=np.arange(len(step)) // of_row,
                supervised=True,
            )
        )
    return steps


def _numbers(option: str, text: str, kind: str, names: str) -> tuple[float, float]:
    name, _, values = text.partition(":")
    try:
        first, second = (float(x) for x in values.split(","))
    except ValueError:
        first = second = -1.0
    if name != kind or first <= 0 or second < 0:
        raise ConfigError(
            f"{option} {text!r} is not of the form {kind}:{names}, as in {option} {kind}:0.5,0.5; numbers must be "
            "positive"
        )
    return first, second


def draw(
    config: Config,
    *,
    lengths: str | None,
    pass_rate: str | None,
    prompt_tokens: int | Sequence[int] | None,
    seed: int,
    context_tokens: int | None = None,
) -> tuple[Workload, str]:
    """Draw a rollout's samples, or a supervised step's, at random; return (samples, the distributions in words).

    lengths: ``lognormal:MEAN,SIGMA`` for the response tokens, cut at rollout.max_response_tokens.
        MEAN is in tokens; SIGMA is the standard deviation of the logarithm of the tokens. By
        default MEAN is half of that limit and SIGMA 0.5.
    pass_rate: ``beta:A,B`` for each prompt's probability of reward 1, by default ``beta:0.5,0.5``;
        other rewards are 0.
    prompt_tokens: one number for all prompts, or a list with one per prompt, repeated if it is too
        short; by default half of data.max_prompt_tokens.
    context_tokens: the model's context, at which a supervised step's responses are cut too; None
        for no such limit.
    """
    supervised, limit = config.train.num_rollouts == 0, config.rollout.max_response_tokens
    prompts, size = config.train.prompts_per_rollout, config.rollout.samples_per_prompt
    prompt_tokens = prompt_tokens or max(1, config.data.max_prompt_tokens // 2)
    if supervised:
        prompts, size = config.sft.samples_per_step, 2 if config.preference.is_on else 1
        limit = max(1, min(limit, (context_tokens or limit) - int(np.max(prompt_tokens))))
    lengths, pass_rate = lengths or f"lognormal:{max(1, limit // 2)},0.5", pass_rate or "beta:0.5,0.5"
    mean, sigma = _numbers("--lengths", lengths, "lognormal", "MEAN,SIGMA")
    a, b = _numbers("--pass-rate", pass_rate, "beta", "A,B")
    random = np.random.default_rng(seed)
    response = np.exp(random.normal(np.log(mean) - sigma**2 / 2, sigma, prompts * size))
    response = np.clip(np.rint(response), 1, limit).astype(np.int64)
    passes = random.random((prompts, size)) < random.beta(a, b, (prompts, 1))
    tokens = np.resize(np.atleast_1d(np.asarray(prompt_tokens, dtype=np.int64)), prompts)
    named = f"{prompt_tokens} tokens" if isinstance(prompt_tokens, int) else f"{tokens.mean():.1f} tokens (data.train)"
    workload = Workload(
        prompt_tokens=np.repeat(tokens, size),
        response_tokens=response,
        loss_tokens=response,
        response_inputs=None if token_coupling(config.megatron) else response - 1,
        rewards=passes.reshape(-1).astype(np.float64),
        groups=np.repeat(np.arange(prompts), size),
        supervised=supervised,
    )
    rates = "" if supervised else f", pass rates {pass_rate}"
    return workload, f"drawn: prompts of {named}, responses {lengths} cut at {limit}{rates}, seed {seed}"
