"""Equal samples of which one runs give the gradients, weights and metrics of all of them, on real schedules.

The runs without merging are compared with plain loops in test_policies.py, test_products.py and test_correction.py.
"""

import dataclasses
import functools
import itertools

import numpy as np
import pytest

from megatron_rl.types import Sample
from tests.equality.given_run import fresh_run, train_once
from tests.equality.given_samples import BOUND, FAMILY, STEPS, TERMS
from tests.equality.rig import open_rig
from tests.equality.rows import measured
from tests.pairwise import quick
from tests.reference import make_samples, near_policy, relative_error, tiny_model

# Which of six samples each one is, and its advantage. Two groups of five. The third has other advantages for one
# content, as noise gives, and one without signal. A mini-batch of six cuts through the second.
CONTENT = [0, 1, 0, 0, 1, 2, 3, 2, 2, 2, 4, 4, 4, 5, 5]
ADVANTAGES = np.array([0.8, -1.2, 0.8, 0.8, -1.2, 0.5, -2.0, 0.5, 0.5, 0.5, 0.7, -0.3, 0.7, 0.0, 0.0])
GROUPS = [i // 5 for i in range(len(CONTENT))]
# what runs, by samples of a mini-batch
RUN = {None: [0, 1, 5, 6, 10, 11], 6: [0, 1, 5, 6, 7, 10, 11, 12], 7: [0, 1, 5, 6, 7, 10, 11]}
MERGED = {
    **TERMS,
    "masked tokens": ("correction.mode=token_mask", "correction.cap=1.3"),
    "sequence weights": ("correction.mode=sequence_truncate", "correction.cap=1.2"),
    "two epochs": ("train.epochs_per_rollout=2",),
    "one step": ("skip.steps=merge",),
    "own log-probs": (),
    "kept": ("loss.denominator=kept", "skip.mode=approximate", "loss.reduction=sequence_mean"),
    "prompt_mean": ("loss.reduction=prompt_mean",),
}
LAYOUTS = ("one", "DP2", "PP2", "TP2", "CP2", "PP2-DP2")
# metrics of what ran, of passes over it, and of seconds
SIZES = ("skip/", "tokens/", "time/", "perf/", "cost/", "logprob/coverage", "train/logprob_gap")


@functools.cache
def drawn() -> list[Sample]:
    _, model = tiny_model(FAMILY)
    contents = near_policy(model, make_samples(6), spread=0.2)
    return [dataclasses.replace(contents[i], sample_id=f"{n}@0#0") for n, i in enumerate(CONTENT)]


def merged_against_all(rank: int, world: int, family: str, layout: tuple[str, ...], size: int | None) -> dict:
    found = {}
    with open_rig(family, *layout) as rig:
        rig.take(drawn(), GROUPS)
        for name, settings in MERGED.items():
            runs, weights = {}, {}
            for merges in (False, True):
                given = [] if size is None else [f"train.samples_per_mini_batch={size}"]
                given += [*STEPS, *settings, f"skip.merge_repeats={str(merges).lower()}"]
                runs[merges] = train_once(fresh_run(rig, ADVANTAGES, *given))
                weights[merges] = {key: value.clone() for key, value in rig.weights().items()}
            plain, merged = (runs[merges].rows for merges in (False, True))
            assert len(plain) == len(merged) > 0
            ran = np.concatenate([step.ran for step in runs[True].plan.mini_batches]).tolist()
            all_ran = np.concatenate([step.ran for step in runs[False].plan.mini_batches]).tolist()
            found[name] = {
                "ran": sorted(ran),
                "all": sorted(all_ran),
                "weights": relative_error(weights[True], weights[False]) if rig.is_main else 0.0,
                "norms": max(abs(a.grad_norm - b.grad_norm) / max(b.grad_norm, 1e-9)
                             for a, b in zip(runs[True].results, runs[False].results, strict=True)),
                "metrics": {key: (row[key], other.get(key)) for row, other in zip(plain, merged, strict=True)
                            for key in row if not key.startswith(SIZES)},
                "merged": sum(row.get("skip/samples_merged", 0) for row in merged),
            }
    return found


@pytest.mark.parametrize("case", quick(itertools.product(LAYOUTS, RUN), ("DP2", 7), ("PP2", None)), ids=str)
def test_one_of_equal_samples_gives_the_step_of_all(pool, case):
    layout, size = case
    for rank, found in enumerate(measured(pool, f"{layout} {FAMILY}", merged_against_all, size)):
        for term, each in found.items():
            assert each["all"] == list(range(13)), (term, each)
            wanted = RUN[None if term == "one step" else size]
            assert each["ran"] == (wanted if "masked" not in term else each["ran"]), (term, each)
            assert each["weights"] < BOUND and each["norms"] < BOUND, (rank, term, each)
            for key, (plain, merged) in each["metrics"].items():
                same = merged is not None and np.isclose(plain, merged, rtol=1e-4, atol=1e-6)
                assert same, (term, key, plain, merged)
            assert each["merged"] > 0, term


def with_an_engines_rounding(rank: int, world: int, family: str, layout: tuple[str, ...]) -> dict[str, dict]:
    """Equal samples get other log-probs of the engine each; return what runs, and the error, by settings."""
    found = {}
    for name, settings in READ_BY.items():
        with open_rig(family, *layout, *settings) as rig:
            noise = np.random.default_rng(0)
            rig.take([dataclasses.replace(x, logprobs=x.logprobs + noise.normal(0, 1e-3, len(x.logprobs)).astype("f"))
                      for x in drawn()], GROUPS)
            runs, weights = {}, {}
            for merges in (False, True):
                given = (*STEPS, *settings, f"skip.merge_repeats={str(merges).lower()}")
                runs[merges] = train_once(fresh_run(rig, ADVANTAGES, *given))
                weights[merges] = {key: value.clone() for key, value in rig.weights().items()}
            found[name] = {"ran": runs[True].plan.mini_batches[0].ran.tolist(),
                           "error": relative_error(weights[True], weights[False]) if rig.is_main else 0.0}
    return found


READ_BY = {
    "nothing": (),
    "dro": ("loss.policy=dro", "skip.mode=approximate"),
    "correction": ("correction.mode=token_truncate",),
    "old log-probs": ("correction.old_logprobs=rollout",),
}


def test_log_probs_that_an_engine_rounded_tell_samples_apart_only_where_the_loss_reads_them(pool):
    for found in measured(pool, f"PP2 {FAMILY}", with_an_engines_rounding):
        for name, each in found.items():
            assert each["ran"] == (RUN[None] if name == "nothing" else list(range(13))), (name, each)
            assert each["error"] < BOUND


def without_repack(rank: int, world: int, family: str, layout: tuple[str, ...]) -> list[int]:
    """Return the samples that run where the others of a micro-batch run beside a kept one."""
    with open_rig(family, *layout, "plan.repack=false") as rig:
        rig.take(drawn(), GROUPS)
        run = train_once(fresh_run(rig, ADVANTAGES, *STEPS, "plan.repack=false"))
        return sorted(run.plan.mini_batches[0].ran.tolist())


def test_nothing_is_merged_without_repack(pool):
    """There the samples beside a kept one run too, and would count a second time."""
    for found in measured(pool, f"PP2 {FAMILY}", without_repack):
        assert set(range(13)) <= set(found)


def test_the_cases_are_told_apart() -> None:
    contents = [sample.token_ids.tobytes() for sample in drawn()]
    assert [contents.index(content) for content in contents] == [CONTENT.index(content) for content in CONTENT]
