"""The table from names in metrics.jsonl to names of Prometheus metrics.

A metric that is not in the table is not served, so that no row can add a time series to Prometheus.
Names follow Prometheus' practice (prometheus.io/docs/practices/naming): base units, ``_total`` for
counters, ``_ratio`` for shares from 0 to 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

PREFIX = "megatron_rl_"
STAGES = (
    *("start", "rollout", "reward", "plan", "logprob", "teacher", "critic", "update", "weight_sync", "eval"),
    *("checkpoint", "export", "loss", "environment", "between"),
)
OTHER_STAGE = "other"  # label of any stage that is not in STAGES


class Kind(Enum):
    """Says how a metric is computed from the rows of metrics.jsonl.

    GAUGE: the last value.
    SUM: a counter, the sum of all values.
    SO_FAR: a counter, the last value, which is itself a count.
    """

    GAUGE = "gauge"
    SUM = "sum"
    SO_FAR = "so far"


@dataclass(frozen=True, slots=True)
class Served:
    """Names a metric that Prometheus gets.

    key: the metric's name in metrics.jsonl.
    name: its name for Prometheus, without PREFIX and, for a counter, without ``_total``.
    help: its help line.
    """

    key: str
    name: str
    help: str
    kind: Kind = Kind.GAUGE

    @property
    def full_name(self) -> str:
        """Return the metric's name as Prometheus shows it."""
        return f"{PREFIX}{self.name}{'' if self.kind is Kind.GAUGE else '_total'}"


TABLE = (
    Served("step", "step", "Number of the last optimizer step, supervised steps included."),
    Served("weight_version", "weight_version", "Version of the trainer's weights after the last step."),
    Served("rollout", "rollouts", "Rollouts that a step was taken on.", Kind.SO_FAR),
    Served("train/loss", "loss", "Loss of the last step: the sum over its tokens, weights inside."),
    Served("train/grad_norm", "gradient_norm", "Global gradient norm of the last step before clipping."),
    Served("train/lr", "learning_rate", "Learning rate of the last step."),
    Served("train/applied", "steps_applied", "Optimizer steps that moved the weights.", Kind.SUM),
    Served("train/entropy", "entropy_nats", "Entropy per trained token of the last step."),
    Served("train/kl", "kl_nats", "KL to the reference policy per trained token of the last step."),
    Served("train/kl_coefficient", "kl_coefficient", "Coefficient of the KL in the last step."),
    Served("train/clip_ratio", "clip_ratio", "Share of the last step's tokens that the policy loss clipped."),
    Served("train/ratio", "importance_ratio", "Mean of new over old probability in the last step."),
    Served("train/rerouted_token_share", "rerouted_token_ratio", "Share of replayed tokens with other experts."),
    Served("train/logprob_gap_mean", "logprob_gap_mean_nats", "Mean gap of log-probs, trainer against engine."),
    Served("train/logprob_gap_max", "logprob_gap_max_nats", "Largest gap of log-probs, trainer against engine."),
    Served("train/logprob_gap_k3", "logprob_gap_kl_nats", "KL of engine and trainer, by the k3 estimate."),
    Served("logprob/coverage", "logprob_coverage_ratio", "Share of samples whose log-probs were computed anew."),
    Served("correction/weight_mean", "correction_weight_mean", "Mean importance weight of a rollout's tokens."),
    Served("correction/masked_share", "correction_masked_ratio", "Share of tokens with an importance weight of 0."),
    Served("correction/capped_share", "correction_capped_ratio", "Share of tokens with a weight at a bound."),
    Served("correction/masked_samples", "correction_masked_samples", "Samples whose tokens all weigh 0.", Kind.SUM),
    Served("skip/zero_advantage_ratio", "zero_advantage_ratio", "Share of the last step's samples without signal."),
    Served("skip/samples_dropped", "samples_dropped", "Samples that the skip dropped.", Kind.SUM),
    Served("skip/samples_merged", "samples_merged", "Samples for which an equal one of their group ran.", Kind.SUM),
    Served("skip/tokens_dropped", "tokens_dropped", "Tokens that the skip dropped.", Kind.SUM),
    Served("skip/microbatches_dropped", "microbatches_dropped", "Micro-batches that the skip dropped.", Kind.SUM),
    Served("skip/tokens_executed", "tokens_executed", "Tokens that ran in updates.", Kind.SUM),
    Served("skip/tokens_dense", "tokens_dense", "Tokens that a dense run's updates would run.", Kind.SUM),
    Served("skip/speedup_ideal", "skip_speedup_ideal", "Dense over surviving tokens of the last step that had any."),
    Served("skip/silent_ranks", "silent_ranks", "Data-parallel ranks without a micro-batch in the last step."),
    Served("skip/ghost_steps", "unreal_steps", "Optimizer steps that were ghosts or held.", Kind.SO_FAR),
    Served("skip/filler_microbatches", "filler_microbatches", "Micro-batches that train nothing.", Kind.SUM),
    Served("tokens/trailing", "tokens_trailing", "Tokens behind the last loss token, which did not run.", Kind.SUM),
    Served("tokens/shared", "tokens_shared", "Prompt tokens that did not run again.", Kind.SUM),
    Served("cost/overhead_s", "microbatch_overhead_seconds", "Fitted fixed cost of a micro-batch."),
    Served("cost/token_s", "token_cost_seconds", "Fitted cost of a token."),
    Served("cost/square_s", "square_cost_seconds", "Fitted cost per squared length of a sequence."),
    Served("cost/predicted_s", "predicted_update_seconds", "Predicted forward and backward of the last step."),
    Served("reward/mean", "reward_mean", "Mean total reward of the last rollout."),
    Served("reward/std", "reward_stddev", "Standard deviation of the last rollout's rewards."),
    Served("reward/min", "reward_min", "Least total reward of the last rollout."),
    Served("reward/p25", "reward_p25", "First quartile of the last rollout's rewards."),
    Served("reward/median", "reward_median", "Median of the last rollout's rewards."),
    Served("reward/p75", "reward_p75", "Third quartile of the last rollout's rewards."),
    Served("reward/max", "reward_max", "Largest total reward of the last rollout."),
    Served("reward/excluded", "samples_excluded", "Samples that were taken out of their groups.", Kind.SUM),
    Served("reward/errors", "reward_errors", "Samples on which a reward function failed.", Kind.SUM),
    Served("reward/error_share", "reward_error_ratio", "Share of the last rollout's samples whose reward failed."),
    Served("reward/retried", "samples_retried", "Failed samples that were sampled again.", Kind.SUM),
    Served("reward/retry_failed", "samples_retry_failed", "Samples that failed in their last retry.", Kind.SUM),
    Served("reward/kl_penalty", "reward_kl_penalty", "Mean KL penalty in the last rollout's rewards."),
    Served("reward/overlong_penalty", "reward_overlong_penalty", "Mean overlong penalty of the last rollout."),
    Served("distillation/reverse_kl", "distillation_reverse_kl_nats", "Mean log-ratio of policy and teacher."),
    Served("critic/loss", "critic_loss", "Mean loss of the last rollout's critic steps."),
    Served("critic/grad_norm", "critic_gradient_norm", "Largest gradient norm of these critic steps."),
    Served("critic/lr", "critic_learning_rate", "Learning rate of the critic."),
    Served("critic/steps", "critic_steps", "Steps of the critic.", Kind.SUM),
    Served("critic/applied", "critic_steps_applied", "Steps of the critic that moved it.", Kind.SUM),
    Served("critic/value_mean", "critic_value_mean", "Mean value over the critic's loss tokens."),
    Served("critic/return_mean", "critic_return_mean", "Mean return over the critic's loss tokens."),
    Served("critic/clip_ratio", "critic_clip_ratio", "Share of loss tokens whose value was clipped."),
    Served("critic/explained_variance", "critic_explained_variance", "Variance of returns that values explain."),
    Served("sft/eval_loss", "sft_eval_loss", "Loss per token of held-out solutions."),
    Served("sft/eval_tokens", "sft_eval_tokens", "Loss tokens of the held-out solutions."),
    Served("perf/tokens_per_second", "supervised_tokens_per_second", "Tokens a second of the last supervised step."),
    Served(
        "perf/dense_equivalent_tokens_per_second",
        "dense_equivalent_tokens_per_second",
        "Tokens of the dense update a second of the last step.",
    ),
    Served("perf/mfu", "mfu_ratio", "Executed FLOPs over the GPUs' peak in the last update."),
    Served("perf/peak_memory_bytes", "peak_memory_bytes", "Most device memory of the first rank."),
    Served("perf/update_peak_memory_bytes", "update_peak_memory_bytes", "The same while training."),
    Served("perf/weight_sync_peak_memory_bytes", "weight_sync_peak_memory_bytes", "The same while sending weights."),
    Served("perf/rollout_peak_memory_bytes", "rollout_peak_memory_bytes", "The same during rollouts."),
    Served("perf/rollout_tokens_per_second", "rollout_tokens_per_second", "Sampled tokens a second, last rollout."),
    Served("perf/rollout_wait_share", "rollout_wait_ratio", "Share of the time that the trainer waited for rollouts."),
    Served("perf/rollout_generation_s", "rollout_generation_seconds", "Seconds that engines generated.", Kind.SUM),
    Served("perf/rollout_tail_s", "rollout_tail_seconds", "Seconds for the last quarter of the last rollout's groups."),
    Served("perf/weight_sync_bytes", "weight_sync_bytes", "Bytes of the last weight sync."),
    Served("perf/weight_sync_bytes_per_second", "weight_sync_bytes_per_second", "Speed of the last weight sync."),
    Served("perf/weight_sync_sent_bytes", "weight_sync_sent_bytes", "Most bytes that the last sync sent an engine."),
    Served("perf/weight_sync_changed_share", "weight_sync_changed_ratio", "Share of the elements that had changed."),
    Served("speculation/drafted", "speculation_drafted_tokens", "Tokens that were drafted.", Kind.SUM),
    Served("speculation/accepted", "speculation_accepted_tokens", "Drafted tokens that were accepted.", Kind.SUM),
    Served("speculation/passes", "speculation_passes", "Forward passes, once for each sample in it.", Kind.SUM),
    Served("speculation/tokens_per_pass", "speculation_tokens_per_pass", "Mean tokens that a pass gives a sample."),
    Served("rollout/tokens", "rollout_tokens", "Tokens that were sampled.", Kind.SUM),
    Served("rollout/truncated_share", "rollout_truncated_ratio", "Share of the last rollout's samples cut off."),
    Served("rollout/decided_share", "rollout_decided_ratio", "Share of the last rollout's samples that ended early."),
    Served("rollout/repeat_share", "rollout_repeat_ratio", "Share of the last rollout's samples that repeat another."),
    Served("rollout/turns_mean", "rollout_turns_mean", "Mean turns of the last rollout's samples."),
    Served("rollout/response_tokens_mean", "rollout_response_tokens_mean", "Mean response of the last rollout."),
    Served("rollout/weight_version_min", "rollout_weight_version_min", "Oldest weights of a token trained last."),
    Served("rollout/masked_truncated", "samples_masked_truncated", "Cut-off samples without loss.", Kind.SUM),
    Served("async/staleness_max", "staleness_max_steps", "Steps between the oldest token's weights and its training."),
    Served("async/dropped_stale", "groups_dropped_stale", "Groups that were too old and asked again.", Kind.SUM),
    Served("groups/samples_mean", "group_samples_mean", "Mean samples of the last rollout's groups."),
    Served("groups/samples_min", "group_samples_min", "Samples of the last rollout's smallest group."),
    Served("groups/samples_max", "group_samples_max", "Samples of the last rollout's largest group."),
    Served("groups/known", "groups_known", "Prompts with a memory among those dealt samples last."),
    Served("async/stragglers", "straggler_groups", "Groups that join the next rollout."),
    Served("replay/size", "replay_groups", "Groups in the replay buffer."),
    Served("replay/replaced", "replay_replaced_groups", "Groups that were replayed.", Kind.SUM),
    Served("replay/age_max", "replay_age_max_steps", "Age of the oldest group replayed last, in weight versions."),
    Served("reroll/size", "reroll_prompts", "Prompts that wait to be asked again."),
    Served("reroll/buffered", "reroll_buffered_prompts", "Prompts that began to wait.", Kind.SO_FAR),
    Served("reroll/issued", "reroll_issued_prompts", "Prompts that were asked again.", Kind.SO_FAR),
    Served("dynamic_sampling/rounds", "dynamic_sampling_rounds", "Rounds of asking further prompts.", Kind.SUM),
    Served("dynamic_sampling/left", "dynamic_sampling_left_groups", "Groups without signal after the last rounds."),
    *(
        Served(f"preference/{part}{name}", f"preference_{part}{name}{unit}", f"{words}{', held out' if part else ''}.")
        for part in ("", "eval_")
        for name, unit, words in (
            ("loss", "", "Mean loss of the last step's pairs"),
            ("accuracy", "_ratio", "Share of pairs told apart"),
            ("margin", "", "Mean margin of the pairs"),
            ("chosen_reward", "", "Mean reward of the chosen responses"),
            ("rejected_reward", "", "Mean reward of the rejected responses"),
            ("chosen_logprob", "_nats", "Mean log-prob of the chosen responses"),
            ("rejected_logprob", "_nats", "Mean log-prob of the rejected responses"),
        )
    ),
    *(
        Served(f"endpoint/{name}", f"endpoint_{name}", f"{words}.", Kind.SUM)
        for name, words in (
            ("sessions", "Sessions of agents that began"),
            ("failed", "Sessions that failed"),
            ("abandoned", "Sessions without a reward in time"),
            ("lost", "Sessions lost with their engine"),
            ("limited", "Sessions that met a limit"),
            ("untrained_branches", "Branches beside the trained ones"),
            ("late_requests", "Requests after their session's end"),
            ("late_answers", "Answers after their session's end"),
            ("late_rewards", "Rewards after their session's end"),
            ("unsampled_requests", "Requests that the engine could not sample"),
            ("unknown_sessions", "Requests to sessions that never were"),
        )
    ),
)
BY_KEY = {each.key: each for each in TABLE}
EVAL = {  # the name and the help for each <key> of eval/<set>/<key>
    "mean": ("eval_reward_mean", "Mean total reward of an evaluation set, over k samples of each prompt."),
    "mean_se": ("eval_reward_mean_stderr", "Standard error of that mean."),
    "pass": ("eval_pass_ratio", "Chance that one of k samples passes."),
    "response_tokens_mean": ("eval_response_tokens_mean", "Mean response of an evaluation set."),
    "truncated_share": ("eval_truncated_ratio", "Share of an evaluation set's samples that were cut off."),
    "excluded": ("eval_excluded_samples", "Samples of an evaluation set without a total."),
    "errors": ("eval_reward_errors", "Samples of an evaluation set whose reward failed."),
    "error_share": ("eval_reward_error_ratio", "Their share."),
}
EVAL_FUNCTION = ("eval_function_reward_mean", "Mean of one reward function over an evaluation set.")
FUNCTION = ("function_reward_mean", "Mean of one reward function over the last rollout.")


def stage_label(stage: str) -> str:
    """Return the label that STAGES has for a stage of the timer; OTHER_STAGE if it has none.

    Example: ``stage_label("between stages")`` is ``"between"``.
    """
    name = "between" if stage == "between stages" else stage
    return name if name in STAGES else OTHER_STAGE
