"""Packed sequences, whole and split over context ranks: a neighbour changes nothing, nor does the split."""

import dataclasses

import numpy as np
import pytest
import torch

from megatron_rl.config import POLICIES
from tests.equality.rig import open_rig, ragged_advantages
from tests.equality.rows import measured
from tests.reference import make_samples, near_policy, relative_error

NUM_SAMPLES = 9
TERMS = ("loss.kl_coefficient=0.1", "loss.entropy_coefficient=0.01", "skip.mode=approximate")


def one_policy(rank: int, world: int, policy: str, extra: tuple[str, ...]) -> dict[str, object]:
    """Return the gradient and the sums behind the metrics; the reference policy is another, so that KL has a size."""
    with open_rig("qwen2_tied", f"loss.policy={policy}", *TERMS, *extra, samples=NUM_SAMPLES) as rig:
        advantages = ragged_advantages(NUM_SAMPLES)
        plan = rig.plan(advantages, drops=False)
        (mini_batch,) = plan.mini_batches
        inputs = rig.inputs(advantages, mini_batch.members)
        reference = inputs.old_logprobs + 0.1 * np.sin(np.arange(len(inputs.old_logprobs), dtype=np.float32))
        inputs = dataclasses.replace(inputs, reference_logprobs=reference)
        rig.run(plan, inputs)
        gradient = rig.taken()
        rig.run(plan, inputs)
        return {"gradient": gradient, "sums": dict(rig.backend.optim_step(mini_batch.kind).sums)}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_equals_the_unsplit_run(pool, policy):
    """gspo's ratio is a mean over a sequence that two ranks hold between them; the others' terms are per token."""
    whole = pool.run(1, one_policy, policy, (), timeout_s=60)[0]
    for found in pool.run(2, one_policy, policy, ("parallel.context=2",), timeout_s=60):
        assert relative_error(found["gradient"], whole["gradient"]) < 1e-5
        for name, value in whole["sums"].items():
            assert found["sums"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert whole["sums"]["tokens"] > 20 and whole["sums"]["kl"] != 0


def gaps(rank: int, world: int, family: str, extra: tuple[str, ...]) -> tuple[torch.Tensor, dict[str, float]]:
    """Return log-probs and sums of sequences shorter than their 2·CP chunks, so that some ranks hold pads alone."""
    with open_rig(family, *extra) as rig:
        samples = [s for s in make_samples(60) if s.prompt_tokens + len(s.loss_mask) <= 4][:3] + make_samples(4, seed=1)
        assert min(len(s.token_ids) for s in samples) < 8
        rig.take(near_policy(rig.model, samples))
        passed = rig.backend.logprobs(rig.batch, rig.everyone)
        return torch.from_numpy(passed.flat), dict(passed.sums)


@pytest.mark.parametrize(
    ("family", "context"),
    [("qwen3", 2), ("phi3_partial", 2), ("olmo2", 2), ("olmo3", 2), pytest.param("qwen3", 4, marks=pytest.mark.long)],
)
def test_sequences_shorter_than_their_chunks(pool, family, context):
    (whole, sums), *_ = pool.run(1, gaps, family, (), timeout_s=60)
    for flat, found in pool.run(context, gaps, family, (f"parallel.context={context}",), timeout_s=60):
        assert float((flat - whole).abs().max()) < 1e-5 and found == pytest.approx(sums, rel=1e-4)


def beside(rank: int, world: int, family: str, extra: tuple[str, ...]) -> bool:
    """Return whether other tokens in one of four samples of a micro-batch change that sample's log-probs alone."""
    with open_rig(family, *extra) as rig:
        samples = near_policy(rig.model, make_samples(4, seed=2))
        found = []
        for disturbed in (False, True):
            if disturbed:
                samples[1] = dataclasses.replace(samples[1], token_ids=(samples[1].token_ids + 7) % 97 + 2)
            rig.take(samples)
            rig.rules(max_tokens=1000)
            found.append(rig.logprobs())
            (mini_batch,) = rig.backend.plan_pass(rig.batch, rig.everyone).mini_batches
            assert mini_batch.num_microbatches.max() == 1, "the neighbours must be in one micro-batch"
        bounds = rig.batch.facts.response_offsets
        same = [np.array_equal(found[0][a:b], found[1][a:b]) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
        return same == [True, False, True, True]


@pytest.mark.parametrize("layout", ["one", "CP2", "TP2-SP"])
def test_a_neighbour_in_the_micro_batch_changes_no_log_prob(pool, layout):
    assert all(measured(pool, f"{layout} qwen3", beside))
