"""Importance corrections equal the naive loop's gradient: denominators stay, and nothing masked is forwarded."""

import contextlib
import dataclasses
import functools
import zlib
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.signal import has_signal
from megatron_rl.config import CorrectionConfig
from megatron_rl.planning.tokens import tokens_of
from megatron_rl.rollout.engines.embedded import TransformersEngine
from megatron_rl.trainer.corrections import CorrectedSignal, apply_corrections
from megatron_rl.trainer.decision import runs_S
from megatron_rl.types import Advantages, BatchPlan, LossInputs
from tests.equality.layouts import TOLERANCE
from tests.equality.rig import ForwardedLengths, Rig, open_rig, ragged_advantages
from tests.equality.rows import measured
from tests.pairwise import pairwise, quick
from tests.reference import (
    make_samples,
    near_policy,
    reference_gradient,
    reference_logprobs,
    relative_error,
    tiny_model,
)
from tests.runs.command import arguments, command_line, rows_of, weights_of
from tests.unit.algorithm.naive_importance import MODES, naive

NUM_SAMPLES, FAMILY = 11, "qwen2_tied"
ADVANTAGES = ragged_advantages(NUM_SAMPLES)
CORRECTIONS = {
    **{mode: CorrectionConfig(mode=mode, cap=1.4, floor=0.5) for mode in MODES if not mode.startswith("geometric")},
    **{mode: CorrectionConfig(mode=mode, cap=1.1, floor=0.9) for mode in MODES if mode.startswith("geometric")},
    "off-policy": CorrectionConfig(off_policy_delta=0.05),
    "both": CorrectionConfig(mode="token_mask", cap=1.5, off_policy_delta=0.0),
}
LAYOUTS = ("DP2", "PP2", "TP2-PP2", "PP2-DP2")
CUTS = {"repacked": {"max_tokens": 25}, "as cut": {"samples_per_microbatch": 2, "repack": False}}


@functools.cache
def drawn() -> tuple[torch.nn.Module, list]:
    """Return the model, and samples of unique lengths whose engine is 0.4 nats of noise away from it at each token."""
    _, model = tiny_model(FAMILY)
    return model, near_policy(model, make_samples(NUM_SAMPLES, unique_lengths=True), spread=0.4)


@functools.cache
def wanted(name: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return the reference's gradient at π_θ = π_old with the naive loop's weights of tokens, and those weights."""
    model, samples = drawn()
    with torch.no_grad():
        old = [reference_logprobs(model, s)[0] for s in samples]
    gaps = [(x.double() - torch.from_numpy(s.logprobs).double()).tolist() for x, s in zip(old, samples, strict=True)]
    weights = naive(CORRECTIONS[name], ADVANTAGES.tolist(), gaps, [s.loss_mask.tolist() for s in samples])
    each = torch.tensor(weights).split([len(s.loss_mask) for s in samples])
    advantages = [float(a) * w for a, w in zip(ADVANTAGES, each, strict=True)]
    return reference_gradient(model, samples, [i // 2 for i in range(NUM_SAMPLES)], advantages, old=old)[0], weights


def corrected(rig: Rig, correction: CorrectionConfig, *, drops: bool) -> tuple[BatchPlan, np.ndarray, CorrectedSignal]:
    """Correct a batch as train_on_rollout does: a draft by advantage, the log-prob pass, the verdict, the plan."""
    batch = rig.batch
    signal = has_signal(ADVANTAGES, batch.facts.loss_tokens)
    passed = runs_S(rig.backend.plan_training(batch, signal, drops=drops), NUM_SAMPLES)
    old = rig.logprobs(passed)
    given = dict(advantages=Advantages(of_sample=ADVANTAGES), signal=signal, passed=passed, old_logprobs=old)
    verdict = apply_corrections(correction, rig.backend, batch, **given)
    plan = rig.plan_of(verdict.signal, drops=drops)
    assert not (runs_S(plan, NUM_SAMPLES) & ~passed).any()
    return plan, old, verdict


def inputs_of(rig: Rig, plan: BatchPlan, old: np.ndarray, verdict: CorrectedSignal) -> LossInputs:
    inputs = rig.inputs(ADVANTAGES, plan.mini_batches[0].members, old=old)
    tokens = sum(int(s.loss_mask.sum()) for s in rig.samples)
    assert np.array_equal(inputs.weights, np.full(NUM_SAMPLES, 1 / tokens))  # masked tokens are still counted
    return dataclasses.replace(inputs, importance_weights=verdict.weights)


def without_signal(rig: Rig, weights: list[float]) -> set[int]:
    """Return the samples of which the naive loop's weights leave nothing."""
    bounds = rig.batch.facts.response_offsets
    return {
        i for i in range(NUM_SAMPLES) if not any(weights[t] * ADVANTAGES[i] for t in range(bounds[i], bounds[i + 1]))
    }


def every_correction(rank: int, world: int, family: str, layout: tuple[str, ...], cut: dict) -> dict[str, float]:
    found: dict[str, float] = {}
    with open_rig(family, *layout) as rig:
        rig.take(drawn()[1])
        rig.rules(**cut)
        seen, place = ForwardedLengths(rig), rig.backend.topology
        lengths = tokens_of(rig.batch.facts, share_prompts=False).whole
        for name, correction in CORRECTIONS.items():
            for drops in (False, True):
                plan, old, verdict = corrected(rig, correction, drops=drops)
                (mini_batch,) = plan.mini_batches
                seen.take()
                rig.run(plan, inputs_of(rig, plan, old, verdict))
                assert seen.take() == sorted(lengths[mini_batch.rank_samples(place.data_rank)].tolist())
                if drops and rig.backend.rules.repack:
                    assert set(mini_batch.dropped.tolist()) == without_signal(rig, wanted(name)[1])
                found[f"{name} {'skip' if drops else 'dense'}"] = relative_error(rig.taken(), wanted(name)[0])
                found[f"{name} masked"] = verdict.metrics["correction/masked_samples"]
    return found


@pytest.mark.parametrize(("layout", "cut"), pairwise(LAYOUTS, CUTS, kept=[("DP2", "repacked"), ("PP2", "as cut")]))
def test_corrected_gradient_equals_the_naive_loops(pool, layout, cut):
    """In every mode and δ, skip and dense; only what the naive loop's weights leave runs."""
    found = measured(pool, f"{layout} {FAMILY}", every_correction, CUTS[cut])[0]
    masked = {name.removesuffix(" masked"): count for name, count in found.items() if name.endswith(" masked")}
    errors = {name: error for name, error in found.items() if not name.endswith(" masked")}
    # e^{Σ d} adds the float32 roundings of a sample's log-probs to the weight: sequence modes show 2e-6, not 4e-7
    assert max(errors.values()) < TOLERANCE, errors
    # else it proves little
    assert all(masked[name] > 0 for name in ("sequence_mask", "geometric_mask", "off-policy", "both")), masked


@contextlib.contextmanager
def noisy_engine():
    """Let the embedded engine give log-probs that are 0.3 nats of a sample's own noise away from its own."""
    true = TransformersEngine.generate

    def generate(self, *args, on_finished, **kwargs):
        def noisy_group(number, group):
            on_finished(number, [_noisy(x) for x in group])

        return [_noisy(x) for x in true(self, *args, on_finished=noisy_group, **kwargs)]

    def _noisy(rollout):
        random = np.random.default_rng(zlib.crc32(rollout.sample_id.encode()))
        noise = random.normal(0.0, 0.3, len(rollout.logprobs))
        return dataclasses.replace(rollout, logprobs=tuple(float(x) for x in np.array(rollout.logprobs) + noise))

    with mock.patch.object(TransformersEngine, "generate", generate):
        yield


def noisy_command_line(rank: int, world: int, given: list[str]) -> tuple[int, str]:
    with noisy_engine():
        return command_line(rank, world, given)


@pytest.mark.parametrize("layout", quick(["parallel.pipeline=2", "parallel.pipeline=1"], "parallel.pipeline=1"))
def test_a_masking_run_ends_with_the_dense_runs_weights(pool, arithmetic, tmp_path, layout):
    """To the bit, as nothing is repacked; and the run differs from one without corrections."""
    weights, rows = {}, {}
    masked = [f"correction.{x}" for x in ("mode=token_mask", "cap=1.3", "floor=0.8", "off_policy_delta=0.1")]
    as_cut = ("plan.repack=false", "plan.samples_per_microbatch=2")
    for name, extra in (("exact", masked), ("off", masked), ("plain", ())):
        run_dir, mode = tmp_path / name, "exact" if name == "plain" else name
        given = arguments(arithmetic, run_dir, layout, f"skip.mode={mode}", *as_cut, *extra)
        results = pool.run(2, noisy_command_line, given, timeout_s=120)
        assert [code for code, _ in results] == [0, 0], results
        weights[name], rows[name] = weights_of(run_dir), rows_of(run_dir)
    assert all(torch.equal(weights["exact"][name], weights["off"][name]) for name in weights["off"])
    assert not all(torch.equal(weights["exact"][name], weights["plain"][name]) for name in weights["off"])
    found = [{k: v for k, v in row.items() if k.startswith("correction/")} for row in rows["exact"]]
    assert found == [{k: v for k, v in row.items() if k.startswith("correction/")} for row in rows["off"]]
    assert 0 < found[0]["correction/masked_share"] < 1 and found[0]["correction/masked_samples"] > 0, found
    dropped = {name: sum(row["skip/samples_dropped"] for row in rows[name]) for name in rows}
    assert dropped["exact"] > dropped["plain"] > dropped["off"] == 0, dropped
    assert not any(k.startswith("correction/") for row in rows["plain"] for k in row)


def test_a_correction_that_finds_nothing_to_correct_changes_no_bit(pool, arithmetic, tmp_path):
    """Engine and trainer agree to rounding, so that no sample is past δ: weights of exactly 1, over two epochs."""
    weights = []
    for extra in ((), ("correction.off_policy_delta=0.01",)):
        given = arguments(arithmetic, tmp_path / str(len(extra)), "train.epochs_per_rollout=2", *extra)
        ((code, said),) = pool.run(1, command_line, given, timeout_s=60)
        assert code == 0, said
        weights.append(weights_of(tmp_path / str(len(extra))))
    first = rows_of(tmp_path / "1")[0]
    assert first["correction/weight_mean"] == 1.0 and first["correction/masked_share"] == 0.0, first
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_run_whose_every_sample_is_masked_is_ghosts(pool, arithmetic, tmp_path):
    extra = ["correction.mode=sequence_mask", "correction.cap=1", "correction.floor=1"]
    ((code, said),) = pool.run(1, noisy_command_line, arguments(arithmetic, tmp_path, *extra), timeout_s=60)
    assert code == 0, said
    assert {row["step_kind"] for row in rows_of(tmp_path)} == {"GHOST"}
