"use strict";
// Lists the figures: the metrics that each draws, and its style.
//
// lines: [metric, label, colour] of each; held-out values come with those before the first step.
// realOnly: leaves out ghost steps, which have no gradient and no trained token: a zero would stand for a missing value.
// expected: a figure that the metrics cannot fill is named on the page; any other is left out in silence.
// nonzero: a figure that is 0 throughout is left out too.
// close: the axis need not begin at 0 if all values lie near each other.
// share: the axis is 0 to 1. spiky: it is logarithmic if the largest value is above 20 medians. filled: tinted below.

const RL_FIGURES = [
  { title: "Reward", lines: [["reward/mean", "reward", 1]], subtitle: "mean over the samples of the step", close: true, expected: true },
  {
    title: "Zero-advantage ratio", lines: [["skip/zero_advantage_ratio", "without signal", 1]],
    subtitle: "share of the mini-batch's samples without signal", share: true, expected: true,
  },
  {
    title: "Tokens: executed and dense", lines: [["skip/tokens_dense", "dense run", 7], ["skip/tokens_executed", "executed", 1]],
    subtitle: "tokens per optimizer step", unit: "tokens", filled: true, expected: true,
  },
  { title: "Standard deviation of rewards", lines: [["reward/std", "standard deviation", 1]], subtitle: "over the samples of the rollout" },
  {
    title: "Truncated responses", lines: [["rollout/truncated_share", "truncated", 1]],
    subtitle: "share of the rollout's samples that were cut off", nonzero: true,
  },
  {
    title: "Gradient norm", lines: [["train/grad_norm", "gradient norm", 1]],
    subtitle: "before clipping, real steps", spiky: true, realOnly: true, expected: true,
  },
  {
    title: "Reverse KL to the teacher", lines: [["distillation/reverse_kl", "reverse KL", 1]],
    subtitle: "mean of log π − log π_T over the rollout's loss tokens, in nats", unit: "nats", close: true,
  },
  {
    title: "Entropy", lines: [["train/entropy", "entropy", 1]],
    subtitle: "of the policy, per trained token, in nats", unit: "nats", close: true, realOnly: true, expected: true,
  },
  { title: "KL to the reference", lines: [["train/kl", "KL", 1]], subtitle: "per trained token, in nats", unit: "nats", close: true },
  { title: "Clipped tokens", lines: [["train/clip_ratio", "clipped", 1]], subtitle: "share of the trained tokens at the clip", realOnly: true },
  {
    title: "Trainer and engine", lines: [["train/logprob_gap_mean", "mean |log π_old − log μ|", 1]],
    subtitle: "gap of log-probabilities per token, in nats", unit: "nats", realOnly: true,
  },
  {
    title: "Staleness", lines: [["async/staleness_max", "oldest token", 1]],
    subtitle: "optimizer steps between its weights and those it is trained on", nonzero: true,
  },
  {
    title: "Replayed groups", lines: [["replay/replaced", "replayed", 1]],
    subtitle: "groups of the rollout that stood in for some without signal", nonzero: true,
  },
  {
    title: "Drafted tokens", lines: [["speculation/drafted", "drafted", 7], ["speculation/accepted", "accepted", 1]],
    subtitle: "tokens of the rollout that were drafted, and those its samples have", unit: "tokens", filled: true, nonzero: true,
  },
  {
    title: "Tokens a pass", lines: [["speculation/tokens_per_pass", "tokens a pass", 1]],
    subtitle: "of a sample in one forward pass of the engine; 1 without drafts",
  },
  {
    title: "Repeated answers", lines: [["rollout/repeat_share", "repeats", 1]],
    subtitle: "share of the rollout's samples that equal an earlier one of their group", nonzero: true,
  },
  {
    title: "Early ends", lines: [["rollout/decided_share", "ended early", 1]],
    subtitle: "share of the rollout's samples that reward.decided ended", nonzero: true,
  },
  { title: "Value loss", lines: [["critic/loss", "mean of the rollout's critic steps", 1]], subtitle: "the critic's token sum", spiky: true },
  {
    title: "Explained variance", lines: [["critic/explained_variance", "of the returns", 1]],
    subtitle: "by the critic's values before each of its steps",
  },
  { title: "KL coefficient", lines: [["train/kl_coefficient", "β", 1]], subtitle: "that the step was trained with", nonzero: true },
  { title: "Turns", lines: [["rollout/turns_mean", "turns", 1]], subtitle: "of the policy in a sample" },
  {
    title: "Agents' sessions", lines: [["endpoint/failed", "failed", 7], ["endpoint/abandoned", "abandoned", 1]],
    subtitle: "without a reward, per rollout: by an error, or in time", nonzero: true,
  },
];

const SUPERVISED_FIGURES = [
  {
    title: "Loss", lines: [["train/loss", "trained", 1], ["sft/eval_loss", "held out", 2], ["preference/eval_loss", "held out", 2]],
    subtitle: "mean over the step's loss tokens or pairs, in nats", unit: "nats", spiky: true, close: true, expected: true,
  },
  {
    title: "Pairs told apart", lines: [["preference/accuracy", "trained", 1], ["preference/eval_accuracy", "held out", 2]],
    subtitle: "share of pairs whose chosen response has the greater reward", share: true,
  },
  {
    title: "Margin of pairs", lines: [["preference/margin", "trained", 1], ["preference/eval_margin", "held out", 2]],
    subtitle: "mean of the chosen response's reward over the rejected one's",
  },
  {
    title: "Rewards of pairs", lines: [["preference/chosen_reward", "chosen", 3], ["preference/rejected_reward", "rejected", 5]],
    subtitle: "means of the margin's two terms",
  },
  {
    title: "Log-probs of pairs", lines: [["preference/chosen_logprob", "chosen", 3], ["preference/rejected_logprob", "rejected", 5]],
    subtitle: "means of a response's summed log-probs or its score",
  },
  { title: "Learning rate", lines: [["train/lr", "rate", 1]], subtitle: "of the step" },
  {
    title: "Tokens a second", lines: [["perf/tokens_per_second", "tokens a second", 1]],
    subtitle: "of all ranks, over the whole step", unit: "tokens/s",
  },
  {
    title: "Gradient norm", lines: [["train/grad_norm", "gradient norm", 1]],
    subtitle: "before clipping, real steps", spiky: true, realOnly: true, expected: true,
  },
  {
    title: "Entropy", lines: [["train/entropy", "entropy", 1]],
    subtitle: "of the policy, per trained token, in nats", unit: "nats", close: true, realOnly: true,
  },
  {
    title: "Responses without signal", lines: [["skip/zero_advantage_ratio", "without signal", 1]],
    subtitle: "share of the step's responses whose coefficient is 0", share: true, nonzero: true,
  },
];

// Drawn below the others, under their own names.
const RL_MORE = [
  "train/loss", "train/lr", "rollout/tokens", "rollout/weight_version_min", "skip/speedup_ideal",
  "perf/dense_equivalent_tokens_per_second", "perf/rollout_tokens_per_second", "perf/rollout_wait_share",
];
const MORE = ["perf/mfu", "perf/peak_memory_bytes"];
const isMore = (name) => /^async\/|engine|replica/.test(name);
const TIME_TITLE = "Step time";
const TIME_PARTS = ["rollout", "reward", "logprob", "update", "weight_sync", "critic"];
const SPREAD = ["min", "p25", "median", "p75", "max"];
const EVALUATION_COLOURS = [3, 1, 2, 4, 5, 6]; // the mean first, then pass@1, pass@2, ...
const GREY = 7;
