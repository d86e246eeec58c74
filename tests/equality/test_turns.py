"""Loss masks with holes: log-probs, gradient and corrections are those of a loop over loss tokens alone."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.signal import has_signal
from megatron_rl.config import CorrectionConfig
from megatron_rl.rollout.worker import to_sample
from megatron_rl.trainer.corrections import apply_corrections
from megatron_rl.types import Advantages, Prompt, Rollout, Sample
from tests.equality.layouts import CP, SP, TOLERANCE
from tests.equality.rig import MAX_RESPONSE_TOKENS, ForwardedLengths, open_rig, sizes
from tests.reference import reference_logprobs, relative_error, tiny_model, token_weight
from tests.unit.algorithm.naive_importance import naive

FAMILY = "qwen2_tied"
MASKS = (  # T: the policy's token, .: the environment's
    "TTT..TT",
    "TT....T",
    "T.T.T.T.T",
    "T",
    "TTTTT",
    "T...",
    "..TTT",
    "...T",
    "TT.TT...TT.T",
    "T.........T",
    "TTTT....TTTT",
)
ADVANTAGES = np.array([0.7, -1.2, 0.0, 1.5, -0.4, 0.9, -0.8, 0.0, 1.1, -1.6, 0.5])
GROUPS = [k // 2 for k in range(len(MASKS))]
REDUCTIONS = ("token_sum", "token_mean", "sequence_mean", "sequence_sum_mean", "sequence_sum_norm", "prompt_mean")
TOPOLOGIES = [((1, 1, 2), ()), ((2, 2, 1), SP), ((1, 1, 2), CP)]  # the third degree counts processes
NAMES = ["DP2", "TP2-SP-PP2", "CP2"]
CORRECTION = CorrectionConfig(mode="token_mask", cap=1.2, floor=0.85)


@functools.cache
def drawn(environment_logprob: float = 0.0) -> tuple[torch.nn.Module, list[Sample]]:
    """Return the model, and noisy episodes; ``environment_logprob`` stands where the environment's tokens are."""
    _, model = tiny_model(FAMILY)
    random = np.random.default_rng(5)
    samples = []
    for k, mask in enumerate(MASKS):
        prompt = Prompt(
            prompt_id=f"{k}@0", text="", token_ids=tuple(random.integers(2, 99, 2 + k % 4).tolist()), columns={}
        )
        rollout = Rollout(
            prompt=prompt,
            sample_index=0,
            response_ids=tuple(random.integers(2, 99, len(mask)).tolist()),
            logprobs=(0.0,) * len(mask),
            text="",
            finish_reason="stop",
            weight_versions=((0, len(mask)),),
            loss_mask=tuple(c == "T" for c in mask),
        )
        row = to_sample(rollout, included=True)
        with torch.no_grad():
            engine = reference_logprobs(model, row)[0].numpy() + random.normal(0.0, 0.25, len(mask)).astype(np.float32)
        samples.append(
            dataclasses.replace(row, logprobs=np.where(row.loss_mask, engine, np.float32(environment_logprob)))
        )
    return model, samples


def naive_gradient(reduction, weights=None, old=None) -> dict[str, torch.Tensor]:
    """Return the gradient of a loop over loss tokens. weights, old: flat over all response tokens."""
    model, samples = drawn()
    model.zero_grad()
    place = 0
    for i, sample in enumerate(samples):
        logprobs, loss = reference_logprobs(model, sample)[0], 0.0
        for t, sampled in enumerate(MASKS[i]):
            if sampled == "T":
                before = float(sample.logprobs[t] if old is None else old[place])
                advantage = float(ADVANTAGES[i]) * (1.0 if weights is None else weights[place])
                ratio = (logprobs[t] - before).exp()
                term = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                loss = loss - term * token_weight(reduction, samples, GROUPS, i, MAX_RESPONSE_TOKENS)
            place += 1
        loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def every_reduction(rank: int, world: int, topology: tuple) -> dict[str, float]:
    (tensor, pipeline, _), extra = topology
    found: dict[str, float] = {}
    with open_rig(FAMILY, *sizes(tensor, pipeline), *extra) as rig:
        rig.take(drawn()[1], GROUPS)
        assert rig.batch.facts.loss_tokens.tolist() == [mask.count("T") for mask in MASKS]
        for drops in (False, True):
            plan = rig.plan(ADVANTAGES, drops=drops)
            for reduction in REDUCTIONS:
                gradient = rig.gradient(ADVANTAGES, plan, reduction=reduction)
                name = f"{reduction} {'skip' if drops else 'dense'}"
                found[name] = relative_error(gradient, naive_gradient(reduction)) if rig.is_main else 0.0
    return found


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=NAMES)
def test_gradient_equals_the_loop_over_loss_tokens(pool, topology):
    (tensor, pipeline, data), _ = topology
    found = pool.run(tensor * pipeline * data, every_reduction, topology, timeout_s=90)[0]
    print(f"worst {max(found.values()):.1e}")
    assert max(found.values()) < TOLERANCE, found


def run_lengths(rank: int, world: int, topology: tuple) -> tuple[list[int], int, int]:
    """Return the lengths of the sequences that this rank's dense plan ran, its data rank and the pad multiple."""
    (tensor, pipeline, _), extra = topology
    with open_rig(FAMILY, *sizes(tensor, pipeline), *extra) as rig:
        rig.take(drawn()[1], GROUPS)
        seen = ForwardedLengths(rig)
        rig.gradient(ADVANTAGES, rig.plan(ADVANTAGES, drops=False))
        return seen.take(), rig.backend.topology.data_rank, rig.backend.rules.pad_multiple


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=NAMES)
def test_no_token_runs_that_no_loss_token_is_predicted_from(pool, topology):
    (tensor, pipeline, data), _ = topology
    found = pool.run(tensor * pipeline * data, run_lengths, topology, timeout_s=60)
    multiple = found[0][2]
    read = [s.prompt_tokens + mask.rindex("T") for s, mask in zip(drawn()[1], MASKS, strict=True)]
    by_replica = {data_rank: lengths for lengths, data_rank, _ in found}
    ran = sorted(length for lengths in by_replica.values() for length in lengths)
    assert ran == sorted(-(-length // multiple) * multiple for length in read)
    assert sum(read) < sum(len(s.token_ids) for s in drawn()[1]) - len(MASKS)


def passed_and_corrected(rank, world, topology, environment_logprob) -> tuple[np.ndarray, dict, dict]:
    """Return (log-probs flat, sums of the pass, the corrected gradient)."""
    (tensor, pipeline, _), extra = topology
    with open_rig(FAMILY, *sizes(tensor, pipeline), *extra) as rig:
        rig.take(drawn(environment_logprob)[1], GROUPS)
        batch, signal = rig.batch, has_signal(ADVANTAGES, rig.batch.facts.loss_tokens)
        everyone = np.ones(len(MASKS), bool)
        found = rig.backend.logprobs(batch, everyone)
        advantages = Advantages(of_sample=ADVANTAGES)
        verdict = apply_corrections(
            CORRECTION,
            rig.backend,
            batch,
            advantages=advantages,
            signal=signal,
            passed=everyone,
            old_logprobs=found.flat,
        )
        plan = rig.backend.plan("train", batch, verdict.signal, drops=True)
        batch = rig.backend.fetch_rows(batch, plan)
        (mini_batch,) = plan.mini_batches
        inputs = dataclasses.replace(
            rig.inputs(ADVANTAGES, mini_batch.members, old=found.flat), importance_weights=verdict.weights
        )
        rig.backend.forward_backward(batch, mini_batch, inputs, fingerprint=plan.fingerprints()[0])
        return found.flat, dict(found.sums), {name: tensor.clone() for name, tensor in rig.backend.gradient().items()}


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=NAMES)
def test_logprobs_and_corrections_know_loss_tokens_alone(pool, topology):
    """Numbers in the place of the environment's log-probs are read by nobody: not a bit changes."""
    (tensor, pipeline, data), _ = topology
    flat, sums, gradient = pool.run(tensor * pipeline * data, passed_and_corrected, topology, 0.0, timeout_s=90)[0]
    model, samples = drawn()
    mask = np.concatenate([s.loss_mask for s in samples])
    with torch.no_grad():
        wanted = np.concatenate([reference_logprobs(model, s)[0].numpy() for s in samples])
    assert np.abs(flat - wanted)[mask].max() < 1e-4 and not flat[~mask].any()
    engine = np.concatenate([s.logprobs for s in samples])
    assert sums["tokens"] == mask.sum() and sums["logprob_gap_abs"] == pytest.approx(
        np.abs(wanted - engine)[mask].sum(), rel=1e-4
    )
    gaps = np.split((wanted.astype(np.float64) - engine) * mask, np.cumsum([len(m) for m in MASKS])[:-1])
    weights = naive(
        CORRECTION, ADVANTAGES.tolist(), [g.tolist() for g in gaps], [s.loss_mask.tolist() for s in samples]
    )
    # some are masked, some are not
    assert 0 < sum(w == 0 for w, m in zip(weights, mask, strict=True) if m) < mask.sum()
    error = relative_error(gradient, naive_gradient("token_mean", weights, wanted))
    print(f"worst {error:.1e}")
    assert error < TOLERANCE
    again = pool.run(tensor * pipeline * data, passed_and_corrected, topology, 7.5, timeout_s=90)[0]
    assert np.array_equal(flat, again[0]) and sums == again[1]
    assert all(torch.equal(gradient[name], again[2][name]) for name in gradient)
