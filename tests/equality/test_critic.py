"""The critic's values, and the gradient of their loss, equal a Hugging Face reward model's.

The reward model takes one sample at a time; the critic is tried on every grid of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.advantage import loss_inputs
from megatron_rl.backend import MegatronBackend
from megatron_rl.backend.batch import Batch
from megatron_rl.config import load_config
from megatron_rl.critic import Critic
from megatron_rl.distributed import topology
from megatron_rl.rollout.training_batch import scored_batch
from megatron_rl.trainer.advantages import KLPenalty, critic_advantages
from megatron_rl.types import Sample
from tests.equality.rig import DEFAULTS, MAX_RESPONSE_TOKENS
from tests.reference import (
    LAYERS,
    file_weights,
    make_samples,
    near_policy,
    reference_logprobs,
    relative_error,
    tiny_config,
    tiny_model,
    token_weight,
)
from tests.workers.pool import Pool

TOLERANCE = 1e-5
CLIP = 0.2
NUM_SAMPLES, PER_MINI_BATCH = 7, 4


def reward_model(family: str, layers: int):
    """Return (config, model) of a Hugging Face sequence classifier of one label.

    Its ``score`` gives a value per token.
    """
    from transformers import AutoModelForSequenceClassification

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = tiny_config(family, layers=layers)
        config.num_labels = 1
        model = AutoModelForSequenceClassification.from_config(config).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter)) if parameter.dim() == 1 else parameter.mul_(3.0)
    return config, model


def values_of(model, sample: Sample) -> torch.Tensor:
    """Return the values, [response], of the states before each response token."""
    hidden = model.model(torch.from_numpy(sample.token_ids)[None]).last_hidden_state[0]
    return model.score(hidden)[sample.prompt_tokens - 1 : -1, 0]


def targets(samples: list[Sample]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return (returns, old values) per sample; some values are clipped towards their return, some away from it."""
    random = np.random.default_rng(5)
    returns = [random.normal(0.0, 1.0, len(s.loss_mask)).astype(np.float32) for s in samples]
    return returns, [random.normal(0.0, 1.0, len(s.loss_mask)).astype(np.float32) for s in samples]


def naive(model, samples: list[Sample], groups: list[int], reduction: str) -> tuple[dict[str, torch.Tensor], float]:
    """Compute gradient and loss by a loop over loss tokens, in the words of semantics §8."""
    model.zero_grad()
    returns, old = targets(samples)
    total = 0.0
    trained = [i for i, sample in enumerate(samples) if sample.loss_mask.any()]  # the others stand in no denominator
    counted = [samples[i] for i in trained], [groups[i] for i in trained]
    for number, i in enumerate(trained):
        sample, weight = samples[i], token_weight(reduction, *counted, number, MAX_RESPONSE_TOKENS)
        values = values_of(model, sample)
        for t in np.flatnonzero(sample.loss_mask):
            bounded = values[t].clamp(float(old[i][t]) - CLIP, float(old[i][t]) + CLIP)
            error = torch.maximum((values[t] - float(returns[i][t])) ** 2, (bounded - float(returns[i][t])) ** 2)
            loss = 0.5 * weight * error
            loss.backward(retain_graph=True)
            total += loss.item()
    return {name: p.grad.clone() for name, p in model.named_parameters()}, total


@dataclass(kw_only=True)
class Pair:
    """A policy and its critic on this rank, the Hugging Face models of both, and the batch.

    Every rank agrees on the batch.
    """

    backend: MegatronBackend
    critic: Critic
    policy_model: torch.nn.Module
    judge: torch.nn.Module
    samples: list[Sample]
    groups: list[int]
    batch: Batch


@contextlib.contextmanager
def open_critic(family: str, *overrides: str) -> Iterator[Pair]:
    """Open a policy, a critic beside it and a batch, whose samples are spread over the ranks."""
    layers = 4 if VPP in overrides else LAYERS
    hf_config, model = tiny_model(family, layers=layers)
    critic_hf, judge = reward_model(family, layers)
    config = load_config(
        None, [*DEFAULTS, "advantage.estimator=gae", f"critic.value_clip={CLIP}", "critic.lr=1e-3", *overrides]
    )
    with contextlib.ExitStack() as held:
        held.callback(topology.destroy)
        backend = MegatronBackend(config, hf_config=hf_config, weights=file_weights(model))
        critic = Critic(config, hf_config=critic_hf, weights=dict(judge.state_dict()))
        samples, groups = near_policy(model, make_samples(NUM_SAMPLES)), [i // 2 for i in range(NUM_SAMPLES)]
        empty = samples[3]
        samples[3] = dataclasses.replace(empty, loss_mask=np.zeros_like(empty.loss_mask))  # excluded: it trains nothing
        mine = range(backend.topology.rank, len(samples), backend.topology.world_size)
        batch = backend.gather([samples[i] for i in mine], [groups[i] for i in mine], list(mine))
        yield Pair(
            backend=backend, critic=critic, policy_model=model, judge=judge, samples=samples, groups=groups, batch=batch
        )
        critic.close()
        held.pop_all()
        backend.close(leave_world=False)


def against_reward_model(rank: int, world: int, family: str, overrides: tuple[str, ...]) -> dict[str, float]:
    """Return the worst differences to the loop: of values, of the gradient and of the loss, under two reductions."""
    found: dict[str, float] = {}
    with open_critic(family, *overrides) as pair:
        critic, samples, groups, batch, judge = pair.critic, pair.samples, pair.groups, pair.batch, pair.judge
        flat = critic.values(batch)
        with torch.no_grad():
            wanted = np.concatenate([values_of(judge, s).numpy() * s.loss_mask for s in samples])
        found["values"] = float(np.abs(flat - wanted).max())
        returns, old = (np.concatenate(x) for x in targets(samples))
        for reduction in ("token_mean", "sequence_mean"):
            critic.config = dataclasses.replace(
                critic.config, loss=dataclasses.replace(critic.config.loss, reduction=reduction)
            )
            with critic._here():
                gradient, loss = one_gradient(critic, batch, returns, old)
            theirs, total = naive(judge, samples, groups, reduction)
            found[f"gradient/{reduction}"] = relative_error(gradient, theirs)
            found[f"loss/{reduction}"] = abs(loss - total) / abs(total)
    return found


def one_gradient(critic: Critic, batch, returns: np.ndarray, old: np.ndarray) -> tuple[dict[str, torch.Tensor], float]:
    """Return the gradient of the whole batch as one mini-batch, by the critic's own parts."""
    own = dataclasses.replace(batch, rows={})
    plan = critic.plan("critic", own, own.facts.loss_tokens > 0, drops=True)
    own = critic.fetch_rows(own, plan)
    (mini_batch,) = plan.mini_batches
    critic.accumulate(own, mini_batch, returns, old, plan.fingerprints()[0])
    sums = critic._sums.clone()
    torch.distributed.all_reduce(sums)
    gradient = critic.gradient()
    critic.zero_grad()
    return gradient, float(sums[0])


TP, PP, CP, VPP = (f"critic.parallel.{x}=2" for x in ("tensor", "pipeline", "context", "virtual_pipeline"))
SP, POLICY_TP, POLICY_PP = "critic.parallel.sequence_parallel=true", "parallel.tensor=2", "parallel.pipeline=2"
GRIDS = [
    (1, "qwen2_tied", ()),
    (2, "qwen2_tied", ()),
    (2, "qwen3", (POLICY_TP, "parallel.sequence_parallel=true")),
    (2, "llama", (POLICY_PP,)),
    (2, "qwen2_tied", (TP,)),
    (2, "qwen3", (TP, SP)),
    (2, "llama3_rope", (PP, VPP)),
    (2, "qwen2_untied", (CP,)),
    (4, "qwen2_tied", (POLICY_TP, POLICY_PP, "critic.parallel.tensor=1")),
    (4, "llama", (POLICY_TP, "critic.parallel.pipeline=2")),
]


@pytest.mark.parametrize(("world", "family", "overrides"), GRIDS)
def test_values_and_gradient_equal_a_reward_models(
    pool: Pool, world: int, family: str, overrides: tuple[str, ...]
) -> None:
    """The critic's values and gradient equal a reward model's on the policy's grid and on others.

    TP, SP, PP, VPP, CP and DP are of the critic alone, of the policy alone, or of both.
    """
    for found in pool.run(world, against_reward_model, family, overrides, timeout_s=90):
        assert max(found.values()) < TOLERANCE, found


GAMMA, LAM, BETA = 0.98, 0.9, 0.1


def naive_ppo(pair: Pair, totals: list[float], penalties: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """Return the policy's gradient of one step, token by token.

    Its parts are values, GAE over loss tokens, the clipped surrogate and the token mean.
    """
    pair.policy_model.zero_grad()
    count = sum(int(s.loss_mask.sum()) for s in pair.samples)
    for sample, total, penalty in zip(pair.samples, totals, penalties, strict=True):
        with torch.no_grad():
            values = values_of(pair.judge, sample)
        logprobs, _ = reference_logprobs(pair.policy_model, sample)
        loss, advantage, following = logprobs.sum() * 0.0, 0.0, 0.0
        for number, t in enumerate(np.flatnonzero(sample.loss_mask)[::-1]):
            reward = (total if number == 0 else 0.0) - float(penalty[t])
            advantage = reward + GAMMA * following - float(values[t]) + GAMMA * LAM * advantage
            following = float(values[t])
            ratio = (logprobs[t] - float(sample.logprobs[t])).exp()
            loss = loss - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) / count
        loss.backward()
    return {name: p.grad.clone() for name, p in pair.policy_model.named_parameters()}


def one_ppo_step(rank: int, world: int, family: str, overrides: tuple[str, ...]) -> float:
    """Return the relative error of the policy's gradient.

    Values come from the critic's ranks, advantages and weights from the run's own stages.
    """
    given = (f"advantage.gamma={GAMMA}", f"advantage.lam={LAM}", "advantage.whiten=none", *overrides)
    with open_critic(family, *given) as pair:
        backend, batch, facts = pair.backend, pair.batch, pair.batch.facts
        random = np.random.default_rng(9)
        totals = random.normal(size=len(pair.samples))
        totals[3] = np.nan  # excluded, as its mask says
        penalties = [BETA * random.normal(size=len(s.loss_mask)) for s in pair.samples]
        mask = backend.gather_loss_mask(batch)
        tokens, penalty = len(mask), np.concatenate(penalties)
        unread = np.zeros(tokens, dtype=np.float32)
        paid = KLPenalty(old=unread, reference=unread, penalties=penalty, kl=0.0, tokens=tokens, metrics={})
        scored = scored_batch(backend.config, batch, totals, totals[:, None])
        estimate = critic_advantages(backend.config, scored, pair.critic.values(batch), paid, mask)
        signal = estimate.advantages.largest(facts.response_tokens) > 0
        assert signal.tolist() == (facts.loss_tokens > 0).tolist()
        plan = backend.plan("train", batch, signal, drops=True)
        batch = backend.fetch_rows(batch, plan)
        (mini_batch,) = plan.mini_batches
        old = np.concatenate([s.logprobs for s in pair.samples])
        inputs = loss_inputs(backend.config, facts, mini_batch, estimate.advantages, signal, old=old)
        backend.forward_backward(batch, mini_batch, inputs, fingerprint=plan.fingerprints()[0])
        gradient = backend.gradient()
        backend.zero_grad()
        return relative_error(gradient, naive_ppo(pair, totals.tolist(), penalties))


@pytest.mark.parametrize(
    ("world", "family", "overrides"),
    [
        (2, "qwen2_untied", ()),
        (2, "llama", (POLICY_PP, "critic.parallel.pipeline=1")),
        (4, "qwen3", (POLICY_TP, POLICY_PP)),
    ],
)
def test_a_ppo_step_equals_a_loop_over_tokens(pool: Pool, world: int, family: str, overrides: tuple[str, ...]) -> None:
    assert max(pool.run(world, one_ppo_step, family, overrides, timeout_s=90)) < TOLERANCE
