"""A rollout's first optimizer step takes its own log-probs, detached, for π_old: no pass runs for its samples.

Gradients and weights are those of a run with the pass, and of the plain loop of test_policies; where both cut the batch
alike they are equal to the bit. The gap to the engine's log-probs is measured within the step.
"""

from unittest import mock

import numpy as np
import pytest

from megatron_rl.errors import EngineError
from megatron_rl.planning.num_steps import steps_per_rollout
from megatron_rl.trainer.passes.old_logprobs import needs_old_logprobs, passes_parts
from tests.equality.given_run import GivenRun, fresh_run, train_once
from tests.equality.given_samples import ADVANTAGES, BOUND, FAMILY, GROUPS, SETTINGS, STEPS, TERMS, drawn
from tests.equality.layouts import CP2, PP2, TP2
from tests.equality.rig import Rig, config_of, equal_by_name, open_rig
from tests.pairwise import quick
from tests.reference import relative_error

GAPS = ("train/logprob_gap_mean", "train/logprob_gap_k3", "train/logprob_gap_max")
WITH_PASS = "correction.old_logprobs=recompute"
FEW = ("train.samples_per_mini_batch=8",)
FEW_TERMS = ("ppo, KL and entropy", "gspo", "importance_sampling")  # of stages, the last alone computes a term
NEED_IT = (
    *(("correction.old_logprobs=recompute",), ("correction.old_logprobs=rollout",), ("skip.logprob_passes=false",)),
    *(("correction.mode=token_truncate",), ("correction.off_policy_delta=0.1",), ("train.epochs_per_rollout=2",)),
    ("reference.kl_in=reward", "loss.kl_coefficient=0.1"),
)


def passes_of(rig: Rig, run: GivenRun) -> list[np.ndarray]:
    """Train a run; return the samples of each of its log-prob passes."""
    chosen, take = [], rig.backend.logprobs
    with mock.patch.object(rig.backend, "logprobs", lambda batch, x: chosen.append(x.copy()) or take(batch, x)):
        train_once(run)
    return chosen


def every_term(rank: int, world: int, terms: tuple[str, ...], *layout: str) -> dict[str, dict[str, object]]:
    """Train once without and once with the pass, under each of the policy terms, and compare the two."""
    found: dict[str, dict[str, object]] = {}
    with open_rig(FAMILY, *SETTINGS, *layout) as rig:
        rig.take(drawn()[1], GROUPS)
        for name in terms:
            settings = (*SETTINGS, *layout, *TERMS[name])
            with_pass = fresh_run(rig, ADVANTAGES, *settings, WITH_PASS)
            passed, wanted = passes_of(rig, with_pass), rig.weights()
            run = fresh_run(rig, ADVANTAGES, *settings)
            left, weights = passes_of(rig, run), rig.weights()
            first = np.zeros_like(passed[0])
            first[run.plan.mini_batches[0].order] = True
            pairs = [(a.grad_norm, b.grad_norm) for a, b in zip(run.results, with_pass.results, strict=True)]
            found[name] = {
                "weights": relative_error(weights, wanted) if rig.is_main else 0.0,
                "norms": max(abs(a - b) / max(b, 1e-9) for a, b in pairs),
                "left out": np.array_equal(left[0], passed[0] & ~first) and (passed[0] & first).sum() == first.sum(),
                "gaps": max(abs(run.rows[0][name] / with_pass.rows[0][name] - 1) for name in GAPS),
                "coverage": (run.rows[0]["logprob/coverage"], with_pass.rows[0]["logprob/coverage"]),
                "elsewhere": [name for row in run.rows[1:] for name in GAPS if name in row],
            }
    return found


@pytest.mark.parametrize("layout", quick([(), (PP2,), (CP2,), (TP2,)], (), (PP2,)), ids=["DP2", "PP2", "CP2", "TP2"])
def test_the_first_step_needs_no_pass(pool, layout):
    terms = FEW_TERMS if layout == (PP2,) else tuple(TERMS)
    found = pool.run(2, every_term, terms, *layout, timeout_s=120)[0]
    assert tuple(found) == terms
    for name, cell in found.items():
        assert cell["left out"] and not cell["elsewhere"], (name, cell)
        assert cell["weights"] < BOUND and cell["norms"] < 1e-4 and cell["gaps"] < 1e-4, (name, cell)
        assert cell["coverage"][0] == cell["coverage"][1], (name, cell)


def the_same_cut(rank: int, world: int) -> tuple[list[int], bool, float]:
    """Return the samples passed with and without, whether both runs' weights are equal, and how far the step moved."""
    alive = np.where(ADVANTAGES == 0, 0.25, ADVANTAGES)
    with open_rig(FAMILY, *STEPS) as rig:
        rig.take(drawn()[1], GROUPS)
        start = rig.weights()
        passed = passes_of(rig, fresh_run(rig, alive, *STEPS, WITH_PASS))
        wanted = rig.weights()
        left = passes_of(rig, fresh_run(rig, alive, *STEPS))
        weights = rig.weights()
        counts = [int(passed[0].sum()), int(left[0].sum())]
        return counts, equal_by_name(weights, wanted), relative_error(weights, start)


def test_one_step_on_policy_runs_no_pass_and_ends_with_the_same_bits(pool):
    counts, equal, moved = pool.run(1, the_same_cut, timeout_s=60)[0]
    assert counts == [16, 0] and equal and moved > 1e-4, (counts, equal, moved)  # sample 12 holds no loss token


def too_large_a_gap(rank: int, world: int) -> str:
    with open_rig(FAMILY, *SETTINGS) as rig:
        rig.take(drawn()[1], GROUPS)
        run = fresh_run(rig, ADVANTAGES, *SETTINGS, "rollout.max_logprob_gap=1e-6", fresh=True)
        with pytest.raises(EngineError) as raised:
            train_once(run)
        assert not run.results  # the row of the step that measured it is not written
        return str(raised.value)


def test_a_gap_that_the_step_measures_ends_the_run(pool):
    for said in pool.run(2, too_large_a_gap, timeout_s=60):
        assert "rollout.max_logprob_gap=1e-06" in said and "nats per token" in said and "at most" in said


@pytest.mark.parametrize("settings", [(), ("skip.mode=off",), FEW, *NEED_IT], ids=str)
def test_the_setting_that_needs_the_pass_is_named(settings):
    config = config_of(*settings)
    needed, num_steps = needs_old_logprobs(config), steps_per_rollout(config.train, config.rollout, config.skip)
    assert needed == (settings[0] if settings in NEED_IT else None)
    is_worth_it = settings in (FEW, *NEED_IT) and settings != ("correction.old_logprobs=rollout",)
    assert passes_parts(config.correction, config.rollout.routing_replay, needed, num_steps) is is_worth_it
