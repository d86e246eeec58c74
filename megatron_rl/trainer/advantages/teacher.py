"""Advantages of on-policy distillation: the gap between teacher and student (``advantage.estimator=distillation``)."""

from __future__ import annotations

import numpy as np

from megatron_rl.algorithm.distillation import distillation_advantages
from megatron_rl.algorithm.flat import sum_per_sample
from megatron_rl.distributed import collectives
from megatron_rl.rollout.training_batch import ScoredBatch
from megatron_rl.trainer.advantages.source import AdvantageResult
from megatron_rl.trainer.passes.passes import Passes
from megatron_rl.types import Advantages


class TeacherAdvantages:
    """Computes the advantages of on-policy distillation from the teacher's and the student's log-probs.

    A token's advantage is the teacher's log-prob less the student's, plus the discounted
    differences at the sample's later tokens.

    discount: the discount per token, ``teacher.discount``.
    """

    def __init__(self, *, discount: float) -> None:
        self.discount = discount

    def __call__(self, scored: ScoredBatch, passes: Passes) -> AdvantageResult:
        """Return the advantages of a rollout. A collective.

        scored: the rollout's samples.
        passes: holds log π_old (the student's log-probs) and log π_T (the teacher's).
        """
        facts, mask, student = scored.facts, passes.loss_mask, passes.old.flat
        plain = distillation_advantages(
            student, passes.teacher, mask, facts.response_tokens, discount=self.discount, sample_ids=facts.sample_ids
        )
        of_token = collectives.broadcast_from_rank0(plain)
        gap = np.where(mask, student.astype(np.float64) - passes.teacher, 0.0)
        tokens = max(int(mask.sum()), 1)
        return AdvantageResult(
            advantages=Advantages(
                of_sample=sum_per_sample(of_token, facts.response_tokens) / np.maximum(facts.loss_tokens, 1),
                of_token=of_token,
            ),
            plain=np.zeros(facts.num_samples),
            metrics={"distillation/reverse_kl": float(gap.sum()) / tokens},
        )
