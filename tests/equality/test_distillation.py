"""On-policy distillation: a teacher of another family and size, and the gradient of the reverse KL on given samples.

The reference is a loop over tokens with two Hugging Face models: A_t = log π_T − log π_S, then −Σ A_t · log π_S / N.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.advantage import loss_inputs
from megatron_rl.backend.teacher_weights import TeacherWeights
from megatron_rl.rollout.training_batch import scored_batch
from megatron_rl.trainer.advantages import teacher_advantages
from tests.equality.adapter_rig import LORA, open_adapted
from tests.equality.layouts import TOLERANCE
from tests.equality.rig import Rig, any_tokenizer, open_rig
from tests.reference import reference_logprobs, relative_error, tiny_model

SAMPLES = 8
GIVEN = ("advantage.estimator=distillation", "loss.policy=importance_sampling", "data.max_prompt_tokens=32")
LAYOUTS = {
    "1 process": (1, "qwen2_tied", ()),
    "DP2": (2, "qwen3", ()),
    "PP2": (2, "qwen2_tied", ("parallel.pipeline=2",)),
    "TP2-SP": (2, "qwen2_untied", ("parallel.tensor=2", "parallel.sequence_parallel=true")),
    "PP2-VPP2": (2, "llama3_rope", ("parallel.pipeline=2", "parallel.virtual_pipeline=2")),
    "CP2": (2, "qwen2_tied", ("parallel.context=2",)),
    "TP2-PP2": (4, "qwen2_tied", ("parallel.tensor=2", "parallel.pipeline=2")),
    "LoRA-PP2": (2, "qwen2_tied", ("parallel.pipeline=2", *LORA)),
    "LoRA-TP2": (2, "qwen2_tied", ("parallel.tensor=2", *LORA)),
}
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
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}, of_teacher


def distil(rank: int, world: int, family: str, overrides: tuple[str, ...], path: str) -> dict[str, float]:
    """Return the worst differences to the loop: of the teacher's log-probs, and of the policy's gradient."""
    given = (*GIVEN, f"teacher.hf_path={path}")
    if LORA[0] in overrides:
        parallel = tuple(x.removeprefix("parallel.") for x in overrides if x.startswith("parallel."))
        opened = open_adapted(family, parallel, given, samples=SAMPLES)
    else:
        opened = open_rig(family, *overrides, *given, samples=SAMPLES)
    with opened as rig:
        backend, batch, facts = rig.backend, rig.batch, rig.batch.facts
        everything = np.ones(facts.num_samples, dtype=bool)
        teacher = TeacherWeights(backend)
        old = backend.logprobs(batch, everything).flat
        with teacher.reading():
            of_teacher = backend.logprobs(batch, everything).flat
        assert np.array_equal(backend.logprobs(batch, everything).flat, old)  # the policy is back, to the bit
        gradient, wanted = naive(rig.model, teacher_model(), rig)
        mask = backend.gather_loss_mask(batch)
        nothing = np.zeros(facts.num_samples)
        scored = scored_batch(backend.config, batch, nothing, nothing[:, None][:, :0])
        result = teacher_advantages(backend.config, scored, old, of_teacher, mask, {})
        signal = result.advantages.largest(facts.response_tokens) > 0
        plan = backend.plan("train", batch, signal, drops=True)
        batch = backend.fetch_rows(batch, plan)
        (mini_batch,) = plan.mini_batches
        inputs = loss_inputs(backend.config, facts, mini_batch, result.advantages, signal, old=old)
        backend.forward_backward(batch, mini_batch, inputs, fingerprint=plan.fingerprints()[0])
        found = backend.gradient()
        backend.zero_grad()
        masked = np.concatenate(wanted) * np.concatenate([sample.loss_mask for sample in rig.samples])
        reverse_kl = float((old - masked)[mask].mean())
        return {
            "teacher": float(np.abs(of_teacher - masked).max()),
            "gradient": relative_error(found, gradient),
            "reverse KL": abs(result.teacher.metrics["distillation/reverse_kl"] - reverse_kl),
        }


@pytest.fixture(scope="module")
def teacher_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("teacher") / "hf"
    teacher_model().save_pretrained(path)
    any_tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_is_the_reverse_kls_on_the_students_samples(pool, teacher_path, layout):
    world, family, overrides = LAYOUTS[layout]
    for found in pool.run(world, distil, family, overrides, str(teacher_path), timeout_s=120):
        assert max(found.values()) < TOLERANCE, found
