"""Importance weights of the trainer's π_old over the engine's policy μ at equal weights, and their masks. Semantics §7.

With d_t = log π_old(t) − log μ(t) over a sample's loss tokens, the raw weight ρ is e^{d_t}
(``token_*``), e^{Σ d_t} (``sequence_*``) or e^{mean d_t} (``geometric_*``), the same for every
token of the sample in the latter two. A weight within [floor, cap] is kept. Outside,

- ``*_truncate`` moves it to the bound: min(ρ, C), as truncated importance sampling (Yao et al.
  2025, "Your efficient RL framework secretly brings you off-policy RL training"; Espeholt et al.,
  arXiv:1802.01561, §4.1);
- ``*_mask`` sets it to 0: ρ · 1[ρ ≤ C], as IcePop (Ling team 2025, "Small leak can sink a great
  ship") per token and masked importance sampling (Liu, Li et al. 2025, "When speed kills
  stability") per sequence. It is never clamped back to a bound.

Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556, eq. 9) drops sample i iff A_i < 0 and
mean_t(log μ − log π_old) > δ, in nats: π_old for the paper's π_θ, so that it is known before the
forward; the two are equal at the first step of a rollout.

The weights multiply the advantage and nothing else: KL and entropy keep their own
(``loss.kl_estimator=unbiased`` holds its ratio itself). Pure numpy: the same arrays give the same
weights, and no denominator is counted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.algorithm.finite import sample_name
from megatron_rl.algorithm.flat import sum_per_sample, token_owner
from megatron_rl.config import CorrectionConfig
from megatron_rl.errors import NonFiniteAdvantage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Correction:
    """Holds the importance weights, flat over the batch's response tokens [T] (see BatchFacts.response_offsets).

    weights: float64 [T], ≥ 0 and finite; 0 where masked, where a token carries no loss, and in
        samples not decided on.
    capped: bool [T], True where a weight was moved to a bound.

    Example: ``token_mask`` at C = 2, ratios (1.5, 3.0) → weights (1.5, 0.0); ``token_truncate`` →
    (1.5, 2.0), capped (F, T).
    """

    weights: np.ndarray
    capped: np.ndarray


def importance_weights(
    old_logprobs: np.ndarray,
    rollout_logprobs: np.ndarray,
    loss_mask: np.ndarray,
    response_tokens: np.ndarray,
    advantages: np.ndarray,
    decided: np.ndarray,
    config: CorrectionConfig,
    *,
    sample_ids: Sequence[str] = (),
) -> Correction:
    """Return the weights by ``correction.mode``, with the samples masked that are too far off-policy.

    old_logprobs, rollout_logprobs: [T] flat, under the trainer's π_old and the engine's μ.
    loss_mask: bool [T], True at loss tokens.
    response_tokens: int64 [S], each at least 1.
    advantages: [S], one for each sample.
    decided: bool [S], True where π_old is known; the other samples have weight 0, and must not be
        trained.
    sample_ids: S names, for messages alone; empty: the index.

    Raises NonFiniteAdvantage, naming a sample, where d_t or its sum is NaN.
    """
    # d_t of each loss token, its sum and its mean per sample.
    owner = token_owner(response_tokens)
    counted = loss_mask & decided[owner]
    gap = np.zeros(len(owner))
    with np.errstate(invalid="ignore"):  # −inf − −inf, named below
        np.subtract(old_logprobs, rollout_logprobs, out=gap, where=counted, dtype=np.float64)
    tokens, total = sum_per_sample(counted, response_tokens), sum_per_sample(gap, response_tokens)
    bad = np.flatnonzero(np.isnan(total))
    if len(bad):
        raise NonFiniteAdvantage(
            f"Σ (log π_old − log μ) of sample {sample_name(sample_ids, bad[0])} is NaN ({len(bad)} such samples in the "
            "batch), and so would its weight be; look for non-finite log-probs of the engine or of the trainer"
        )
    mean = total / np.maximum(tokens, 1)
    # The raw weights' logarithms, bounded or masked.
    log_ratio = {"token": gap, "sequence": total[owner], "geometric": mean[owner], "none": np.zeros(len(owner))}[
        config.mode.split("_")[0]
    ]
    weights, capped = _bounded(log_ratio, config)
    weighted = counted
    if config.off_policy_delta is not None:
        weighted = counted & ~off_policy(advantages, mean, config.off_policy_delta)[owner]
    weights = np.where(weighted, weights, 0.0)
    return Correction(weights=weights, capped=capped & weighted)


def _bounded(log_ratio: np.ndarray, config: CorrectionConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return (weights, whether each was moved to a bound) of the raw weights e^log_ratio."""
    with np.errstate(over="ignore"):  # inf is above every cap
        ratio = np.exp(log_ratio)
    low = 0.0 if config.floor is None else config.floor
    outside = (ratio > config.cap) | (ratio < low)
    if config.mode.endswith("_mask"):
        return np.where(outside, 0.0, ratio), np.zeros_like(outside)
    return np.clip(ratio, low, config.cap), outside


def off_policy(advantages: np.ndarray, mean_gap: np.ndarray, delta: float) -> np.ndarray:
    """Return [S] bool: A_i < 0 and mean_t(log μ − log π_old) > δ.

    mean_gap: [S] nats, the mean over loss tokens of log π_old − log μ.
    """
    return (advantages < 0) & (-mean_gap > delta)


def correction_metrics(
    correction: Correction, loss_mask: np.ndarray, response_tokens: np.ndarray, signal: np.ndarray
) -> dict[str, float]:
    """Return the metrics ``correction/*`` over the loss tokens of the samples that have signal by advantage.

    ``weight_mean`` counts masked tokens as 0. Returns {} where no such token exists.

    signal: bool [S], by the advantages before the weights.
    """
    measured = loss_mask & np.repeat(signal, response_tokens)
    count = int(measured.sum())
    if count == 0:
        return {}

    def mean(values: np.ndarray) -> float:
        return float(values[measured].sum()) / count

    return {
        "correction/weight_mean": mean(correction.weights),
        "correction/masked_share": mean(correction.weights == 0),
        "correction/capped_share": mean(correction.capped),
    }
