"""Functions that return an error message if settings of estimators, losses or rewards cannot go together, else None."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_rl.algorithm.signal import signal_rule
from megatron_rl.config import AdvantageConfig, Config, LossConfig
from megatron_rl.errors import quoted
from megatron_rl.users_code import is_own

if TYPE_CHECKING:
    from megatron_rl.config import (
        CorrectionConfig,
        EvalConfig,
        MegatronConfig,
        OptimizerConfig,
        PreferenceConfig,
        ReferenceConfig,
        ReplayConfig,
        RewardConfig,
        RolloutConfig,
        SftConfig,
    )

MOST_SAMPLES = 10**7  # in one rollout


def own_parts(advantage: AdvantageConfig, loss: LossConfig) -> None:
    """Raise ConfigError if an estimator or a policy loss of the user's own breaks its contract (docs/your-own.md).

    Both are called on random numbers. A loss that has a gradient at a zero advantage is not refused
    here: ``exact_skip`` refuses it if ``skip.mode`` does not allow it.
    """
    if is_own(advantage.estimator):
        from megatron_rl.algorithm import own_estimator

        own_estimator.require(advantage)
    if is_own(loss.policy):
        from megatron_rl.algorithm import own_policy_check  # brings torch along

        own_policy_check.require(loss)


def exact_skip(config: Config) -> None:
    """Raise ConfigError if under ``skip.mode=exact`` a dropped sample could have changed the weights.

    Raises it in every ``skip.mode`` if Megatron-Core is to add a loss that is no sum over tokens.
    """
    signal_rule(config)


def reference(
    reference: ReferenceConfig, loss: LossConfig, estimator: str, prompts_per_rollout: int, samples_per_prompt: int
) -> str | None:
    """Return an error message if the reference's settings contradict loss, estimator or rollout size, else None."""
    if reference.kl_in == "reward" and loss.kl_estimator == "unbiased":
        return (
            "reference.kl_in=reward with loss.kl_estimator=unbiased: its ratio π_θ/π_old is there for the gradient it "
            "carries, and a reward carries none; take loss.kl_estimator=k3, or reference.kl_in=loss"
        )
    if reference.kl_in == "reward" and estimator == "gdpo":
        return (
            "reference.kl_in=reward with advantage.estimator=gdpo: it standardises every reward function by itself, "
            "and the KL is not one of them; take another advantage.estimator, or reference.kl_in=loss"
        )
    if loss.kl_coefficient == 0 and reference.controller == "adaptive":
        return (
            "reference.controller=adaptive moves the KL's coefficient by factors, and loss.kl_coefficient=0 would "
            "stay 0; start above it (0.1, say), or set reference.controller=fixed"
        )
    if loss.kl_coefficient == 0 and reference.refresh_every_rollouts is not None:
        return (
            f"reference.refresh_every_rollouts={reference.refresh_every_rollouts} refreshes a reference policy that "
            "loss.kl_coefficient=0 never uses; set loss.kl_coefficient above 0, or "
            "reference.refresh_every_rollouts=null"
        )
    samples = prompts_per_rollout * samples_per_prompt
    if reference.controller == "adaptive" and samples >= 5 * reference.kl_horizon:
        return (
            f"reference.kl_horizon={reference.kl_horizon} is too short for rollouts of "
            f"train.prompts_per_rollout={prompts_per_rollout} times rollout.samples_per_prompt={samples_per_prompt} = "
            f"{samples} samples: one of them could take the KL's coefficient to 0; give more than {samples // 5}"
        )
    return None


def pairs(
    preference: PreferenceConfig,
    sft: SftConfig,
    temperature: float,
    megatron: MegatronConfig,
    num_rollouts: int | None,
    lora_rank: int | None,
    evaluation: EvalConfig,
) -> str | None:
    """Return an error message if preference pairs cannot be trained under these settings, else None.

    Settings under which a sample's log-probs differ between passes are refused too: the pairs' gradient
    is computed from the log-probs of an earlier pass.
    """
    loss = preference.loss
    if not preference.is_on:
        return None
    if not sft.is_on:
        return f"preference.loss={loss} trains in supervised steps, and this run has none; set sft.steps"
    if temperature != 1.0:
        return (
            f"rollout.temperature={temperature:g} divides the logits of every log-prob, and "
            f"preference.loss={loss} is defined at 1; set rollout.temperature=1"
        )
    from megatron_rl.algorithm.sharing import token_coupling

    if setting := token_coupling(megatron):
        return (
            f"{setting} gives a sample other log-probs in each pass, and preference.loss={loss} takes its "
            "coefficients from one pass and its gradient from another; set it to its neutral value"
        )
    if preference.trains_reward_model:
        for setting, value, neutral in (
            ("train.num_rollouts", num_rollouts, 0),
            ("lora.rank", lora_rank, None),
            ("eval.path", evaluation.path, None),
            ("eval.sets", evaluation.sets or None, None),
        ):
            if value != neutral:
                return (
                    f"preference.loss=bradley_terry trains a reward model, which has no policy, and {setting}={value}; "
                    f"set it to {'null' if neutral is None else neutral}"
                )
    return None


def routing_replay(mode: str, correction: CorrectionConfig, replay: ReplayConfig) -> str | None:
    """Return an error message if routing replay should take its experts from a pass that is not run, else None.

    The pass is the one for π_old. In the training step, routing replay uses the experts that the
    router chose in that pass.

    mode: ``rollout.routing_replay``.
    """
    if mode != "old_logprobs":
        return None
    setting = "rollout.routing_replay=old_logprobs replays the experts of the pass that gives π_old"
    if correction.old_logprobs == "rollout":
        return (
            f"{setting}, and under correction.old_logprobs=rollout there is none; set correction.old_logprobs=auto, or "
            "rollout.routing_replay=rollout"
        )
    if replay.capacity_groups and not replay.recompute_logprobs:
        return (
            f"{setting}, and under replay.recompute_logprobs=false there is none for groups that are replayed; set "
            "that to true, or rollout.routing_replay=rollout"
        )
    return None


def no_reward(num_rollouts: int | None, functions: tuple[str, ...], has_teacher: bool) -> str | None:
    """Return an error message if rollouts have neither a reward function nor a teacher, else None."""
    if num_rollouts == 0 or functions or has_teacher:
        return None
    return "reward.functions is empty and train.num_rollouts > 0; name one, as in reward.functions=[math_verify]"


def no_baseline(
    num_rollouts: int | None, samples_per_prompt: int, advantage: AdvantageConfig, has_critic: bool, has_teacher: bool
) -> str | None:
    """Return an error message if the estimator compares a prompt's samples and each prompt has only one, else None."""
    if num_rollouts == 0 or samples_per_prompt >= 2 or has_critic or has_teacher or advantage.moves_equal_rewards:
        return None
    return (
        f"rollout.samples_per_prompt={samples_per_prompt} gives advantage.estimator={advantage.estimator} no baseline: "
        "every advantage would be 0; use at least 2"
    )


def rollout_size(prompts: int, samples: int) -> str | None:
    """Return an error message if a rollout has more than MOST_SAMPLES samples, else None.

    prompts, samples: the number of prompts of a rollout, and of samples of each.
    """
    if prompts * samples <= MOST_SAMPLES:
        return None
    return (
        f"train.prompts_per_rollout={prompts} times rollout.samples_per_prompt={samples} = {prompts * samples} "
        f"samples is more than a rollout may have, {MOST_SAMPLES}; lower one of them"
    )


def schedule(optimizer: OptimizerConfig) -> str | None:
    """Return an error message if the learning rate decays upwards, or its decay ends before the warm-up, else None."""
    if optimizer.min_lr > optimizer.lr > 0 and optimizer.schedule != "constant":
        return (
            f"optimizer.min_lr={optimizer.min_lr} is above optimizer.lr={optimizer.lr}, from which the schedule decays "
            "to it; lower optimizer.min_lr"
        )
    if optimizer.decay_steps is not None and optimizer.decay_steps <= optimizer.warmup_steps:
        return (
            f"optimizer.decay_steps={optimizer.decay_steps} ends the decay before optimizer.warmup_steps="
            f"{optimizer.warmup_steps} end; raise optimizer.decay_steps, or set it to null for the steps of the run"
        )
    return None


def dead_groups(
    has_critic: bool,
    has_teacher: bool,
    kl_in_reward: bool,
    advantage: AdvantageConfig,
    capacity_groups: int,
    max_rounds: int,
) -> str | None:
    """Return an error message if a setting acts on groups without a gradient, and every group has one, else None.

    Every group has a gradient with a critic, a teacher or KL in the reward, for instance.

    capacity_groups, max_rounds: ``replay.capacity_groups`` and
        ``rollout.dynamic_sampling.max_rounds``.
    """
    causes = {
        "advantage.estimator=gae": has_critic,
        "advantage.estimator=distillation": has_teacher,
        "reference.kl_in=reward": kl_in_reward,
        "advantage.moves_equal_rewards=true": advantage.moves_equal_rewards,
    }
    cause = next((name for name, holds in causes.items() if holds), None)
    settings = {
        "replay.capacity_groups": capacity_groups,
        "rollout.dynamic_sampling.max_rounds": max_rounds,
        "advantage.noise_std": advantage.noise_std,
    }
    setting = next((name for name, value in settings.items() if value), None)
    if cause is None or setting is None:
        return None
    return f"{setting}={settings[setting]} acts on groups without signal, and with {cause} there are none; set it to 0"


def overlong(buffer: int, limit: int) -> str | None:
    """Return an error message if the overlong penalty's buffer has more tokens than the longest response, else None.

    buffer, limit: ``reward.overlong_buffer_tokens`` and ``rollout.max_response_tokens``.
    """
    if buffer <= limit:
        return None
    return (
        f"reward.overlong_buffer_tokens={buffer} tokens must fit in rollout.max_response_tokens={limit}; lower "
        "reward.overlong_buffer_tokens"
    )


def early_ends(reward: RewardConfig, rollout: RolloutConfig, mask_truncated: bool, plays_episodes: bool) -> str | None:
    """Return an error message if ``reward.decided`` cannot end samples early, or its contract cannot hold, else None.

    mask_truncated: ``loss.mask_truncated``.
    plays_episodes: whether an environment or an agent makes the samples.
    """
    if reward.decided is None:
        return None
    by_length = "depends on a sample's whole length, so that no beginning of it decides that"
    # (the setting, whether it rules early ends out, the reason, the way out)
    ruled_out = (
        ("reward.functions=[]", not reward.functions, "there is no reward to be fixed", "name a reward function"),
        (
            f"reward.overlong_buffer_tokens={reward.overlong_buffer_tokens}",
            reward.overlong_buffer_tokens > 0,
            f"the penalty {by_length}",
            "set reward.overlong_buffer_tokens=0",
        ),
        (
            "loss.mask_truncated=true",
            mask_truncated,
            f"whether a sample is trained {by_length}",
            "set loss.mask_truncated=false",
        ),
        (
            "an environment or an agent",
            plays_episodes,
            "a response of several turns is not looked at",
            "set environment.name=null and rollout.endpoint.agent=null",
        ),
        (
            f"rollout.servers={quoted(list(rollout.servers))}",
            bool(rollout.servers),
            "a server answers with whole samples",
            "let the run start its engines (rollout.servers=[])",
        ),
        (
            "rollout.routing_replay=rollout",
            rollout.routing_replay == "rollout" and rollout.engine == "vllm",
            "vLLM gives the experts of whole samples alone",
            "set rollout.routing_replay=old_logprobs or off",
        ),
        (
            "rollout.bitwise=true",
            rollout.bitwise,
            "its engine looks at no running sample",
            "set rollout.bitwise=false",
        ),
    )
    for setting, rules_out, reason, way_out in ruled_out:
        if rules_out:
            return (
                f"reward.decided={quoted(reward.decided, 300)} ends samples early, which {setting} rules out: "
                f"{reason}; {way_out}, or set reward.decided=null"
            )
    return None
