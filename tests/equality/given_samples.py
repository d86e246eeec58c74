"""Fixed samples for the tests over whole optimizer steps, their settings, and torch's AdamW over them."""

import dataclasses
import functools
from collections.abc import Callable, Iterable

import numpy as np
import torch

from megatron_rl.types import Sample
from tests.reference import adamw, file_weights, make_samples, near_policy, tiny_model

FAMILY, NUM_SAMPLES, PER_MINI_BATCH = "qwen2_tied", 17, 5
LR, DECAY, CLIP = 0.001, 0.1, 0.5
STEPS = (f"optimizer.lr={LR}", f"optimizer.weight_decay={DECAY}", f"optimizer.clip_grad={CLIP}")
SETTINGS = (*STEPS, f"train.samples_per_mini_batch={PER_MINI_BATCH}")
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
    _, model = tiny_model(FAMILY)
    samples = near_policy(model, make_samples(NUM_SAMPLES))
    samples[12] = dataclasses.replace(samples[12], loss_mask=np.zeros_like(samples[12].loss_mask))
    return model, samples


def plain_steps(steps: Iterable, add_gradient: Callable) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return weights after torch's AdamW over ``add_gradient`` of each step, and norms before clipping."""
    model, _ = drawn()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer, norms = adamw(model, LR, DECAY), []
    for step in steps:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        add_gradient(step)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    ended = {name: tensor.clone() for name, tensor in file_weights(model).items()}
    model.load_state_dict(start)
    return ended, norms


# Clips so near to 1 that they bind by the second step. What trains at zero advantage is dropped all the same under
# `approximate`.
APPROXIMATE = "skip.mode=approximate"
TERMS = {"ppo": ("loss.clip_low=0.02", "loss.clip_high=0.03"),
         "ppo, dual clip": ("loss.clip_low=0.02", "loss.clip_high=0.03", "loss.dual_clip=1.05"),
         "ppo, KL and entropy": (*("loss.clip_low=0.02", "loss.clip_high=0.03", "loss.kl_coefficient=0.3"),
                                 *("loss.kl_estimator=unbiased", "loss.entropy_coefficient=0.02", APPROXIMATE)),
         "gspo": ("loss.policy=gspo", "loss.clip_low=0.005", "loss.clip_high=0.008"),
         "cispo": ("loss.policy=cispo", "loss.clip_low=0.02", "loss.clip_high=0.03"),
         "importance_sampling": ("loss.policy=importance_sampling",),
         "dro": ("loss.policy=dro", "loss.dro_beta=0.3", APPROXIMATE),
         "reinforce": ("loss.policy=reinforce",)}
