"""On-policy distillation: a teacher of another family and size, and the gradient of the reverse KL on given samples.

The reference is a loop over tokens with two Hugging Face models: A_t = log π_T − log π_S, then −Σ A_t · log π_S / N.
"""

import dataclasses

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.advantage import loss_inputs
from megatron_rl.backend.teacher_weights import TeacherWeights
from megatron_rl.rollout.scored_batch import Scoring, scored_batch
from megatron_rl.trainer.advantages.teacher import TeacherAdvantages
from megatron_rl.trainer.passes.passes import OldLogProbs, Passes
from tests.equality.adapter_rig import open_either
from tests.equality.rig import Rig, any_tokenizer
from tests.equality.rows import assert_close
from tests.pairwise import quick
from tests.reference import gradient_of, reference_logprobs, relative_error, tiny_model

SAMPLES = 8
GIVEN = ("advantage.estimator=distillation", "loss.policy=importance_sampling", "data.max_prompt_tokens=32")
LAYOUTS = (*("one qwen2_tied", "DP2 qwen3", "PP2 qwen2_tied", "TP2-SP qwen2_untied", "PP2-VPP2 llama3_rope"),
           *("CP2 qwen2_tied", "TP2-PP2 qwen2_tied", "LoRA-PP2 qwen2_tied", "LoRA-TP2 qwen2_tied"))
LONG = ("one qwen2_tied", "PP2 qwen2_tied", "TP2-PP2 qwen2_tied", "LoRA-TP2 qwen2_tied")
LAYERS, HIDDEN = 4, 32  # of the teacher; the policy has 2 or 4 layers of 64


def teacher_model():
    return tiny_model("llama", seed=5, layers=LAYERS, hidden=HIDDEN)[1]


def naive(policy, teacher, rig: Rig) -> tuple[dict[str, torch.Tensor], list[np.ndarray]]:
    """Return the policy's gradient, and the teacher's log-probs of each sample."""
    policy.zero_grad()
    count, of_teacher = sum(int(sample.loss_mask.sum()) for sample in rig.samples), []
    for sample in rig.samples:
        logprobs, _ = reference_logprobs(policy, sample)
        with torch.no_grad():
            wanted, _ = reference_logprobs(teacher, sample)
        of_teacher.append(wanted.numpy())
        for t in np.flatnonzero(sample.loss_mask):
            advantage = float(wanted[t]) - float(logprobs[t].detach())
            (-advantage * logprobs[t] / count).backward(retain_graph=True)
    return gradient_of(policy), of_teacher


def distil(rank: int, world: int, family: str, overrides: tuple[str, ...], path: str) -> dict[str, float]:
    """Return the worst differences to the loop: of the teacher's log-probs, and of the policy's gradient."""
    with open_either(family, overrides, *GIVEN, f"teacher.hf_path={path}", samples=SAMPLES) as rig:
        backend, facts, teacher = rig.backend, rig.batch.facts, TeacherWeights(rig.backend)
        old = rig.logprobs()
        with teacher.reading():
            of_teacher = rig.logprobs()
        assert np.array_equal(rig.logprobs(), old)  # the policy is back, to the bit
        gradient, wanted = naive(rig.model, teacher_model(), rig)
        mask, nothing = backend.gather_loss_mask(rig.batch), np.zeros(facts.num_samples)
        config = backend.config
        scoring = Scoring.of(config.reward, config.advantage, config.rollout, config.loss)
        scored = scored_batch(scoring, rig.batch, nothing, nothing[:, None][:, :0])
        of_student = OldLogProbs(flat=old, own=None, sums={}, metrics={})
        passes = Passes(loss_mask=mask, old=of_student, teacher=of_teacher)
        result = TeacherAdvantages(discount=config.teacher.discount)(scored, passes)
        signal = result.advantages.largest(facts.response_tokens) > 0
        plan = rig.plan_of(signal, drops=True)
        (mini_batch,) = plan.mini_batches
        limits = dict(drops=True, max_response_tokens=backend.config.rollout.max_response_tokens)
        inputs = loss_inputs(backend.config.loss, facts, mini_batch, result.advantages, signal, **limits)
        rig.run(plan, dataclasses.replace(inputs, old_logprobs=old))
        found = rig.taken()
        masked = np.concatenate(wanted) * rig.loss_mask
        reverse_kl = float((old - masked)[mask].mean())
        return {"teacher": float(np.abs(of_teacher - masked).max()),
                "gradient": relative_error(found, gradient),
                "reverse KL": abs(result.metrics["distillation/reverse_kl"] - reverse_kl)}


@pytest.fixture(scope="module")
def teacher_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("teacher") / "hf"
    teacher_model().save_pretrained(path)
    any_tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize("layout", quick(LAYOUTS, *(x for x in LAYOUTS if x not in LONG)))
def test_the_gradient_is_the_reverse_kls_on_the_students_samples(pool, teacher_path, layout):
    assert_close(pool, layout, distil, str(teacher_path))
