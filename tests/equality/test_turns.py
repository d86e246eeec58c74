"""Loss masks with holes: log-probs, gradient and corrections are those of a loop over loss tokens alone."""

import dataclasses
import functools

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.signal import has_signal
from megatron_rl.config import CorrectionConfig
from megatron_rl.rollout.job import to_sample
from megatron_rl.trainer.corrections import apply_corrections
from megatron_rl.types import Advantages, Prompt, Rollout, Sample
from tests.equality.layouts import REDUCTIONS, TOLERANCE
from tests.equality.rig import MAX_RESPONSE_TOKENS, ForwardedLengths, equal_by_name, open_rig
from tests.equality.rows import assert_close, measured
from tests.pairwise import quick
from tests.reference import reference_gradient, reference_logprobs, relative_error, tiny_model
from tests.unit.algorithm.naive_importance import naive

FAMILY = "qwen2_tied"
MASKS = (  # T: the policy's token, .: the environment's
    *("TTT..TT", "TT....T", "T.T.T.T.T", "T", "TTTTT", "T...", "..TTT", "...T"),
    *("TT.TT...TT.T", "T.........T", "TTTT....TTTT"),
)
ADVANTAGES = np.array([0.7, -1.2, 0.0, 1.5, -0.4, 0.9, -0.8, 0.0, 1.1, -1.6, 0.5])
GROUPS = [k // 2 for k in range(len(MASKS))]
TOPOLOGIES = [f"{layout} {FAMILY}" for layout in ("DP2", "TP2-SP-PP2", "CP2")]
CORRECTION = CorrectionConfig(mode="token_mask", cap=1.2, floor=0.85)


@functools.cache
def drawn(environment_logprob: float = 0.0) -> tuple[torch.nn.Module, list[Sample]]:
    """Return the model, and noisy episodes; ``environment_logprob`` stands where the environment's tokens are."""
    _, model = tiny_model(FAMILY)
    random = np.random.default_rng(5)
    samples = []
    for k, mask in enumerate(MASKS):
        ids = tuple(random.integers(2, 99, 2 + k % 4).tolist())
        rollout = Rollout(prompt=Prompt(prompt_id=f"{k}@0", text="", token_ids=ids, columns={}), sample_index=0,
                          response_ids=tuple(random.integers(2, 99, len(mask)).tolist()), logprobs=(0.0,) * len(mask),
                          text="", finish_reason="stop", weight_versions=((0, len(mask)),),
                          loss_mask=tuple(c == "T" for c in mask))
        row = to_sample(rollout, included=True)
        with torch.no_grad():
            engine = reference_logprobs(model, row)[0].numpy() + random.normal(0.0, 0.25, len(mask)).astype(np.float32)
        logprobs = np.where(row.loss_mask, engine, np.float32(environment_logprob))
        samples.append(dataclasses.replace(row, logprobs=logprobs))
    return model, samples


def naive_gradient(reduction: str, weights: list[float] | None = None, old: np.ndarray | None = None) -> dict:
    """Return the gradient of a loop over loss tokens. weights, old: flat over all response tokens."""
    model, samples = drawn()
    lengths = [len(mask) for mask in MASKS]
    given = [1.0] * len(MASKS) if weights is None else torch.tensor(weights).split(lengths)
    advantages = [float(a) * w for a, w in zip(ADVANTAGES, given, strict=True)]
    before = None if old is None else torch.from_numpy(old).split(lengths)
    sizes = dict(reduction=reduction, max_response_tokens=MAX_RESPONSE_TOKENS)
    return reference_gradient(model, samples, GROUPS, advantages, old=before, **sizes)[0]


def every_reduction(rank: int, world: int, family: str, layout: tuple[str, ...]) -> dict[str, float]:
    found: dict[str, float] = {}
    with open_rig(family, *layout) as rig:
        rig.take(drawn()[1], GROUPS)
        assert rig.batch.facts.loss_tokens.tolist() == [mask.count("T") for mask in MASKS]
        for drops in (False, True):
            plan = rig.plan(ADVANTAGES, drops=drops)
            for reduction in REDUCTIONS:
                gradient = rig.gradient(ADVANTAGES, plan, reduction=reduction)
                name = f"{reduction} {'skip' if drops else 'dense'}"
                found[name] = relative_error(gradient, naive_gradient(reduction)) if rig.is_main else 0.0
    return found


@pytest.mark.parametrize("name", quick(TOPOLOGIES, TOPOLOGIES[0], TOPOLOGIES[2]))
def test_gradient_equals_the_loop_over_loss_tokens(pool, name):
    assert_close(pool, name, every_reduction)


def run_lengths(rank: int, world: int, family: str, layout: tuple[str, ...]) -> tuple[list[int], int, int]:
    """Return the lengths of the sequences that this rank's dense plan ran, its data rank and the pad multiple."""
    with open_rig(family, *layout) as rig:
        rig.take(drawn()[1], GROUPS)
        seen = ForwardedLengths(rig)
        rig.gradient(ADVANTAGES, rig.plan(ADVANTAGES, drops=False))
        return seen.take(), rig.backend.topology.data_rank, rig.backend.rules.pad_multiple


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_no_token_runs_that_no_loss_token_is_predicted_from(pool, name):
    found = measured(pool, name, run_lengths)
    multiple = found[0][2]
    read = [s.prompt_tokens + mask.rindex("T") for s, mask in zip(drawn()[1], MASKS, strict=True)]
    by_replica = {data_rank: lengths for lengths, data_rank, _ in found}
    ran = sorted(length for lengths in by_replica.values() for length in lengths)
    assert ran == sorted(-(-length // multiple) * multiple for length in read)
    assert sum(read) < sum(len(s.token_ids) for s in drawn()[1]) - len(MASKS)


def passed_and_corrected(rank, world, family: str, layout, environment_logprob: float) -> tuple[np.ndarray, dict, dict]:
    """Return (log-probs flat, sums of the pass, the corrected gradient)."""
    with open_rig(family, *layout) as rig:
        rig.take(drawn(environment_logprob)[1], GROUPS)
        signal = has_signal(ADVANTAGES, rig.batch.facts.loss_tokens)
        found = rig.backend.logprobs(rig.batch, rig.everyone)
        given = dict(advantages=Advantages(of_sample=ADVANTAGES), signal=signal, passed=rig.everyone)
        verdict = apply_corrections(CORRECTION, rig.backend, rig.batch, **given, old_logprobs=found.flat)
        plan = rig.plan_of(verdict.signal, drops=True)
        inputs = rig.inputs(ADVANTAGES, plan.mini_batches[0].members, old=found.flat)
        rig.run(plan, dataclasses.replace(inputs, importance_weights=verdict.weights))
        return found.flat, dict(found.sums), {name: tensor.clone() for name, tensor in rig.backend.gradient().items()}


@pytest.mark.parametrize("name", quick(TOPOLOGIES, TOPOLOGIES[0], TOPOLOGIES[2]))
def test_logprobs_and_corrections_know_loss_tokens_alone(pool, name):
    """Numbers in the place of the environment's log-probs are read by nobody: not a bit changes."""
    flat, sums, gradient = measured(pool, name, passed_and_corrected, 0.0)[0]
    model, samples = drawn()
    mask = np.concatenate([s.loss_mask for s in samples])
    with torch.no_grad():
        wanted = np.concatenate([reference_logprobs(model, s)[0].numpy() for s in samples])
    assert np.abs(flat - wanted)[mask].max() < 1e-4 and not flat[~mask].any()
    engine = np.concatenate([s.logprobs for s in samples])
    assert sums["tokens"] == mask.sum()
    assert sums["logprob_gap_abs"] == pytest.approx(np.abs(wanted - engine)[mask].sum(), rel=1e-4)
    gaps = np.split((wanted.astype(np.float64) - engine) * mask, np.cumsum([len(m) for m in MASKS])[:-1])
    masks = [s.loss_mask.tolist() for s in samples]
    weights = naive(CORRECTION, ADVANTAGES.tolist(), [g.tolist() for g in gaps], masks)
    # some are masked, some are not
    assert 0 < sum(w == 0 for w, m in zip(weights, mask, strict=True) if m) < mask.sum()
    assert relative_error(gradient, naive_gradient("token_mean", weights, wanted)) < TOLERANCE
    again = measured(pool, name, passed_and_corrected, 7.5)[0]
    assert np.array_equal(flat, again[0]) and sums == again[1] and equal_by_name(gradient, again[2])
