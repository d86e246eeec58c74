"""Lists the figures of a run's report: the metrics that each draws, and its style.

observability/svg.py draws them, and observability/report.py makes the page.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Describes one line plot of the report.

    lines: (metrics key, legend label, colour) of each line; held-out values come with those before the first step.
    real_only: leaves out ghost steps, which have no gradient and no trained token: a zero would stand for a missing
        value.
    required: a figure that the metrics cannot fill is named on the page; any other is left out in silence.
    nonzero: a figure that is 0 throughout is left out too.
    """

    title: str
    lines: tuple[tuple[str, str, int], ...]
    subtitle: str
    unit: str = ""
    from_zero: bool = False
    share: bool = False
    spiky: bool = False
    filled: bool = False
    real_only: bool = False
    required: bool = True
    nonzero: bool = False


TIME_TITLE = "Step time"
RL_FIGURES = (
    Figure(title="Reward", lines=(("reward/mean", "reward", 1),), subtitle="mean over the samples of the step"),
    Figure(
        title="Zero-advantage ratio",
        lines=(("skip/zero_advantage_ratio", "without signal", 1),),
        subtitle="share of the mini-batch's samples without signal",
        share=True,
    ),
    Figure(
        title="Tokens: executed and dense",
        lines=(("skip/tokens_dense", "dense run", 7), ("skip/tokens_executed", "executed", 1)),
        subtitle="tokens per optimizer step",
        unit="tokens",
        from_zero=True,
        filled=True,
    ),
    Figure(
        title="Standard deviation of rewards",
        lines=(("reward/std", "standard deviation", 1),),
        subtitle="over the samples of the rollout",
        from_zero=True,
        required=False,
    ),
    Figure(
        title="Truncated responses",
        lines=(("rollout/truncated_share", "truncated", 1),),
        subtitle="share of the rollout's samples that were cut off",
        from_zero=True,
        required=False,
        nonzero=True,
    ),
    Figure(
        title="Gradient norm",
        lines=(("train/grad_norm", "gradient norm", 1),),
        subtitle="before clipping, real steps",
        from_zero=True,
        spiky=True,
        real_only=True,
    ),
    Figure(
        title="Reverse KL to the teacher",
        lines=(("distillation/reverse_kl", "reverse KL", 1),),
        subtitle="mean of log π − log π_T over the rollout's loss tokens, in nats",
        unit="nats",
        required=False,
    ),
    Figure(
        title="Entropy",
        lines=(("train/entropy", "entropy", 1),),
        subtitle="of the policy, per trained token, in nats",
        unit="nats",
        real_only=True,
    ),
    Figure(
        title="KL to the reference",
        lines=(("train/kl", "KL", 1),),
        subtitle="per trained token, in nats",
        unit="nats",
        required=False,
    ),
    Figure(
        title="Clipped tokens",
        lines=(("train/clip_ratio", "clipped", 1),),
        subtitle="share of the trained tokens at the clip",
        from_zero=True,
        real_only=True,
        required=False,
    ),
    Figure(
        title="Trainer and engine",
        lines=(("train/logprob_gap_mean", "mean |log π_old − log μ|", 1),),
        subtitle="gap of log-probabilities per token, in nats",
        unit="nats",
        from_zero=True,
        real_only=True,
        required=False,
    ),
    Figure(
        title="Staleness",
        lines=(("async/staleness_max", "oldest token", 1),),
        subtitle="optimizer steps between its weights and those it is trained on",
        from_zero=True,
        required=False,
        nonzero=True,
    ),
    Figure(
        title="Replayed groups",
        lines=(("replay/replaced", "replayed", 1),),
        subtitle="groups of the rollout that stood in for some without signal",
        from_zero=True,
        required=False,
        nonzero=True,
    ),
    Figure(
        title="Value loss",
        lines=(("critic/loss", "mean of the rollout's critic steps", 1),),
        subtitle="the critic's token sum",
        from_zero=True,
        spiky=True,
        required=False,
    ),
    Figure(
        title="Explained variance",
        lines=(("critic/explained_variance", "of the returns", 1),),
        subtitle="by the critic's values before each of its steps",
        required=False,
    ),
    Figure(
        title="KL coefficient",
        lines=(("train/kl_coefficient", "β", 1),),
        subtitle="that the step was trained with",
        from_zero=True,
        required=False,
        nonzero=True,
    ),
    Figure(
        title="Turns",
        lines=(("rollout/turns_mean", "turns", 1),),
        subtitle="of the policy in a sample",
        from_zero=True,
        required=False,
    ),
    Figure(
        title="Agents' sessions",
        lines=(("endpoint/failed", "failed", 7), ("endpoint/abandoned", "abandoned", 1)),
        subtitle="without a reward, per rollout: by an error, or in time",
        from_zero=True,
        required=False,
        nonzero=True,
    ),
)
SUPERVISED_FIGURES = (
    Figure(
        title="Loss",
        lines=(
            ("train/loss", "trained", 1),
            ("sft/eval_loss", "held out", 2),
            ("preference/eval_loss", "held out", 2),
        ),
        subtitle="mean over the step's loss tokens or pairs, in nats",
        unit="nats",
        spiky=True,
    ),
    Figure(
        title="Pairs told apart",
        lines=(("preference/accuracy", "trained", 1), ("preference/eval_accuracy", "held out", 2)),
        subtitle="share of pairs whose chosen response has the greater reward",
        share=True,
        required=False,
    ),
    Figure(
        title="Margin of pairs",
        lines=(("preference/margin", "trained", 1), ("preference/eval_margin", "held out", 2)),
        subtitle="mean of the chosen response's reward over the rejected one's",
        required=False,
    ),
    Figure(
        title="Rewards of pairs",
        lines=(("preference/chosen_reward", "chosen", 3), ("preference/rejected_reward", "rejected", 5)),
        subtitle="means of the margin's two terms",
        required=False,
    ),
    Figure(
        title="Log-probs of pairs",
        lines=(("preference/chosen_logprob", "chosen", 3), ("preference/rejected_logprob", "rejected", 5)),
        subtitle="means of a response's summed log-probs or its score",
        required=False,
    ),
    Figure(
        title="Learning rate",
        lines=(("train/lr", "rate", 1),),
        subtitle="of the step",
        from_zero=True,
        required=False,
    ),
    Figure(
        title="Tokens a second",
        lines=(("perf/tokens_per_second", "tokens a second", 1),),
        subtitle="of all ranks, over the whole step",
        unit="tokens/s",
        from_zero=True,
        required=False,
    ),
    Figure(
        title="Gradient norm",
        lines=(("train/grad_norm", "gradient norm", 1),),
        subtitle="before clipping, real steps",
        from_zero=True,
        spiky=True,
        real_only=True,
    ),
    Figure(
        title="Entropy",
        lines=(("train/entropy", "entropy", 1),),
        subtitle="of the policy, per trained token, in nats",
        unit="nats",
        real_only=True,
        required=False,
    ),
    Figure(
        title="Responses without signal",
        lines=(("skip/zero_advantage_ratio", "without signal", 1),),
        subtitle="share of the step's responses whose coefficient is 0",
        share=True,
        required=False,
        nonzero=True,
    ),
)
