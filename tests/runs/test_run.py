"""Whole runs with skips, silent ranks and ghosts end with the dense run's weights; no dropped sample is forwarded."""

import functools

import numpy as np
import pytest
import torch

from megatron_rl.planning.tokens import tokens_of
from megatron_rl.types import StepKind
from tests import reference
from tests.equality.rig import ForwardedLengths, equal_by_name, open_rig, sizes
from tests.pairwise import quick
from tests.reference import make_samples, reference_gradient, relative_error, tiny_model
from tests.workers.pool import Pool

NUM_SAMPLES, PER_MINI_BATCH, LR = 24, 6, 1e-3
SETTINGS = (f"optimizer.lr={LR}", "optimizer.weight_decay=0.1", f"train.samples_per_mini_batch={PER_MINI_BATCH}")
DISTRIBUTED = "optimizer.distributed=true"
EXTRAS = ["optimizer.distributed=false", DISTRIBUTED, "parallel.virtual_pipeline=2"]


def run_advantages(rollout: int) -> np.ndarray:
    """Return four mini-batches of six in rotation: all with signal, a third, one (a silent rank), none (a ghost)."""
    random = np.random.default_rng(rollout)
    advantages = random.normal(size=NUM_SAMPLES)
    for position in range(4):
        rows = advantages[position * PER_MINI_BATCH : (position + 1) * PER_MINI_BATCH]
        survivors = (6, 2, 1, 0)[(position + rollout) % 4]
        rows[random.permutation(PER_MINI_BATCH)[survivors:]] = 0.0
    return advantages


def one_run(drops: bool, pipeline: int, extra: tuple[str, ...], rollouts: int) -> dict[str, object]:
    counts = {"steps": 0, "ghosts": 0, "silent": 0, "dropped": 0}
    given = (*sizes(1, pipeline), *SETTINGS, *extra)
    with open_rig("qwen2_tied", *given, samples=NUM_SAMPLES, unique_lengths=True) as rig:
        seen, place = ForwardedLengths(rig), rig.backend.topology
        lengths = tokens_of(rig.batch.facts, share_prompts=False).whole
        assert len(set(lengths.tolist())) == NUM_SAMPLES  # a length names its sample
        for rollout in range(rollouts):
            advantages = run_advantages(rollout)
            signal = advantages != 0 if drops else np.ones(NUM_SAMPLES, dtype=bool)
            old = rig.backend.logprobs(rig.batch, signal)
            passed = rig.backend.plan_pass(rig.batch, signal).mini_batches[0]
            assert seen.take() == sorted(lengths[passed.rank_samples(place.data_rank)].tolist())
            plan = rig.plan(advantages, drops=drops)
            for position, mini_batch in enumerate(plan.mini_batches):
                rig.accumulate(advantages, plan, position, old=old.flat)
                forwarded = seen.take()
                assert not set(forwarded) & set(lengths[mini_batch.dropped].tolist()), "a dropped sample was forwarded"
                assert forwarded == sorted(lengths[mini_batch.rank_samples(place.data_rank)].tolist())
                rig.backend.optim_step(mini_batch.kind)
                counts["steps"] += 1
                counts["ghosts"] += mini_batch.kind is StepKind.GHOST
                counts["silent"] += mini_batch.silent_ranks
                counts["dropped"] += len(mini_batch.dropped)
        return {"weights": rig.weights(), "start": rig.model.state_dict(), **counts}


def skip_against_dense(rank: int, world: int, pipeline: int, extra: tuple, rollouts: int) -> dict[str, object]:
    dense, skip = (one_run(drops, pipeline, extra, rollouts) for drops in (False, True))
    gaps = {k: float((skip["weights"][k] - x).abs().max()) for k, x in dense["weights"].items()}
    return {"bitwise": equal_by_name(skip["weights"], dense["weights"]),
            "error": relative_error(skip["weights"], dense["weights"]), "largest": max(gaps.values()),
            "where": max(gaps, key=gaps.__getitem__),
            "travelled": relative_error({k: v for k, v in dense["start"].items() if k in gaps}, dense["weights"]),
            **{k: skip[k] for k in ("steps", "ghosts", "silent", "dropped")}, "dense dropped": dense["dropped"]}


@pytest.mark.parametrize("extra", quick(EXTRAS, DISTRIBUTED))
def test_run_of_24_steps_equals_dense(pool: Pool, extra: str) -> None:
    for found in pool.run(4, skip_against_dense, 2, (extra,), 6, timeout_s=90):
        assert found["steps"] >= 20 and found["ghosts"] >= 4 and found["silent"] >= 4, found  # else it proves nothing
        assert found["dropped"] > 60 and found["dense dropped"] == 0 and found["travelled"] > 1e-3, found
        # Repacking changes the order of sums; AdamW amplifies that where a gradient is near zero (k.bias: softmax does
        # not see it), so all weights together, and per tensor a bound in units of what AdamW can move in so many steps.
        assert found["error"] < 1e-5, found
        assert found["largest"] <= 0.05 * LR * found["steps"], found


@pytest.mark.parametrize("dtype", quick(["float32", "bfloat16"], "bfloat16"))
def test_run_without_repack_equals_dense_bitwise(pool: Pool, dtype: str) -> None:
    extra = ("plan.repack=false", "plan.samples_per_microbatch=1", f"model.dtype={dtype}", DISTRIBUTED)
    for found in pool.run(4, skip_against_dense, 2, extra, 2, timeout_s=90):
        assert found["bitwise"] and found["dropped"] >= 30 and found["ghosts"] >= 2 and found["silent"] >= 2, found


# Two epochs over one rollout, against a plain AdamW loop.
EPOCH_SETTINGS = ("optimizer.lr=0.003", "optimizer.weight_decay=0.1", "optimizer.clip_grad=0.5",
                  "train.samples_per_mini_batch=4")
EPOCH_LAYERS = 4  # at which the second epoch does not clip every token


def epoch_advantages() -> np.ndarray:
    return np.array([0.8, 0.0, -1.1, 0.4, 0.0, 0.0, 0.0, 0.0, -0.6, 0.0, 1.3])  # the second mini-batch is a ghost


@functools.cache
def plain_adamw(family: str) -> tuple[dict[str, torch.Tensor], list[float], list[torch.Tensor]]:
    """Return weights, norms before clipping and old log-probs of torch's AdamW, one sample at a time, without skip.
    Megatron-Core decays matrices only (0.16.1 ``optimizer/__init__.py``): neither biases nor norms.
    """
    _, model = tiny_model(family, layers=EPOCH_LAYERS)
    samples = reference.near_policy(model, make_samples(11))
    with torch.no_grad():
        old = [reference.reference_logprobs(model, s)[0] for s in samples]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.003, betas=(0.9, 0.999), eps=1e-8)
    norms = []
    for _ in range(2):
        for start in range(0, 11, 4):
            part = slice(start, min(start + 4, 11))
            prompts = [i // 2 for i in range(11)][part]
            reference_gradient(model, samples[part], prompts, list(epoch_advantages()[part]), old=old[part])
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
    return {k: v.clone() for k, v in model.state_dict().items()}, norms, old


def two_epochs(rank: int, world: int, family: str, tensor: int, pipeline: int) -> dict[str, object]:
    with open_rig(family, *sizes(tensor, pipeline), *EPOCH_SETTINGS, samples=11, layers=EPOCH_LAYERS) as rig:
        advantages, norms = epoch_advantages(), []
        old = rig.backend.logprobs(rig.batch, advantages != 0).flat
        for _ in range(2):
            norms += [result.grad_norm for result in rig.step(advantages, drops=True, old=old)]
        weights = rig.weights()
        gradient = rig.gradient(advantages, rig.plan(advantages, drops=True), 0, old=old)
        if not rig.is_main:
            return {}
        wanted, wanted_norms, reference_old = plain_adamw(family)
        # Off-policy by now: the gradient at the weights as they are, old log-probs as they were.
        rig.model.load_state_dict(weights, strict=False)
        expected, _ = reference_gradient(rig.model, rig.samples[:4], rig.groups[:4], list(advantages[:4]),
                                         old=reference_old[:4])
        return {"weights": relative_error(weights, {k: v for k, v in wanted.items() if k in weights}),
                "gradient": relative_error(gradient, expected),
                "norms": float(np.abs(np.array(norms) - wanted_norms).max()), "ghost norms": [norms[1], norms[4]],
                "clipped": sum(n > 0.5 for n in norms)}


@pytest.mark.parametrize(("family", "tensor", "pipeline", "data"), [
    ("qwen3", 1, 2, 2), pytest.param("llama", 2, 1, 2, marks=pytest.mark.long), ("qwen2_tied", 2, 2, 1),
    ("qwen2_tied", 1, 1, 1),
])
def test_two_epochs_equal_a_plain_adamw_loop(pool: Pool, family: str, tensor: int, pipeline: int, data: int) -> None:
    found = pool.run(tensor * pipeline * data, two_epochs, family, tensor, pipeline, timeout_s=60)[0]
    assert found["ghost norms"] == [0.0, 0.0] and found["clipped"] >= 1, found
    assert found["weights"] < 1e-5, found  # as for the run of 24 steps: AdamW on gradients that agree to 1e-6
    assert found["gradient"] < 1e-5, found  # same weights on both sides: float32 and the order of sums
    assert found["norms"] < 1e-3, found  # weights apart by 1e-6 after five steps
