"""Equal samples of an optimizer step, of which one runs and counts as often as there are (docs/semantics.md §1).

The loss is a sum over tokens. Two samples of a group that are equal in their tokens, loss masks,
advantages, and whatever else the loss reads of them, have equal terms in it. One of them with twice
the weight gives the same loss and gradient, up to float rounding. A group of low entropy has many
such samples.

Invariants (``assert_invariants`` in tests/unit/algorithm/test_repeats.py):

1. A sample's stand-in is in its mini-batch and its group, equals it, and is its own stand-in.
2. A sample without signal is its own stand-in.
3. Copies add up to the number of samples with signal, in each mini-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_rl.config import Config
from megatron_rl.types import Advantages, BatchFacts
from megatron_rl.users_code import is_own


def reads_engine_logprobs(config: Config) -> bool:
    """Return whether the loss of a sample may depend on the engine's log-probs.

    Two engines' passes over equal samples round differently. Where the loss does not read the
    result, samples that differ in it alone are equal.
    """
    return bool(
        config.correction.is_on
        or config.correction.old_logprobs == "rollout"
        or config.loss.policy == "dro"
        or is_own(config.loss.policy)
        or (config.replay.capacity_groups and not config.replay.recompute_logprobs)
        or config.rollout.bitwise
    )


def stand_ins(
    facts: BatchFacts, advantages: Advantages, signal: np.ndarray, mini_batches: Sequence[np.ndarray]
) -> np.ndarray:
    """Return int64 [S]: for each sample the first equal one of its mini-batch, which runs in its place.

    A sample that equals none before it has itself. Samples are equal if their ``sample_keys`` and
    the bits of their advantages are. Groups are told apart, since ``loss.reduction`` may weigh them
    differently.

    signal: bool [S], the samples that train. Others are not replaced.
    mini_batches: the members of each optimizer step.

    Example: four samples with signal, of which 0, 1 and 3 are equal: (0, 0, 2, 0).
    """
    found = np.arange(facts.num_samples)
    if facts.sample_keys is None:
        return found
    offsets, of_token = facts.response_offsets.tolist(), advantages.of_token
    for members in mini_batches:
        first: dict[tuple[int | bytes, ...], int] = {}
        for sample in members[signal[members]].tolist():
            own = advantages.of_sample[sample].tobytes()
            if of_token is not None:
                own += of_token[offsets[sample] : offsets[sample + 1]].tobytes()
            key = int(facts.groups[sample]), int(facts.sample_keys[sample]), own
            found[sample] = first.setdefault(key, sample)
    return found


def copies_of(stand_in: np.ndarray, signal: np.ndarray) -> np.ndarray:
    """Return int64 [S]: for how many samples with signal each sample stands; 0 for one that another stands for.

    stand_in: the result of ``stand_ins``.
    signal: bool [S], the samples that train.

    Example: stand-ins (0, 0, 2, 0), signal (T, T, F, T): (3, 0, 0, 0).
    """
    return np.bincount(stand_in[signal], minlength=len(stand_in))


def given_to_repeats(flat: np.ndarray, stand_in: np.ndarray, facts: BatchFacts) -> np.ndarray:
    """Return ``flat`` with each sample's numbers replaced by those of its stand-in.

    flat: [T], one number for each response token, sample after sample.
    """
    repeats = np.flatnonzero(stand_in != np.arange(len(stand_in)))
    if not len(repeats):
        return flat
    result, offsets = flat.copy(), facts.response_offsets
    for sample in repeats:
        source = stand_in[sample]
        result[offsets[sample] : offsets[sample + 1]] = flat[offsets[source] : offsets[source + 1]]
    return result
