"""Importance weights π_old/μ, for the gap between the trainer's and the engine's log-probs (docs/semantics.md §7).

π_old (trainer) and μ (rollout engine) are one model at equal parameters, computed by different
kernels. Let d_t = log π_old(t) − log μ(t) at a sample's loss tokens. The raw weight ρ is e^{d_t}
(``token_*``), e^{Σ d_t} (``sequence_*``) or e^{mean d_t} (``geometric_*``). The last two give all
tokens of a sample the same weight. A weight within [``correction.floor``, ``correction.cap``] is
kept. What happens to a weight outside depends on the mode (here for the cap C; the floor is treated
alike):

- ``*_truncate`` moves ρ to the bound, min(ρ, C): truncated importance sampling. Yao et al. 2025,
  "Your efficient RL framework secretly brings you off-policy RL training"; Espeholt et al.,
  arXiv:1802.01561, §4.1.
- ``*_mask`` sets ρ to 0, ρ · 1[ρ ≤ C]. Per token this is IcePop (Ling team 2025, "Small leak can
  sink a great ship"), per sequence masked importance sampling (Liu, Li et al. 2025, "When speed
  kills stability").

Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556, eq. 9) drops sample i if and only if
A_i < 0 and mean_t(log μ − log π_old) > δ, in nats (``correction.off_policy_delta``). Here π_old
replaces the paper's π_θ, so that the mask is known before the forward pass. The two are equal at the
first step of a rollout.

The weights multiply the advantage alone, not the KL or the entropy
(``loss.kl_estimator=unbiased`` brings its own ratio). Pure numpy: equal arrays give equal weights.
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

    weights: float64 [T], ≥ 0 and finite; 0 at masked tokens, at tokens without loss, and in samples
        whose π_old is not known.
    capped: bool [T], True at tokens whose weight was moved to a bound.

    Example: ``token_mask`` with cap 2, ratios (1.5, 3.0) → weights (1.5, 0.0); ``token_truncate`` →
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
    """Return each token's importance weight by ``correction.mode``; 0 in samples that are too far off-policy.

    old_logprobs, rollout_logprobs: [T] flat, under the trainer's π_old and the engine's μ.
    loss_mask: bool [T], True at loss tokens.
    response_tokens: int64 [S], each at least 1.
    advantages: [S], one for each sample.
    decided: bool [S], True for samples whose π_old is known. All others get weight 0, and must not
        be trained.
    sample_ids: S names, for messages alone; empty: the index.

    Raises NonFiniteAdvantage, naming a sample, if the sum of log π_old − log μ over its loss tokens is NaN.
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
    """Return (weights [T], moved [T]): the raw weights e^log_ratio, bounded or masked, and which moved to a bound."""
    with np.errstate(over="ignore"):  # inf is above every cap
        ratio = np.exp(log_ratio)
    low = 0.0 if config.floor is None else config.floor
    outside = (ratio > config.cap) | (ratio < low)
    if config.mode.endswith("_mask"):
        return np.where(outside, 0.0, ratio), np.zeros_like(outside)
    return np.clip(ratio, low, config.cap), outside


def off_policy(advantages: np.ndarray, mean_gap: np.ndarray, delta: float) -> np.ndarray:
    """Return [S] bool, True for samples to mask: A_i < 0 and mean_t(log μ − log π_old) > δ.

    mean_gap: [S] nats, the mean over loss tokens of log π_old − log μ.
    """
    return (advantages < 0) & (-mean_gap > delta)


def correction_metrics(
    correction: Correction, loss_mask: np.ndarray, response_tokens: np.ndarray, signal: np.ndarray
) -> dict[str, float]:
    """Return {metric name: mean over loss tokens} for ``correction/*``; {} if ``signal`` marks no loss token.

    ``weight_mean`` counts masked tokens as 0.

    loss_mask, response_tokens: as in ``importance_weights``.
    signal: bool [S], True for the samples whose loss tokens are averaged. Their advantage, before
        importance weights, is not 0.
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
