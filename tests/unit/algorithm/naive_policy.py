"""The policy's loss of one token, by its equations."""

from types import SimpleNamespace

from megatron_rl.config import LossConfig


def clipped_surrogate(ratio, advantage, config: LossConfig, *, dual: float | None):
    """Return −objective of a token by cases: its side of the clip, and whether that is the pessimistic one."""
    if advantage > 0 and ratio > 1 + config.clip_high:
        return -(1 + config.clip_high) * advantage
    if advantage < 0 and dual is not None and ratio > dual:
        return -dual * advantage
    if advantage < 0 and ratio < 1 - config.clip_low:
        return -(1 - config.clip_low) * advantage
    return -ratio * advantage


def token_loss(config: LossConfig, t: SimpleNamespace, logprobs: list, i: int):
    """Return the loss of token i by the equation of semantics §7, as an objective to be minimised."""
    ratio = (logprobs[i] - t.old_logprobs[i]).exp()
    match config.policy:
        case "ppo":
            return clipped_surrogate(ratio, t.advantages[i], config, dual=config.dual_clip)
        case "gspo":  # the sequence's own ratio, whole: arXiv:2507.18071, eq. 5 to 7
            mates = [j for j in range(len(logprobs)) if t.sequences[j] == t.sequences[i]]
            ratio = (sum(logprobs[j] - t.old_logprobs[j] for j in mates) / len(mates)).exp()
            return clipped_surrogate(ratio, t.advantages[i], config, dual=None)
        case "cispo":
            return -min(max(ratio.item(), 1 - config.clip_low), 1 + config.clip_high) * t.advantages[i] * logprobs[i]
        case "importance_sampling":
            return -ratio * t.advantages[i]
        case "dro":
            return (-logprobs[i] * t.advantages[i]
                    + t.weights[i] * config.dro_beta / 2 * (logprobs[i] - t.old_logprobs[i]) ** 2)
        case "reinforce":
            return -logprobs[i] * t.advantages[i]
    raise ValueError(config.policy)
