"""loss/: each term's value and gradient against its equation, token by token and case by case, in double precision."""

import math
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.algorithm.kl import kl_per_token
from megatron_rl.algorithm.objective import Objective, cross_entropy
from megatron_rl.algorithm.policy_loss import policy_term
from megatron_rl.config import POLICIES, LossConfig
from tests.unit.algorithm.naive_policy import token_loss

# Both sides run in double; what differs is the order of a few operations on numbers below 100.
DOUBLE = {"rtol": 1e-12, "atol": 1e-13}
CONFIGS = {"ppo": LossConfig(),
           "ppo_asymmetric": LossConfig(clip_low=0.1, clip_high=0.4),
           "ppo_dual": LossConfig(clip_low=0.1, clip_high=0.3, dual_clip=1.8),
           "gspo": LossConfig(policy="gspo", clip_low=0.05, clip_high=0.08),
           "cispo": LossConfig(policy="cispo", clip_low=0.3, clip_high=0.1),
           "importance_sampling": LossConfig(policy="importance_sampling"),
           "dro": LossConfig(policy="dro", dro_beta=0.3),
           "reinforce": LossConfig(policy="reinforce")}


def make_tokens(seed: int = 0) -> SimpleNamespace:
    """Make 60 tokens of 6 sequences, in no order; ratios go from 0.1 to 10, so every clip is met from both sides."""
    random = torch.Generator().manual_seed(seed)
    sequences = torch.randint(0, 6, (60,), generator=random)
    old = -3 * torch.rand(60, generator=random, dtype=torch.float64)
    gap = torch.linspace(-2.3, 2.3, 60, dtype=torch.float64)[torch.randperm(60, generator=random)]
    advantage = torch.tensor([1.3, -0.7, 0.0, 2.0, -1.1, 0.4], dtype=torch.float64)
    weight = torch.tensor([0.3, 0.01, 0.5, 0.07, 0.2, 0.11], dtype=torch.float64)
    return SimpleNamespace(num_sequences=6, sequences=sequences, advantages=(weight * advantage)[sequences],
                           weights=weight[sequences], old_logprobs=old, rollout_logprobs=old + 0.1 * gap,
                           reference_logprobs=old - 0.3 * gap, logprobs=old + gap, kl_coefficient=None, measured=None)


def run_term(config: LossConfig, t: SimpleNamespace, **changed):
    """Return (PolicyTerm, gradient of its sum with respect to the log-probs)."""
    t = SimpleNamespace(**{**vars(t), **changed})
    logprobs = t.logprobs.clone().requires_grad_()
    term = policy_term(logprobs, t.old_logprobs, t.advantages, t.weights, t.sequences, t.num_sequences, config)
    (gradient,) = torch.autograd.grad(term.loss.sum(), logprobs)
    return term, gradient


def assert_equals_equation(config: LossConfig, t: SimpleNamespace):
    """Assert loss and gradient against ``token_loss``, one scalar at a time; return what ``run_term`` returns."""
    logprobs = [x.clone().requires_grad_() for x in t.logprobs]
    losses = [token_loss(config, t, logprobs, i) for i in range(len(logprobs))]
    wanted = torch.autograd.grad(sum(losses), logprobs, allow_unused=True)
    term, gradient = run_term(config, t)
    torch.testing.assert_close(term.loss.detach(), torch.stack(losses).detach(), **DOUBLE)
    wanted = torch.tensor([0.0 if x is None else x.item() for x in wanted], dtype=torch.float64)
    torch.testing.assert_close(gradient, wanted, **DOUBLE)
    return term, gradient


@pytest.mark.parametrize("name", CONFIGS)
def test_term_equals_equation(name: str) -> None:
    tokens = make_tokens()
    _, gradient = assert_equals_equation(CONFIGS[name], tokens)
    if name != "dro":
        assert (gradient[tokens.advantages == 0] == 0).all()


def test_gspo_of_a_single_token_response_equals_the_naive_loop() -> None:
    """Its ratio is the token's own, within the clip and beyond it, beside responses of two and three tokens."""
    lengths, gaps = [1, 2, 1, 3, 1, 1], [0.06, 0.02, -0.03, -0.04, 0.01, 0.07, -0.02, 0.5, -0.5]
    sequences = torch.repeat_interleave(torch.arange(6), torch.tensor(lengths))
    old, gap = torch.linspace(-3, -1, 9, dtype=torch.float64), torch.tensor(gaps, dtype=torch.float64)
    advantages = torch.tensor([1.3, -0.7, -2.0, 0.4, 1.1, -0.9], dtype=torch.float64)[sequences]
    given = dict(num_sequences=6, sequences=sequences, advantages=advantages, weights=torch.ones_like(old))
    term, _ = assert_equals_equation(CONFIGS["gspo"], SimpleNamespace(**given, old_logprobs=old, logprobs=old + gap))
    torch.testing.assert_close(term.ratio.detach()[[0, 3, 7, 8]], gap[[0, 3, 7, 8]].exp(), **DOUBLE)


@pytest.mark.parametrize("name", ["ppo", "ppo_asymmetric", "ppo_dual"])
def test_clipped_is_where_the_gradient_is_gone(name: str) -> None:
    tokens = make_tokens()
    term, gradient = run_term(CONFIGS[name], tokens)
    alive = tokens.advantages != 0
    assert torch.equal(term.clipped[alive], gradient[alive] == 0)
    assert 0.2 < term.clipped[alive].double().mean() < 0.8  # both cases occur often


def test_every_policy_is_tested() -> None:
    assert {c.policy for c in CONFIGS.values()} == set(POLICIES)


@pytest.mark.parametrize("name", CONFIGS)
def test_folded_weight_equals_weight_outside(name: str) -> None:
    """w·term(A) = term(w·A): bit by bit for a power of two (the exponent alone changes), to rounding for any w > 0."""
    tokens = make_tokens()
    plain = {"advantages": tokens.advantages / tokens.weights, "weights": torch.ones_like(tokens.weights)}
    outside, gradient_outside = run_term(CONFIGS[name], tokens, **plain)
    for weight in (torch.full_like(tokens.weights, 2.0**-7), tokens.weights):
        folded, gradient = run_term(CONFIGS[name], tokens, advantages=weight * plain["advantages"], weights=weight)
        tolerance = {"rtol": 0, "atol": 0} if (weight == 2.0**-7).all() else DOUBLE
        torch.testing.assert_close(folded.loss, weight * outside.loss, **tolerance)
        torch.testing.assert_close(gradient, weight * gradient_outside, **tolerance)
        assert torch.equal(folded.clipped, outside.clipped)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "dro"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_advantage_gives_exactly_zero_gradient(name: str, dtype: torch.dtype) -> None:
    """However far the ratio has gone. The skip stands on this: a small gradient would not do."""
    tokens = make_tokens()
    moved = {k: v.to(dtype) for k, v in vars(tokens).items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    far = moved["old_logprobs"] + 12 * (moved["logprobs"] - moved["old_logprobs"])
    moved |= {"advantages": torch.zeros(60, dtype=dtype), "logprobs": far}
    _, gradient = run_term(CONFIGS[name], tokens, **moved)
    assert torch.equal(gradient, torch.zeros(60, dtype=dtype))


def test_dro_trains_at_zero_advantage() -> None:
    """dro trains at zero advantage, so algorithm/signal.py refuses it under skip.mode=exact."""
    _, gradient = run_term(CONFIGS["dro"], make_tokens(), advantages=torch.zeros(60, dtype=torch.float64))
    assert (gradient != 0).all()


@pytest.mark.parametrize("name", ["ppo_dual", "gspo", "importance_sampling"])
def test_on_policy_gradient_equals_reinforce(name: str) -> None:
    """At π_θ = π_old nothing is clipped and every surrogate has the policy gradient −A·∇log π."""
    tokens = make_tokens()
    _, gradient = run_term(CONFIGS[name], tokens, logprobs=tokens.old_logprobs)
    torch.testing.assert_close(gradient, -tokens.advantages, **DOUBLE)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "unbiased"])
def test_kl_equals_definition(estimator: str) -> None:
    tokens = make_tokens()
    logprobs = tokens.logprobs.clone().requires_grad_()
    found = kl_per_token(logprobs, tokens.reference_logprobs, tokens.old_logprobs, estimator=estimator)
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    for i in range(60):
        x = tokens.logprobs[i].clone().requires_grad_()
        policy, reference, old = x.exp(), tokens.reference_logprobs[i].exp(), tokens.old_logprobs[i].exp()
        k3 = reference / policy - (reference / policy).log() - 1
        definition = {"k1": (policy / reference).log(),
                      "k2": (policy / reference).log() ** 2 / 2,
                      "k3": k3,
                      "unbiased": policy / old * k3}
        (wanted,) = torch.autograd.grad(definition[estimator], x)
        torch.testing.assert_close(found[i].detach(), definition[estimator].detach(), **DOUBLE)
        torch.testing.assert_close(gradient[i], wanted, **DOUBLE)
    with pytest.raises(ValueError, match="kl_estimator='k4'"):
        kl_per_token(tokens.logprobs, tokens.logprobs, tokens.logprobs, estimator="k4")


@pytest.mark.parametrize("estimator", ["k1", "k3", "unbiased"])
def test_kl_is_unbiased_in_value_and_unbiased_in_gradient_too(estimator: str) -> None:
    """Σ_v π_old(v)·estimate(v) over a vocabulary is KL(π_θ ‖ π_ref), and its gradient under ``unbiased``.

    k1 and k3 need π_old = π_θ for the value, and their gradient is another one (DeepSeek-V3.2, section 3.1).
    """
    logits, reference, old = torch.randn(3, 11, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    logits.requires_grad_()
    policy, reference, old = logits.log_softmax(-1), reference.log_softmax(-1), old.log_softmax(-1)
    sampler = old if estimator == "unbiased" else policy.detach()
    expected = (sampler.exp() * kl_per_token(policy, reference, sampler, estimator=estimator)).sum()
    exact = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close(expected, exact, **DOUBLE)
    (found,), (wanted,) = torch.autograd.grad(expected, logits, retain_graph=True), torch.autograd.grad(exact, logits)
    assert torch.allclose(found, wanted, **DOUBLE) == (estimator == "unbiased")


def test_cross_entropy_is_the_weighted_sum() -> None:
    tokens = make_tokens()
    logprobs = tokens.logprobs.clone().requires_grad_()
    loss = cross_entropy(logprobs, tokens.weights)
    loss.backward()
    wanted = -sum(w * x for w, x in zip(tokens.weights.tolist(), tokens.logprobs.tolist(), strict=True))
    # rel: 60 additions
    assert loss.item() == pytest.approx(wanted, rel=1e-12) and torch.equal(logprobs.grad, -tokens.weights)


def run_objective(config: LossConfig, tokens: SimpleNamespace, entropy: torch.Tensor):
    logprobs, entropy = tokens.logprobs.clone().requires_grad_(), entropy.clone().requires_grad_()
    loss, sums = Objective(config).policy(tokens, logprobs, entropy)
    return loss, sums, torch.autograd.grad(loss, (logprobs, entropy), allow_unused=True)


@pytest.mark.parametrize("policy", ["ppo", "dro"])
def test_objective_is_the_sum_of_its_terms(policy: str) -> None:
    """L = Σ policy + Σ w·(β·kl − c·entropy), and the sums of metrics; dro's quadratic is against the engine's μ."""
    tokens, entropy = make_tokens(), torch.linspace(0.1, 3, 60, dtype=torch.float64)
    config = LossConfig(policy=policy, kl_coefficient=0.3, kl_estimator="k2", entropy_coefficient=0.02)
    loss, sums, (gradient, entropy_gradient) = run_objective(config, tokens, entropy)
    behaviour = tokens.rollout_logprobs if policy == "dro" else tokens.old_logprobs
    term, term_gradient = run_term(config, tokens, old_logprobs=behaviour)
    gap = tokens.logprobs - tokens.reference_logprobs
    wanted = term.loss.sum() + (tokens.weights * (0.3 * gap**2 / 2 - 0.02 * entropy)).sum()
    torch.testing.assert_close(loss, wanted, **DOUBLE)
    torch.testing.assert_close(gradient, term_gradient + 0.3 * tokens.weights * gap, **DOUBLE)
    torch.testing.assert_close(entropy_gradient, -0.02 * tokens.weights, **DOUBLE)
    listed = [loss.item(), 60.0, entropy.sum(), (gap**2 / 2).sum(), term.clipped.sum(), term.ratio.detach().sum()]
    to_engine = tokens.logprobs - tokens.rollout_logprobs
    listed += [to_engine.abs().sum(), ((-to_engine).exp() + to_engine - 1).sum(), to_engine.abs().max()]
    torch.testing.assert_close(sums, torch.tensor([float(x) for x in listed], dtype=torch.float64), **DOUBLE)


def test_gspos_metrics_are_of_the_sequences_ratio() -> None:
    """Each token counts its sequence's ratio and the clip of that ratio, as the loss reads them, not its own."""
    tokens, config = make_tokens(), CONFIGS["gspo"]
    _, sums, _ = run_objective(config, tokens, torch.zeros(60, dtype=torch.float64))
    logs, ratios, clipped = (tokens.logprobs - tokens.old_logprobs).tolist(), 0.0, 0
    for sequence in range(6):
        members = [t for t in range(60) if tokens.sequences[t] == sequence]
        ratio = math.exp(sum(logs[t] for t in members) / len(members))
        ratios += len(members) * ratio
        advantage = tokens.advantages[members[0]].item()
        above, below = ratio > 1 + config.clip_high, ratio < 1 - config.clip_low
        clipped += len(members) * ((above and advantage > 0) or (below and advantage < 0))
    assert sums[5].item() == pytest.approx(ratios, rel=1e-12)  # the order of additions
    assert sums[4].item() == clipped and 0 < clipped < 60
    assert abs(ratios - sum(map(math.exp, logs))) > 1  # the tokens' own ratios have another sum


def test_metrics_count_the_measured_tokens_alone() -> None:
    """Loss and gradients hold all tokens; one of a dropped sample, not measured, may have an infinite ratio."""
    tokens, entropy = make_tokens(), torch.linspace(0.1, 3, 60, dtype=torch.float64)
    config = LossConfig(kl_coefficient=0.3, entropy_coefficient=0.02)
    loss, _, gradients = run_objective(config, tokens, entropy)
    tokens.measured = (tokens.sequences != 2).float()
    masked_loss, sums, masked_gradients = run_objective(config, tokens, entropy)
    assert torch.equal(masked_loss, loss) and sums[0] == loss
    assert all(torch.equal(a, b) for a, b in zip(masked_gradients, gradients, strict=True))
    chosen = tokens.sequences != 2
    fields = {k: x[chosen] if isinstance(x, torch.Tensor) else x for k, x in vars(tokens).items()}
    _, alone, _ = run_objective(config, SimpleNamespace(**{**fields, "measured": None}), entropy[chosen])
    torch.testing.assert_close(sums[1:], alone[1:], **DOUBLE)
    tokens.old_logprobs = torch.where(chosen, tokens.old_logprobs, -torch.inf)
    assert run_objective(LossConfig(), tokens, entropy)[1].isfinite()[1:].all()


def test_objective_is_on_policy_without_old_logprobs_and_zero_weights_take_kl_and_entropy_along() -> None:
    """The ratio is exactly 1 and nothing is clipped: the first step needs no pass for π_old = π_θ."""
    tokens = make_tokens()
    tokens.old_logprobs = tokens.reference_logprobs = None
    loss, sums, (gradient, entropy_gradient) = run_objective(LossConfig(), tokens, torch.zeros(60, dtype=torch.float64))
    torch.testing.assert_close(loss, -tokens.advantages.sum(), **DOUBLE)
    torch.testing.assert_close(gradient, -tokens.advantages, **DOUBLE)
    assert entropy_gradient is None and sums.tolist()[4:6] == [0.0, 60.0]
    # a filler runs with weights of 0: no term of the objective moves a weight of the model, bit by bit
    tokens = make_tokens()
    zeros = torch.zeros(60, dtype=torch.float64)
    tokens.advantages = tokens.weights = zeros
    for policy in POLICIES:
        config = LossConfig(policy=policy, kl_coefficient=0.3, kl_estimator="unbiased", entropy_coefficient=0.1)
        loss, _, gradients = run_objective(config, tokens, zeros + 1)
        assert loss.item() == 0.0 and all(torch.equal(g, zeros) for g in gradients)
