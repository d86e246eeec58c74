"""What a simulated job trains on: lengths and rewards per sample, recorded by a run or drawn from a stated distribution.

A trace is JSON lines, one sample each: ``{"prompt_tokens": 90, "response_tokens": 412, "reward": 1.0, "group": 17}``; optional
``"rollout"`` (which batch it belongs to; one batch without it) and ``"loss_tokens"`` (response tokens with loss; all without it).
``reward: null`` is a sample that was taken out of its group. Other keys are ignored.
"""

from __future__ import annotations

import json
import pathlib
from dataclasses import dataclass

import numpy as np

from megatron_rl.advantage import advantages
from megatron_rl.config import Config
from megatron_rl.signal import has_signal, signal_rule
from megatron_rl.types import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """One rollout's samples, struct of arrays [S]: int64 tokens and groups, float64 rewards (NaN: not included).

    Example: a group of two: ``prompt_tokens=[5, 5], response_tokens=[10, 12], loss_tokens=[10, 12], rewards=[1, 0], groups=[0, 0]``.
    """

    prompt_tokens: np.ndarray
    response_tokens: np.ndarray
    loss_tokens: np.ndarray
    rewards: np.ndarray
    groups: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """[S] int64 tokens of prompt and response."""
        return self.prompt_tokens + self.response_tokens

    def signal(self, config: Config) -> np.ndarray:
        """[S] bool, by the run's own advantages and rule."""
        given, rewards = config.advantage, self.rewards
        values = advantages(
            rewards, self.groups, ~np.isnan(rewards), estimator=given.estimator, epsilon=given.epsilon, whiten=given.whiten,
            rewards_by_function=rewards[:, None], loss_tokens=self.loss_tokens,
        )  # fmt: skip
        return has_signal(values, self.loss_tokens, advantage_epsilon=signal_rule(config).advantage_epsilon)


def read_trace(path: str | pathlib.Path) -> list[Workload]:
    """One Workload per rollout of a trace file, or of ``trace.jsonl`` in a run's folder. ConfigError ``<file>:<line>: ...``."""
    path = pathlib.Path(path)
    file = path / "trace.jsonl" if path.is_dir() else path
    rollouts: dict[int, list[dict]] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            row = _row(line, f"{file}:{number}")
            rollouts.setdefault(row["rollout"], []).append(row)
    if not rollouts:
        raise ConfigError(f"--trace {file} holds no sample; give a file of JSON lines")
    return [_workload(rows) for _, rows in sorted(rollouts.items())]


def _row(line: str, where: str) -> dict:
    try:
        given = json.loads(line)
        row = {name: int(given[name]) for name in ("prompt_tokens", "response_tokens", "group")}
        row |= {"rollout": int(given.get("rollout", 0)), "loss_tokens": int(given.get("loss_tokens", row["response_tokens"]))}
        return row | {"reward": np.nan if given["reward"] is None else float(given["reward"])}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{where}: {line[:80]!r} is no sample of a trace ({type(error).__name__}: {error}); each line needs prompt_tokens, "
            "response_tokens, reward and group"
        ) from error


def _workload(rows: list[dict]) -> Workload:
    arrays = {name: np.array([row[name] for row in rows], dtype=np.int64) for name in ("prompt_tokens", "response_tokens", "loss_tokens")}
    groups = np.array([row["group"] for row in rows], dtype=np.int64)
    return Workload(**arrays, groups=groups, rewards=np.array([row["reward"] for row in rows], dtype=np.float64))


def append_trace(path: str | pathlib.Path, rollout: int, given: Workload) -> None:
    """Adds one rollout to a trace; ``read_trace`` reads it back. With several reward functions the reward is their weighted sum."""
    columns = (given.prompt_tokens, given.response_tokens, given.loss_tokens, given.groups, given.rewards)
    with pathlib.Path(path).open("a", encoding="utf-8") as file:
        for prompt, response, loss, group, reward in zip(*(x.tolist() for x in columns), strict=True):
            row = {"rollout": rollout, "group": group, "prompt_tokens": prompt, "response_tokens": response, "loss_tokens": loss}
            file.write(json.dumps(row | {"reward": None if np.isnan(reward) else reward}) + "\n")


def _numbers(option: str, text: str, kind: str, names: str) -> tuple[float, float]:
    name, _, values = text.partition(":")
    try:
        first, second = (float(x) for x in values.split(","))
    except ValueError:
        first = second = -1.0
    if name != kind or first <= 0 or second < 0:
        raise ConfigError(f"{option} {text!r} is not of the form {kind}:{names}, as in {option} {kind}:0.5,0.5; numbers must be positive")
    return first, second


def draw(config: Config, *, lengths: str | None, pass_rate: str | None, prompt_tokens: int | None, seed: int) -> tuple[Workload, str]:
    """A rollout of ``train.prompts_per_step`` groups from stated distributions, and those in words.

    lengths: ``lognormal:MEAN,SIGMA`` of response tokens (MEAN in tokens, SIGMA of their logarithm), cut at
    rollout.max_response_tokens. pass_rate: ``beta:A,B`` of each prompt's chance of reward 1, else 0.
    """
    limit = config.rollout.max_response_tokens
    lengths, pass_rate = lengths or f"lognormal:{max(1, limit // 2)},0.5", pass_rate or "beta:0.5,0.5"
    prompt_tokens = prompt_tokens or max(1, config.data.max_prompt_tokens // 2)
    mean, sigma = _numbers("--lengths", lengths, "lognormal", "MEAN,SIGMA")
    a, b = _numbers("--pass-rate", pass_rate, "beta", "A,B")
    random = np.random.default_rng(seed)
    prompts, size = config.train.prompts_per_step, config.rollout.samples_per_prompt
    response = np.exp(random.normal(np.log(mean) - sigma**2 / 2, sigma, prompts * size))
    response = np.clip(np.rint(response), 1, limit).astype(np.int64)
    passes = random.random((prompts, size)) < random.beta(a, b, (prompts, 1))
    workload = Workload(
        prompt_tokens=np.full(prompts * size, prompt_tokens, dtype=np.int64), response_tokens=response, loss_tokens=response,
        rewards=passes.reshape(-1).astype(np.float64), groups=np.repeat(np.arange(prompts), size),
    )  # fmt: skip
    return workload, f"drawn: prompts of {prompt_tokens} tokens, responses {lengths} cut at {limit}, pass rates {pass_rate}, seed {seed}"
