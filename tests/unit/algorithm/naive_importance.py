"""Importance weights by a loop over tokens."""

import math

from megatron_rl.config import CORRECTIONS, CorrectionConfig

MODES = [mode for mode in CORRECTIONS if mode != "none"]


def naive_weight(mode: str, gaps: list[float], mask: list[bool], t: int, cap: float, floor: float | None) -> float:
    """Return one token's weight by semantics §7, in words. gaps: log π_old − log μ of the sample's response tokens."""
    counted = [d for d, m in zip(gaps, mask, strict=True) if m]
    if not mask[t]:
        return 0.0
    match mode.split("_")[0]:
        case "token":
            ratio = math.exp(gaps[t])
        case "sequence":
            ratio = math.exp(sum(counted))
        case "geometric":
            ratio = math.exp(sum(counted) / len(counted))
        case "none":
            return 1.0
    if mode.endswith("_mask"):
        return ratio if ratio <= cap and (floor is None or ratio >= floor) else 0.0
    return min(ratio, cap) if floor is None else max(min(ratio, cap), floor)


def naive_drop(advantage: float, gaps: list[float], mask: list[bool], delta: float | None) -> bool:
    """Say whether a sample is dropped by eq. 9 of DeepSeek-V3.2, at π_old."""
    counted = [-d for d, m in zip(gaps, mask, strict=True) if m]
    return delta is not None and advantage < 0 and bool(counted) and sum(counted) / len(counted) > delta


def naive(config: CorrectionConfig, advantages: list[float], gaps: list[list[float]],
          masks: list[list[bool]]) -> list[float]:
    found = []
    for advantage, d, m in zip(advantages, gaps, masks, strict=True):
        dropped = naive_drop(advantage, d, m, config.off_policy_delta)
        found += [0.0 if dropped else naive_weight(config.mode, d, m, t, config.cap, config.floor)
                  for t in range(len(d))]
    return found
