"""Pairs of samples, and the losses of pairs, each written out by its paper's equation for one pair, in plain torch."""

import dataclasses

import numpy as np
import torch

from megatron_rl.algorithm.signal import SignalRule
from megatron_rl.config import PreferenceConfig
from megatron_rl.types import Sample
from tests.reference import make_samples

RULE = SignalRule(drops=True, advantage_epsilon=0.0, drops_logprob_passes=True, approximated=(), kl_in_reward=False)


def naive_loss(
    config: PreferenceConfig,
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    chosen_reference: float,
    rejected_reference: float,
    chosen_tokens: int,
    rejected_tokens: int,
) -> torch.Tensor:
    """Return the loss of one pair of summed log-probs (``bradley_terry``: of scores), from probabilities and logs."""
    beta, gamma, smoothing = config.beta, config.margin, config.label_smoothing
    match config.loss:
        case "dpo":
            difference = beta * (chosen - chosen_reference) - beta * (rejected - rejected_reference) - gamma
        case "simpo":
            difference = beta / chosen_tokens * chosen - beta / rejected_tokens * rejected - gamma
        case "bradley_terry":
            return torch.log(1 + torch.exp(-(chosen - rejected - gamma)))
        case "hinge":
            margin = beta * (chosen - chosen_reference) - beta * (rejected - rejected_reference)
            return 1 - margin if margin < 1 else 0.0 * margin
        case "ipo":
            h = (chosen - chosen_reference) / chosen_tokens - (rejected - rejected_reference) / rejected_tokens
            return (h - 1 / (2 * beta)) ** 2
    right, wrong = torch.sigmoid(difference), torch.sigmoid(-difference)
    return -(1 - smoothing) * torch.log(right) - smoothing * torch.log(wrong)


def pairs_of_one_prompt(count: int) -> list[Sample]:
    """Return ragged samples of which two in a row have one prompt, as the halves of a pair do."""
    samples = make_samples(count)
    for i in range(1, count, 2):
        first, own = samples[i - 1], samples[i]
        tokens = np.concatenate([first.token_ids[: first.prompt_tokens], own.token_ids[own.prompt_tokens :]])
        samples[i] = dataclasses.replace(own, prompt_tokens=first.prompt_tokens, token_ids=tokens)
    return samples
