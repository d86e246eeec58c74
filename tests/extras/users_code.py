"""What a user writes against the package, with types: a reward, an environment, a loss, an estimator, a loop.

test_user_types.py has mypy and pyright read it beside an installed wheel; nothing runs it.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from typing import assert_type

import numpy as np
import numpy.typing as npt
import torch

import megatron_rl
from megatron_rl.algorithm.advantage import advantages, reduction_weights
from megatron_rl.algorithm.estimators import GroupRewards
from megatron_rl.algorithm.own_policy import PolicyTokens
from megatron_rl.algorithm.policy_loss import PolicyTerm
from megatron_rl.algorithm.signal import has_signal
from megatron_rl.backend import Batch, LogProbs, MegatronBackend
from megatron_rl.config import Config, load_config
from megatron_rl.environment import Environment, Step
from megatron_rl.errors import ConfigError
from megatron_rl.rollout.engines.engine import Engine
from megatron_rl.types import BatchPlan, LossInputs, Prompt, Rollout, Sample, StepResult


def score(
    prompts: list[str], completions: list[str], completion_ids: list[list[int]], answer: list[str]
) -> list[float]:
    return [float(right in said) for said, right in zip(completions, answer, strict=True)]


class Once:
    def __init__(self) -> None:
        self.answer = ""

    def reset(self, prompt: Prompt) -> None:
        assert_type(prompt.text, str)
        self.answer = str(prompt.columns["answer"])

    def step(self, action: str) -> Step:
        return Step(reward=float(action == self.answer), done=True)


environment: Environment = Once()


def answers(engine: Engine, prompts: Sequence[Prompt]) -> list[str]:
    rollouts = engine.generate(prompts, 4, temperature=1.0)
    assert_type(rollouts, list[Rollout])
    return [rollout.text for rollout in rollouts]


def read(path: pathlib.Path) -> Config:
    try:
        config = load_config(path, ["parallel.pipeline=2"])
    except ConfigError as error:
        raise SystemExit(str(error)) from error
    assert_type(config, Config)
    assert_type(config.model.hf_path, str)
    assert_type(config.optimizer.lr, float)
    assert_type(config.parallel.pipeline, int)
    return config


def one_step(config: Config, samples: Sequence[Sample], rewards: npt.NDArray[np.float64]) -> Iterator[StepResult]:
    backend = MegatronBackend(config)
    batch = backend.gather(samples, [0] * len(samples), range(len(samples)))
    assert_type(batch, Batch)
    of_groups = GroupRewards(totals=rewards, groups=batch.facts.groups, included=np.ones(len(samples), bool))
    values = advantages(of_groups, estimator="grpo")
    signal = has_signal(values, batch.facts.loss_tokens)
    logprobs = backend.logprobs(batch, signal)
    assert_type(logprobs, LogProbs)
    plan = backend.plan_training(batch, signal, drops=True)
    assert_type(plan, BatchPlan)
    for number, mini_batch in enumerate(plan.mini_batches):
        weights = reduction_weights("token_mean", batch.facts, mini_batch.members, max_response_tokens=2)
        inputs = LossInputs(advantages=values * weights, weights=weights, old_logprobs=logprobs.flat)
        backend.forward_backward(batch, mini_batch, inputs, fingerprint=plan.fingerprints()[number])
        result = backend.optim_step(mini_batch.kind)
        assert_type(result, StepResult)
        assert_type(result.grad_norm, float)
        yield result
    for name, tensor in backend.export():
        assert_type(name, str)
        assert_type(tensor, torch.Tensor)
    assert_type(megatron_rl.__version__, str)
    backend.close()


def clipped(tokens: PolicyTokens, low: float = 0.2, high: float = 0.2) -> torch.Tensor | PolicyTerm:
    ratio = (tokens.logprobs - tokens.old_logprobs).exp()
    assert_type(ratio, torch.Tensor)
    return -torch.minimum(ratio * tokens.advantages, ratio.clamp(1 - low, 1 + high) * tokens.advantages)


def median_baseline(rewards: GroupRewards) -> npt.NDArray[np.float64]:
    values = np.zeros(len(rewards.totals))
    for group in np.unique(rewards.groups):
        members = (rewards.groups == group) & rewards.included
        values[members] = rewards.totals[members] - np.median(rewards.totals[members])
    return values
