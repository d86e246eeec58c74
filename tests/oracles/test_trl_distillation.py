"""TRL's importance-weighted on-policy distillation against our per-token reverse KL, without its weights (γ = 0).

``IWOPDTrainer._compute_iw_opd_loss`` takes the sampled tokens' advantage log π_T − log μ and the loss −A · log π_S.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.distillation import distillation_advantages
from megatron_rl.algorithm.objective import Objective
from megatron_rl.config import LossConfig
from tests.oracles.batch import DOUBLE, SEEDS, random_batch

trl = pytest.importorskip("trl", reason="TRL is not installed; `make test-oracles` installs it")
VOCABULARY = 11


def their_loss(logits, tokens, mask, teacher, student) -> torch.Tensor:
    from trl.experimental.iw_opd import IWOPDTrainer

    trainer = SimpleNamespace(
        temperature=1.0,
        iw_opd_epsilon=1e-8,
        iw_opd_gamma=0.0,
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    labels = torch.where(mask, tokens, -100)
    return IWOPDTrainer._compute_iw_opd_loss(
        trainer, logits, tokens, labels, teacher, student, num_items_in_batch=mask.sum()
    )


@pytest.mark.parametrize("policy", ["reinforce", "importance_sampling", "ppo"])
@pytest.mark.parametrize("seed", SEEDS)
def test_loss_and_gradient(seed: int, policy: str) -> None:
    """Value (of ``reinforce``) and gradient by every logit; on-policy the three policy terms have one gradient."""
    batch, random = random_batch(seed), torch.Generator().manual_seed(seed)
    shape, mask = batch.mask.shape, batch.mask
    tokens = torch.randint(0, VOCABULARY, shape, generator=random)
    logits = torch.randn(*shape, VOCABULARY, generator=random, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(*shape, VOCABULARY, generator=random, dtype=torch.float64).log_softmax(-1)
    of_teacher = teacher.gather(-1, tokens[..., None])[..., 0]
    logprobs = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    old = logprobs.detach()
    found = their_loss(logits, tokens, mask, of_teacher, old)
    (wanted,) = torch.autograd.grad(found, logits)

    inside = torch.arange(shape[1]) < torch.from_numpy(batch.response_tokens)[:, None]
    advantages = distillation_advantages(
        old[inside].numpy(), of_teacher[inside].numpy(), mask[inside].numpy(), batch.response_tokens, discount=0.0
    )
    count = int(mask.sum())
    chosen = mask[inside]
    given = SimpleNamespace(
        num_sequences=shape[0],
        sequences=torch.from_numpy(np.repeat(np.arange(shape[0]), batch.response_tokens))[chosen],
        advantages=torch.from_numpy(advantages)[chosen] / count,
        weights=torch.full((count,), 1 / count, dtype=torch.float64),
        old_logprobs=old[inside][chosen],
        rollout_logprobs=old[inside][chosen],
        reference_logprobs=None,
        kl_coefficient=None,
        measured=None,
    )
    own = logprobs[inside][chosen]
    loss, _ = Objective(LossConfig(policy=policy)).policy(given, own, torch.zeros_like(own))
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], wanted, **DOUBLE)
    if policy == "reinforce":
        torch.testing.assert_close(loss, found, **DOUBLE)
