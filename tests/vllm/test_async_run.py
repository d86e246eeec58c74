"""Whole runs that generate ahead on a real engine.

The modes agree, tokens carry their weights' versions, and a lost engine is mended.
"""

from __future__ import annotations

import pathlib

import pytest
import torch

from tests.runs.command import arguments, command_line, rows_of, timeless, trained_prompts, weights_of
from tests.vllm.served import run_killing_engines

pytestmark = pytest.mark.vllm
VLLM = (
    "rollout.engine=vllm",
    "run.deadline_s=150",
    "rollout.start_s=120",
    "rollout.request_s=60",
    "optimizer.lr=1e-3",
    "reward.functions=[tests.reward_functions:parity,math_verify]",
    "reward.num_workers=1",
    "rollout.producer.min_groups=2",
)
STREAMING = ("rollout.producer.mode=streaming",)
LAYOUTS = {
    "DP2, two engines": (2, ()),
    "TP2-PP2, one engine": (4, ("parallel.tensor=2", "parallel.pipeline=2", "rollout.num_engines=1")),
}


def firsts_of(run_dir: pathlib.Path) -> list[dict]:
    return [row for row in rows_of(run_dir) if "async/staleness_max" in row]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_streaming_without_staleness_is_the_synchronous_run(pool, arithmetic, tmp_path, layout):
    """Streaming without staleness is the synchronous run: the same prompts, samples and weights, to the bit.

    An engine batches what it has, so its log-probs may round otherwise: those of the trainer are trained on, and tokens
    are drawn by seeds of their own.
    """
    world, degrees = LAYOUTS[layout]
    found = []
    for name, mode in (("sync", ()), ("streaming", (*STREAMING, "rollout.producer.max_staleness_steps=0"))):
        given = arguments(arithmetic, tmp_path / name, *VLLM, *degrees, *mode)
        results = pool.run(world, command_line, given, timeout_s=240)
        assert [code for code, _ in results] == [0] * world, results
        found.append(tmp_path / name)
    one, two = found
    gaps = ("train/logprob_gap", "train/approx")
    for row, other in zip(rows_of(one), rows_of(two), strict=True):
        assert {k: v for k, v in timeless(row).items() if not k.startswith(gaps)} == {
            k: v for k, v in timeless(other).items() if not k.startswith(gaps)
        }
    assert all(torch.equal(value, weights_of(two)[name]) for name, value in weights_of(one).items())


def test_an_engine_that_dies_twice_while_it_works_ahead(pool, arithmetic, tmp_path):
    """An engine that dies twice while it works ahead costs no rollout.

    It is killed under a request by the second and by the third weights: what it owed is asked again, every rollout is
    trained, no prompt twice.
    """
    given = arguments(arithmetic, tmp_path, *VLLM, *STREAMING, "train.num_rollouts=5", "rollout.max_response_tokens=24")
    ((code, said, killed),) = pool.run(1, run_killing_engines, given, (2, 3), timeout_s=300)
    assert code == 0 and killed == 2, (said, killed)
    assert [row["rollout"] for row in firsts_of(tmp_path)] == [1, 2, 3, 4, 5]
    # two jobs under way may name two causes of one loss
    assert said.count("lost its engine") >= 2 and said.count("is started again") == 2, said
    prompts = trained_prompts(tmp_path)
    assert len(prompts) == len(set(prompts)) == 40


def test_weights_in_flight_in_a_whole_run(pool, arithmetic, tmp_path):
    """Weights are sent in flight in a whole run, with DP2 and two rollouts ahead.

    Every prompt is trained once, and nothing is older than the depth allows.
    """
    extra = (
        "rollout.producer.mode=prefetch",
        "rollout.producer.prefetch_rollouts=2",
        "weight_sync.in_flight=true",
        "correction.mode=token_truncate",
    )
    given = arguments(arithmetic, tmp_path, *VLLM, *extra, "train.num_rollouts=5", "rollout.max_response_tokens=32")
    results = pool.run(2, command_line, given, timeout_s=300)
    assert [code for code, _ in results] == [0, 0], results
    rows = firsts_of(tmp_path)
    assert [row["rollout"] for row in rows] == [1, 2, 3, 4, 5] and max(
        row["async/staleness_max"] for row in rows
    ) <= 4.0
    # for the first three rollouts' sake, then all were under way
    assert sum("perf/weight_sync_bytes" in row for row in rows) == 3
    prompts = trained_prompts(tmp_path)
    assert len(prompts) == len(set(prompts)) == 40
