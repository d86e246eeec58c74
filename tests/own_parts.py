"""Policy losses and estimators for tests, by dotted path: ``tests.own_parts:<name>``."""

from dataclasses import replace

import numpy as np
import torch

from megatron_rl.algorithm.policy_loss import PolicyTerm

# --- policy losses; each but the first two and `waits` breaks one property


def clipped(tokens, low=0.2, high=0.2):
    """Return the loss of ``loss.policy=ppo``."""
    ratio = (tokens.logprobs - tokens.old_logprobs).exp()
    bounded = ratio.clamp(1 - low, 1 + high)
    return -torch.minimum(ratio * tokens.advantages, bounded * tokens.advantages)


def by_sequence(tokens, low=0.2, high=0.2):
    """Return the term of ``loss.policy=gspo``, as docs/your-own.md shows it."""
    change = tokens.logprobs - tokens.old_logprobs
    terms = torch.stack([change.detach(), torch.ones_like(change)])
    sums = change.new_zeros(2, tokens.num_sequences).index_add_(1, tokens.sequences, terms.detach())
    total, count = tokens.complete_sums(sums)
    ratio = (total / count.clamp(min=1)).exp()[tokens.sequences] * (tokens.logprobs - tokens.logprobs.detach()).exp()
    plain, bounded = ratio * tokens.advantages, ratio.clamp(1 - low, 1 + high) * tokens.advantages
    return PolicyTerm(loss=-torch.minimum(plain, bounded), ratio=ratio, clipped=bounded < plain)


def by_part_of_a_sequence(tokens):
    return by_sequence(replace(tokens, complete_sums=lambda sums: sums))


def waits(tokens):
    """Return ``clipped``, and ask the device for one number."""
    tokens.logprobs.sum().item()
    return clipped(tokens)


def quadratic(tokens):
    difference = tokens.logprobs - tokens.rollout_logprobs
    return -tokens.logprobs * tokens.advantages + tokens.weights * difference**2


def without_weight(tokens):
    return -tokens.logprobs * tokens.advantages * tokens.advantages.abs()


def mean(tokens):
    return (-tokens.logprobs * tokens.advantages).mean()


def per_microbatch(tokens):
    return -tokens.logprobs * tokens.advantages / max(len(tokens.logprobs), 1)


def random(tokens):
    return -tokens.logprobs * tokens.advantages * torch.rand_like(tokens.logprobs)


def in_place(tokens):
    tokens.advantages.mul_(0.5)
    return -tokens.logprobs * tokens.advantages


def without_gradient(tokens):
    return -tokens.logprobs.detach() * tokens.advantages


def empty(tokens):
    return -tokens.logprobs * tokens.advantages / tokens.advantages.abs().max()


def overflows(tokens):
    return -(1000 + tokens.logprobs).exp() * tokens.advantages


def misspelt(tokens):
    return tokens.advantage


# --- estimators; each but the first two breaks one property


def centred(rewards, scale=1.0):
    """Return r − mean_g, exactly 0 for equal rewards."""
    values = np.zeros(len(rewards.totals))
    for group in np.unique(rewards.groups):
        members = (rewards.groups == group) & rewards.included
        found = rewards.totals[members]
        if len(found) and found.max() > found.min():
            values[members] = scale * (found - found.mean())
    return values


def by_batch(rewards):
    """Return r − the batch's mean, by which a group of equal rewards moves too: it has to say so."""
    mean = rewards.totals[rewards.included].mean()
    return np.where(rewards.included, np.nan_to_num(rewards.totals) - mean, 0.0)


def moves_what_is_out(rewards):
    return centred(rewards) + ~rewards.included


def reads_what_is_out(rewards):
    top = np.nan_to_num(rewards.totals).max()
    return centred(rewards) * top


def by_place(rewards):
    return centred(rewards) * np.arange(1, len(rewards.totals) + 1)


def divides_by_nothing(rewards):
    with np.errstate(all="ignore"):
        return centred(rewards) / (rewards.groups - 3.0)


def too_few(rewards):
    return centred(rewards)[1:]


def words(rewards):
    return ["a"] * len(rewards.totals)


def fails(rewards):
    raise KeyError("no such group")
