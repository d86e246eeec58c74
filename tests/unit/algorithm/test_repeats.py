"""Equal samples of a step: which one stands in, how often it counts, and the weights that the loss then has."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithm.advantage import loss_inputs
from megatron_rl.algorithm.repeats import copies_of, given_to_repeats, stand_ins
from megatron_rl.backend.batch_exchange import replicated_facts
from megatron_rl.config import load_config
from megatron_rl.planning.plan import PlanRules, plan_steps
from megatron_rl.types import Advantages, BatchFacts, Sample
from tests.unit.algorithm.facts import make_facts


@dataclass(frozen=True)
class Case:
    facts: BatchFacts
    advantages: Advantages
    signal: np.ndarray
    mini_batches: list[np.ndarray]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.integers(1, 12))
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    lengths, groups = random.integers(1, 4, size=count), np.sort(random.integers(0, 3, size=count))
    keys = lengths * 10 + random.integers(0, 2, size=count)
    of_sample = random.choice([-1.0, 0.0, 0.5], size=count)
    per_token = np.repeat(of_sample, lengths) if draw(st.booleans()) else None
    if per_token is not None:
        per_token[random.random(len(per_token)) < 0.2] *= 2
    facts = replace(make_facts(groups, lengths, lengths), sample_keys=keys)
    size = draw(st.sampled_from([1, 3, 12]))
    return Case(
        facts=facts,
        advantages=Advantages(of_sample=of_sample, of_token=per_token),
        signal=of_sample != 0,
        mini_batches=[np.arange(i, min(i + size, count)) for i in range(0, count, size)],
    )


def content(case: Case, sample: int) -> tuple:
    """Return all that two samples of one term in the loss have alike."""
    first, last = case.facts.response_offsets[sample : sample + 2]
    tokens = None if case.advantages.of_token is None else tuple(case.advantages.of_token[first:last])
    own = (case.facts.groups[sample], case.facts.sample_keys[sample], case.advantages.of_sample[sample])
    return (*map(float, own), tokens)


def assert_invariants(case: Case, found: np.ndarray) -> None:
    copies = copies_of(found, case.signal)
    for members in case.mini_batches:
        for sample in members:
            alike = [i for i in members if case.signal[i] and content(case, i) == content(case, sample)]
            wanted = alike[0] if case.signal[sample] else sample  # 1 and 2
            assert found[sample] == wanted and found[found[sample]] == found[sample]
            assert copies[sample] == (len(alike) if case.signal[sample] and wanted == sample else 0)
        assert copies[members].sum() == case.signal[members].sum()  # 3


@given(case=cases())
def test_the_first_equal_sample_of_a_step_stands_in_by_a_naive_loop(case: Case) -> None:
    assert_invariants(case, stand_ins(case.facts, case.advantages, case.signal, case.mini_batches))


@given(case=cases(), reduction=st.sampled_from(["token_mean", "sequence_mean", "prompt_mean", "token_sum"]))
def test_weights_of_stand_ins_are_the_sums_of_those_they_stand_for(case: Case, reduction: str) -> None:
    loss = load_config(None, [f"loss.reduction={reduction}"]).loss
    found = stand_ins(case.facts, case.advantages, case.signal, case.mini_batches)
    lengths = case.facts.total_tokens
    plan = plan_steps("train", case.mini_batches, lengths, case.signal, PlanRules(max_tokens=40), drops=True)
    limits = {"drops": True, "max_response_tokens": 4}
    for step in plan.mini_batches:
        each = loss_inputs(loss, case.facts, step, case.advantages, case.signal, **limits)
        merged = loss_inputs(
            loss, case.facts, step, case.advantages, case.signal, **limits, copies=copies_of(found, case.signal)
        )
        for sample in np.intersect1d(step.members, np.flatnonzero(case.signal)):
            stands_for = [i for i in step.members if case.signal[i] and found[i] == sample]
            np.testing.assert_allclose(merged.weights[sample], each.weights[stands_for].sum(), rtol=1e-14)
            np.testing.assert_allclose(merged.advantages[sample], each.advantages[stands_for].sum(), rtol=1e-14)
            assert merged.measured[sample] == len(stands_for)


def sample_of(**changes: object) -> Sample:
    fields = {
        "sample_id": "0@0#0",
        "prompt_tokens": 2,
        "token_ids": np.array([5, 6, 7, 8]),
        "loss_mask": np.array([True, False]),
        "logprobs": np.array([-0.5, -0.25], dtype=np.float32),
        "routed_experts": None,
        "weight_version": 3,
    }
    return Sample(**fields | changes)


def test_only_the_name_may_differ_between_equal_samples() -> None:
    experts = np.zeros((4, 1, 2), dtype=np.int16)
    samples = [
        sample_of(),
        sample_of(sample_id="0@0#1"),
        sample_of(token_ids=np.array([5, 6, 7, 9])),
        sample_of(prompt_tokens=1, loss_mask=np.array([True, True, False]), logprobs=np.zeros(3, dtype=np.float32)),
        sample_of(loss_mask=np.array([True, True])),
        sample_of(logprobs=np.nextafter(sample_of().logprobs, np.float32(0))),
        sample_of(weight_version=2),
        sample_of(routed_experts=experts),
        sample_of(routed_experts=experts + 1),
    ]
    keys = [replicated_facts([sample]).sample_keys[0] for sample in samples]
    assert keys[0] == keys[1] and len(set(keys[1:])) == len(samples) - 1


def test_repeats_get_the_numbers_of_their_stand_ins() -> None:
    facts = make_facts([0, 0, 0], [2, 1, 2], [2, 1, 2])
    flat = np.array([1.0, 2.0, 3.0, 0.0, 0.0])
    assert given_to_repeats(flat, np.array([0, 1, 0]), facts).tolist() == [1.0, 2.0, 3.0, 1.0, 2.0]
    assert flat.tolist() == [1.0, 2.0, 3.0, 0.0, 0.0]
