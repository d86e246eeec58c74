"""The critic's values, and the gradient of their loss, equal a Hugging Face reward model's on every grid of ranks."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.advantage import loss_inputs
from megatron_rl.rollout.scored_batch import Scoring, scored_batch
from megatron_rl.trainer.advantages.critic import CriticAdvantages
from megatron_rl.trainer.advantages.kl_in_reward import KLPenalty
from megatron_rl.trainer.advantages.source import MeasuredKL
from megatron_rl.trainer.passes.passes import Passes
from tests.equality.critic_rig import Pair, naive, one_gradient, open_critic, targets, values_of
from tests.equality.layouts import TOLERANCE
from tests.equality.rows import row
from tests.pairwise import quick
from tests.reference import gradient_of, reference_logprobs, relative_error

GAMMA, LAM, BETA = 0.98, 0.9, 0.1
# the policy's grid, and the critic's own: TP, SP, PP, VPP, CP and DP are of either alone, or of both
GRIDS = (*("one qwen2_tied", "DP2 qwen2_tied", "TP2-SP qwen3", "PP2 llama", "DP2 qwen2_tied, critic TP2"),
         *("DP2 qwen3, critic TP2-SP", "DP2 llama3_rope, critic PP2-VPP2", "DP2 qwen2_untied, critic CP2"),
         *("TP2-PP2 qwen2_tied, critic TP1", "TP2-DP2 llama, critic PP2", "shared qwen3"),
         *("DP2-shared llama3_rope, critic PP2-VPP2", "DP2-shared qwen2_untied, critic CP2"))
LONG = (*("one qwen2_tied", "PP2 llama", "DP2 qwen2_tied, critic TP2", "TP2-PP2 qwen2_tied, critic TP1"),
        *("TP2-DP2 llama, critic PP2", "shared qwen3"))
STEPS = ("PP2 llama", "DP2-shared qwen2_untied", "DP2 qwen2_untied", "TP2-PP2 qwen3")


def against_reward_model(rank: int, world: int, family: str, overrides: tuple[str, ...]) -> dict[str, float]:
    """Return the worst differences to the loop: of values, of the gradient and of the loss, under two reductions."""
    found: dict[str, float] = {}
    with open_critic(family, *overrides) as pair:
        critic, samples, batch, judge = pair.critic, pair.samples, pair.batch, pair.judge
        flat = critic.values(batch)
        with torch.no_grad():
            wanted = np.concatenate([values_of(judge, s).numpy() * s.loss_mask for s in samples])
        found["values"] = float(np.abs(flat - wanted).max())
        returns, old = (np.concatenate(x) for x in targets(samples))
        for reduction in ("token_mean", "sequence_mean"):
            loss = dataclasses.replace(critic.config.loss, reduction=reduction)
            critic.config = dataclasses.replace(critic.config, loss=loss)
            with critic._here():
                gradient, loss = one_gradient(critic, batch, returns, old)
            theirs, total = naive(judge, samples, pair.groups, reduction)
            found[f"gradient/{reduction}"] = relative_error(gradient, theirs)
            found[f"loss/{reduction}"] = abs(loss - total) / abs(total)
    return found


@pytest.mark.parametrize("name", quick(GRIDS, *(x for x in GRIDS if x not in LONG)))
def test_values_and_gradient_equal_a_reward_models(pool, name):
    grid, _, critic = name.partition(", critic ")
    world, family, policy = row(grid)
    overrides = (*policy, *(f"critic.{x}" for x in row(f"{critic or 'one'} {family}")[2]))
    for found in pool.run(world, against_reward_model, family, overrides, timeout_s=90):
        assert max(found.values()) < TOLERANCE, found


def naive_ppo(pair: Pair, totals: list[float], penalties: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """Return one step's gradient token by token: values, GAE over loss tokens, clipped surrogate, token mean."""
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
    return gradient_of(pair.policy_model)


def one_ppo_step(rank: int, world: int, family: str, overrides: tuple[str, ...]) -> float:
    """Return the policy's gradient error, with values from the critic's ranks, all else from the run's own stages."""
    given = (f"advantage.gamma={GAMMA}", f"advantage.lam={LAM}", "advantage.whiten=none", *overrides)
    with open_critic(family, *given) as pair:
        backend, batch, facts = pair.backend, pair.batch, pair.batch.facts
        random = np.random.default_rng(9)
        totals = random.normal(size=len(pair.samples))
        totals[3] = np.nan  # excluded, as its mask says
        penalties = [BETA * random.normal(size=len(s.loss_mask)) for s in pair.samples]
        mask, penalty = backend.gather_loss_mask(batch), np.concatenate(penalties)
        paid = KLPenalty(of_token=penalty, measured=MeasuredKL(kl=0.0, tokens=len(mask)), metrics={})
        kl = SimpleNamespace(of=lambda passes, num_samples: paid)
        config = backend.config
        scoring = Scoring.of(config.reward, config.advantage, config.rollout, config.loss)
        scored = scored_batch(scoring, batch, totals, totals[:, None])
        passes = Passes(loss_mask=mask, values=pair.critic.values(batch))
        estimate = CriticAdvantages(backend.config.advantage, kl=kl)(scored, passes)
        signal = estimate.advantages.largest(facts.response_tokens) > 0
        assert signal.tolist() == (facts.loss_tokens > 0).tolist()
        plan = backend.plan_training(batch, signal, drops=True)
        batch = backend.fetch_rows(batch, plan)
        (mini_batch,) = plan.mini_batches
        old = np.concatenate([s.logprobs for s in pair.samples])
        limits = dict(drops=True, max_response_tokens=backend.config.rollout.max_response_tokens)
        inputs = loss_inputs(backend.config.loss, facts, mini_batch, estimate.advantages, signal, **limits)
        inputs = dataclasses.replace(inputs, old_logprobs=old)
        backend.forward_backward(batch, mini_batch, inputs, fingerprint=plan.fingerprints()[0])
        gradient = backend.gradient()
        backend.zero_grad()
        return relative_error(gradient, naive_ppo(pair, totals.tolist(), penalties))


@pytest.mark.parametrize("name", quick(STEPS, *STEPS[:2]))
def test_a_ppo_step_equals_a_loop_over_tokens(pool, name):
    world, family, policy = row(name)
    critic = ("critic.parallel.pipeline=1",) if name == "PP2 llama" else ()
    assert max(pool.run(world, one_ppo_step, family, (*policy, *critic), timeout_s=90)) < TOLERANCE
