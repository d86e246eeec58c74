"""Lists the faults planted where numbers come from: advantages, estimators, losses, signal, noise, plan and cost."""

from __future__ import annotations

from mutants.table import Mutant

ADVANTAGE = (
    Mutant(
        name="denominator-after-the-drop",
        file="megatron_rl/algorithm/advantage.py",
        line="counted = members if counts_all else members[signal[members]]",
        becomes="counted = members[signal[members]]",
        fault="denominators are counted after the drop, whatever `loss.denominator` says",
        tests=("tests/unit/algorithm/test_reductions.py::test_steps_and_weights_equal_the_naive_loop",),
    ),
    Mutant(
        name="sequence-mean-counts-the-masked",
        file="megatron_rl/algorithm/advantage.py",
        line="weights[present] = own / (samples * tokens[present])",
        becomes="weights[present] = own / (len(counted) * tokens[present])",
        fault="`sequence_mean` divides by samples without a loss token too",
        tests=("tests/unit/algorithm/test_advantage.py::test_reduction_weights_equal_the_table",),
    ),
    Mutant(
        name="prompt-mean-counts-the-masked",
        file="megatron_rl/algorithm/advantage.py",
        line="weights[present] = own / ((group_tokens > 0).sum() * group_tokens[index[present]])",
        becomes="weights[present] = own / (len(group_tokens) * group_tokens[index[present]])",
        fault="`prompt_mean` divides by prompts of other mini-batches and by masked ones too",
        tests=("tests/unit/algorithm/test_advantage.py::test_reduction_weights_equal_the_table",),
    ),
    Mutant(
        name="gdpo-takes-the-excluded",
        file="megatron_rl/algorithm/advantage.py",
        line="applied = seen.included & ~np.isnan(values)",
        becomes="applied = ~np.isnan(values)",
        fault="a sample taken out of its group stays in `gdpo`'s means",
        tests=("tests/unit/algorithm/test_advantage.py::test_invariants",),
    ),
    Mutant(
        name="gae-dead-by-its-group",
        file="megatron_rl/algorithm/advantage.py",
        line='if estimator in BY_A_MODEL or (whiten == "center_and_scale" and estimator in ("reinforce_plus_plus", '
        '"gdpo")):',
        becomes='if whiten == "center_and_scale" and estimator in ("reinforce_plus_plus", "gdpo"):',
        fault="under `gae` a group of equal rewards is taken for one without signal",
        tests=("tests/unit/algorithm/test_advantage.py::test_under_gae_every_included_sample_may_have_an_advantage",),
    ),
)

FINITE = (
    Mutant(
        name="overflow-is-let-through",
        file="megatron_rl/algorithm/finite.py",
        line="return ~(np.abs(values) <= LARGEST)",
        becomes="return np.isnan(values)",
        fault="an infinite or overflowed reward becomes an advantage of 0",
        tests=("tests/unit/algorithm/test_finite.py",),
    ),
    Mutant(
        name="nan-is-let-through",
        file="megatron_rl/algorithm/finite.py",
        line="return ~(np.abs(values) <= LARGEST)",
        becomes="return np.abs(values) > LARGEST",
        fault="a NaN passes for a number, as it is not above float32's largest",
        tests=("tests/unit/algorithm/test_finite.py",),
    ),
    Mutant(
        name="metrics-count-the-dropped",
        file="megatron_rl/algorithm/advantage.py",
        line="measured=(signal if copies is None else copies) if drops else None,",
        becomes="measured=None,",
        fault="dropped samples in a survivor's micro-batch are in its entropy, ratio and KL",
        tests=("tests/equality/test_steps.py::test_metrics_count_survivors_alone_whoever_shares_their_micro_batches",),
    ),
)

ESTIMATORS = (
    Mutant(
        name="rounding-is-signal",
        file="megatron_rl/algorithm/estimators.py",
        line="centred[members[is_mean & suspects[members]]] = 0.0",
        becomes="",
        fault="a reward at its group's mean has the rounding of that mean as its advantage",
        tests=("tests/unit/algorithm/test_finite.py",),
    ),
    Mutant(
        name="nearly-the-mean-is-the-mean",
        file="megatron_rl/algorithm/estimators.py",
        line="is_mean = np.array([len(numbers) * number == total for number in numbers])",
        becomes="is_mean = np.ones(len(numbers), dtype=bool)",
        fault="a reward within rounding of its group's mean is taken for equal to it",
        tests=("tests/unit/algorithm/test_finite.py",),
    ),
    Mutant(
        name="grpo-biased-deviation",
        file="megatron_rl/algorithm/estimators.py",
        line="spread = np.sqrt(rewards.per_group(centred**2) / np.maximum(rewards.counts - 1, 1))[rewards.group] + "
        "epsilon",
        becomes="spread = np.sqrt(rewards.per_group(centred**2) / np.maximum(rewards.counts, 1))[rewards.group] + "
        "epsilon",
        fault="`grpo` divides the squares by n, not n − 1",
        tests=("tests/unit/algorithm/test_advantage.py::test_estimator_equals_formula",),
    ),
    Mutant(
        name="mean-over-the-excluded",
        file="megatron_rl/algorithm/estimators.py",
        line="mean = rewards.per_group(values) / np.maximum(rewards.counts, 1)",
        becomes="mean = rewards.per_group(values) / np.maximum(np.bincount(rewards.group), 1)",
        fault="a group's mean counts excluded samples as rewards of 0",
        tests=("tests/unit/algorithm/test_advantage.py::test_estimator_equals_formula",),
    ),
    Mutant(
        name="batch-std-over-the-excluded",
        file="megatron_rl/algorithm/estimators.py",
        line="values = centred[rewards.included]",
        becomes="values = centred",
        fault="the batch's spread counts excluded samples as zeros",
        tests=("tests/unit/algorithm/test_advantage.py::test_estimator_equals_formula",),
    ),
    Mutant(
        name="rloo-without-its-factor",
        file="megatron_rl/algorithm/estimators.py",
        line="return np.where(count > 1, dr_grpo(rewards) * count / np.maximum(count - 1, 1), 0.0)",
        becomes="return np.where(count > 1, dr_grpo(rewards), 0.0)",
        fault="`rloo`'s baseline holds the sample itself",
        tests=("tests/unit/algorithm/test_advantage.py::test_estimator_equals_formula",),
    ),
    Mutant(
        name="whitening-biased-deviation",
        file="megatron_rl/algorithm/estimators.py",
        line="spread = np.sqrt((counted * (values - mean) ** 2).sum() / (total - 1)) + epsilon",
        becomes="spread = np.sqrt((counted * (values - mean) ** 2).sum() / total) + epsilon",
        fault="whitening divides the squares by n, not n − 1",
        tests=(
            "tests/unit/algorithm/test_gae.py::test_whitening_is_over_loss_tokens",
            "tests/unit/algorithm/test_advantage.py::test_estimator_equals_formula",
        ),
    ),
)

GAE = (
    Mutant(
        name="gae-runs-into-the-next-sample",
        file="megatron_rl/algorithm/gae.py",
        line="following[last[counts > 0]] = 0.0",
        becomes="",
        fault="a sample's last token is bootstrapped from the next sample's first value",
        tests=("tests/unit/algorithm/test_gae.py::test_advantages_equal_the_sum_per_token",),
    ),
    Mutant(
        name="gae-lambda-without-gamma",
        file="megatron_rl/algorithm/gae.py",
        line="compact = _discounted_sums(rewards + gamma * following - baseline, counts, gamma * lam)",
        becomes="compact = _discounted_sums(rewards + gamma * following - baseline, counts, lam)",
        fault="the recursion decays by λ, not γλ",
        tests=("tests/unit/algorithm/test_gae.py::test_advantages_equal_the_sum_per_token",),
    ),
    Mutant(
        name="kl-penalty-added",
        file="megatron_rl/algorithm/gae.py",
        line="rewards[positions] = -np.asarray(token_penalties, dtype=np.float64)[positions]",
        becomes="rewards[positions] = np.asarray(token_penalties, dtype=np.float64)[positions]",
        fault="the KL penalty of a token is a reward",
        tests=("tests/unit/algorithm/test_gae.py::test_token_rewards_equal_a_loop",),
    ),
)

LOSS = (
    Mutant(
        name="gspo-single-token",
        file="megatron_rl/algorithm/policy_loss.py",
        line="mean = (total / count.clamp(min=1)).exp()[sequences]",
        becomes="mean = (total / count.clamp(min=2)).exp()[sequences]",
        fault="`gspo` takes a response of one token for one of two",
        tests=("tests/unit/algorithm/test_policy_loss.py::test_gspo_of_a_single_token_response_equals_the_naive_loop",),
    ),
    Mutant(
        name="clip-sides-swapped",
        file="megatron_rl/algorithm/policy_loss.py",
        line="low, high = 1 - config.clip_low, 1 + config.clip_high",
        becomes="low, high = 1 - config.clip_high, 1 + config.clip_low",
        fault="`clip_low` bounds from above and `clip_high` from below",
        tests=("tests/unit/algorithm/test_policy_loss.py::test_term_equals_equation",),
    ),
    Mutant(
        name="dual-clip-of-either-sign",
        file="megatron_rl/algorithm/policy_loss.py",
        line="objective = torch.where(advantages < 0, torch.maximum(objective, floor), objective)",
        becomes="objective = torch.maximum(objective, floor)",
        fault="the dual clip bounds positive advantages too",
        tests=("tests/unit/algorithm/test_policy_loss.py::test_term_equals_equation",),
    ),
    Mutant(
        name="cispo-differentiates-its-clip",
        file="megatron_rl/algorithm/policy_loss.py",
        line="bounded = ratio.detach().clamp(low, high)",
        becomes="bounded = ratio.clamp(low, high)",
        fault="`cispo`'s clipped ratio carries gradient",
        tests=("tests/unit/algorithm/test_policy_loss.py::test_term_equals_equation",),
    ),
    Mutant(
        name="kl-without-its-weight",
        file="megatron_rl/algorithm/objective.py",
        line="loss = loss + coefficient * (tokens.weights * per_token).sum()",
        becomes="loss = loss + coefficient * per_token.sum()",
        fault="the KL in the loss is not weighted by the reduction",
        tests=("tests/unit/algorithm/test_policy_loss.py::test_objective_is_the_sum_of_its_terms",),
    ),
    Mutant(
        name="dro-against-the-trainer",
        file="megatron_rl/algorithm/objective.py",
        line='behaviour = tokens.rollout_logprobs if self.config.policy == "dro" else old',
        becomes="behaviour = old",
        fault="`dro`'s quadratic is against π_old, not the engine's policy",
        tests=("tests/unit/algorithm/test_policy_loss.py::test_objective_is_the_sum_of_its_terms",),
    ),
    Mutant(
        name="unbiased-kl-ratio-detached",
        file="megatron_rl/algorithm/kl.py",
        line="return (logprobs - old_logprobs).exp() * (d.exp() - d - 1)",
        becomes="return (logprobs - old_logprobs).detach().exp() * (d.exp() - d - 1)",
        fault="the ratio of the unbiased KL carries no gradient",
        tests=("tests/unit/algorithm/test_policy_loss.py::test_kl_equals_definition",),
    ),
    Mutant(
        name="kl-controller-one-sided",
        file="megatron_rl/algorithm/kl_controller.py",
        line="error = min(max(kl / self.target - 1.0, -0.2), 0.2)",
        becomes="error = min(kl / self.target - 1.0, 0.2)",
        fault="the controller's error is clipped from above alone",
        tests=("tests/unit/algorithm/test_kl_controller.py",),
    ),
    Mutant(
        name="value-clip-takes-the-smaller",
        file="megatron_rl/algorithm/value_loss.py",
        line="return ValueTerm(loss=0.5 * (weights * torch.maximum(error, bounded)).sum(), clipped=(bounded > "
        "error).detach())",
        becomes="return ValueTerm(loss=0.5 * (weights * torch.minimum(error, bounded)).sum(), clipped=(bounded > "
        "error).detach())",
        fault="the critic takes the smaller of the two errors",
        tests=("tests/unit/algorithm/test_value_loss.py::test_value_loss_equals_equation",),
    ),
    Mutant(
        name="correction-forgets-its-floor",
        file="megatron_rl/algorithm/importance.py",
        line="outside = (ratio > config.cap) | (ratio < low)",
        becomes="outside = ratio > config.cap",
        fault="a mask keeps importance weights below its floor",
        tests=("tests/unit/algorithm/test_importance.py::test_weights_equal_a_loop_over_tokens",),
    ),
    Mutant(
        name="geometric-mean-over-the-masked",
        file="megatron_rl/algorithm/importance.py",
        line="mean = total / np.maximum(tokens, 1)",
        becomes="mean = total / response_tokens",
        fault="the geometric ratio's mean counts tokens without loss",
        tests=("tests/unit/algorithm/test_importance.py::test_tokens_without_loss_are_in_no_sum_and_no_mean",),
    ),
    Mutant(
        name="off-policy-mask-wrong-sign",
        file="megatron_rl/algorithm/importance.py",
        line="return (advantages < 0) & (-mean_gap > delta)",
        becomes="return (advantages < 0) & (mean_gap > delta)",
        fault="off-policy masking looks at the gap the other way round",
        tests=("tests/unit/algorithm/test_importance.py::test_off_policy_masking_takes_negative_advantages_only",),
    ),
)

SIGNAL = (
    Mutant(
        name="nan-is-no-signal",
        file="megatron_rl/algorithm/signal.py",
        line='require_finite(advantages, "the advantage", sample_ids, way_out)',
        becomes="",
        fault="a sample with an advantage of NaN is dropped",
        tests=("tests/unit/algorithm/test_signal.py::test_invariants",),
    ),
    Mutant(
        name="signal-of-positive-advantages",
        file="megatron_rl/algorithm/signal.py",
        line="return (np.abs(advantages) > advantage_epsilon) & (loss_tokens > 0)",
        becomes="return (advantages > advantage_epsilon) & (loss_tokens > 0)",
        fault="samples with a negative advantage are dropped",
        tests=("tests/unit/algorithm/test_signal.py::test_invariants",),
    ),
    Mutant(
        name="own-logprobs-in-every-epoch",
        file="megatron_rl/trainer/passes/old_logprobs.py",
        line="if self.rules.needed_by or first is None or first.kind is not StepKind.REAL:",
        becomes="if first is None or first.kind is not StepKind.REAL:",
        fault="a later epoch takes its own log-probs for π_old, whose weights have moved",
        tests=("tests/equality/test_policies.py::test_two_epochs_of_every_policy_term_equal_the_plain_loop",),
    ),
    Mutant(
        name="skip-passes-under-kl-in-reward",
        file="megatron_rl/algorithm/signal.py",
        line="drops_logprob_passes=drops and config.skip.logprob_passes and not config.logprobs_make_advantages,",
        becomes="drops_logprob_passes=drops and config.skip.logprob_passes,",
        fault="log-prob passes drop samples whose advantages are made of these log-probs",
        tests=(
            "tests/unit/trainer/test_reference_policy.py::test_kl_in_the_reward_couples_nothing_and_its_passes_drop_nothing",
        ),
    ),
    Mutant(
        name="negative-entropy-bonus-is-exact",
        file="megatron_rl/algorithm/signal.py",
        line="if config.loss.entropy_coefficient != 0:",
        becomes="if config.loss.entropy_coefficient > 0:",
        fault="a negative entropy coefficient is let through under `skip.mode=exact`",
        tests=("tests/unit/algorithm/test_signal.py::test_exact_refuses",),
    ),
)

NOISE = (
    Mutant(
        name="noise-on-the-dead",
        file="megatron_rl/algorithm/noise.py",
        line="for i in np.flatnonzero(signal):",
        becomes="for i in range(len(noisy)):",
        fault="noise brings back samples without signal",
        tests=("tests/unit/algorithm/test_noise.py::test_noise_has_its_invariants",),
    ),
    Mutant(
        name="noise-in-place",
        file="megatron_rl/algorithm/noise.py",
        line="noisy = advantages.astype(np.float64)",
        becomes="noisy = np.asarray(advantages, dtype=np.float64)",
        fault="noise is written into the advantages that were given",
        tests=("tests/unit/algorithm/test_noise.py::test_noise_has_its_invariants",),
    ),
)

NUMBERS = (*ADVANTAGE, *FINITE, *ESTIMATORS, *GAE, *LOSS, *SIGNAL, *NOISE)
