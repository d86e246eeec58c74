"""Settings of every policy term, for the tests over whole optimizer steps."""

from __future__ import annotations

# Clips so near to 1 that they bind by the second step. What trains at zero advantage is dropped all the same under
# `approximate`.
APPROXIMATE = "skip.mode=approximate"
TERMS = {
    "ppo": ("loss.clip_low=0.02", "loss.clip_high=0.03"),
    "ppo, dual clip": ("loss.clip_low=0.02", "loss.clip_high=0.03", "loss.dual_clip=1.05"),
    "ppo, KL and entropy": (
        "loss.clip_low=0.02",
        "loss.clip_high=0.03",
        "loss.kl_coefficient=0.3",
        "loss.kl_estimator=unbiased",
        "loss.entropy_coefficient=0.02",
        APPROXIMATE,
    ),
    "gspo": ("loss.policy=gspo", "loss.clip_low=0.005", "loss.clip_high=0.008"),
    "cispo": ("loss.policy=cispo", "loss.clip_low=0.02", "loss.clip_high=0.03"),
    "importance_sampling": ("loss.policy=importance_sampling",),
    "dro": ("loss.policy=dro", "loss.dro_beta=0.3", APPROXIMATE),
    "reinforce": ("loss.policy=reinforce",),
}
