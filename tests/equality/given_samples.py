"""Fixed samples for the tests over whole optimizer steps."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch

from megatron_rl.types import Sample
from tests.reference import make_samples, near_policy, tiny_model

FAMILY, NUM_SAMPLES, PER_MINI_BATCH, LAYERS = "qwen2_tied", 17, 5, 2
LR, DECAY, CLIP = 0.001, 0.1, 0.5
# Groups of three, which the mini-batches of five cut through. Groups 1 and 2 are dead, and with sample 9 the second
# mini-batch is; the last has one survivor, so that of two data-parallel ranks one is silent. Sample 12 carries no loss
# token, whatever its advantage.
ADVANTAGES = np.array([0.8, 0.0, -1.1, 0, 0, 0, 0, 0, 0, 0.0, 1.3, -0.6, 0.9, 0.5, 0.0, -0.7, 0.0])
GROUPS = [i // 3 for i in range(NUM_SAMPLES)]
# Seen 7e-7 for gradients and 3e-6 for weights. Float32 and another order of summation; AdamW amplifies that where a
# gradient is near 0.
BOUND = 1e-5


@functools.cache
def drawn() -> tuple[torch.nn.Module, list[Sample]]:
    _, model = tiny_model(FAMILY, layers=LAYERS)
    samples = near_policy(model, make_samples(NUM_SAMPLES))
    samples[12] = dataclasses.replace(samples[12], loss_mask=np.zeros_like(samples[12].loss_mask))
    return model, samples
