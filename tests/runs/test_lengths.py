"""Whole runs whose rollouts start the longest groups first, or leave their stragglers to the next rollout."""

from __future__ import annotations

import json
import pathlib
import shutil

import pytest
import torch

from tests.runs.command import (
    SAVED,
    arguments,
    command_line,
    rows_of,
    state_of,
    timeless,
    trained_prompts,
    weights_of,
    weights_of_last,
)
from tests.runs.straggling_engine import straggling

LONGEST_FIRST = "rollout.start_order=longest_first"
STRAGGLING = (
    "rollout.engine=vllm",  # tests/runs/straggling_engine.py stands in
    "run.deadline_s=120",
    "rollout.start_s=60",
    "rollout.request_s=60",
    "rollout.producer.mode=prefetch",
    "rollout.producer.straggler_share=0.25",
    "weight_sync.in_flight=true",
    "correction.mode=token_truncate",
    "rollout.max_logprob_gap=null",
)


def end_of(pool, world: int, given: list[str], run=command_line) -> None:
    results = pool.run(world, run, given, timeout_s=240)
    assert [code for code, _ in results] == [0] * world, results


def few_prompts(folder: pathlib.Path, out: pathlib.Path, count: int) -> str:
    path = out / "few.jsonl"
    path.write_text("\n".join((folder / "train.jsonl").read_text().splitlines()[:count]) + "\n")
    return f"data.train={path}"


@pytest.mark.parametrize("world", [1, 2])
def test_longest_first_equals_drawn_order_bit_for_bit(pool, arithmetic, tmp_path, world):
    """Two epochs in either order give the same rows, trace and weights; in the second one all lengths are known.

    At two ranks another one may sample a group, in another batch, so that the embedded engine's log-probs round
    otherwise: those of the trainer are trained on, and the gap between the two is left out of the comparison.
    """
    found = {}
    engine_alone = "train/logprob_gap" if world > 1 else "nothing"
    for order in ("drawn", "longest_first"):
        folder = tmp_path / order
        extra = (few_prompts(arithmetic, tmp_path, 16), f"rollout.start_order={order}", "train.num_rollouts=4")
        end_of(pool, world, arguments(arithmetic, folder, *extra, *SAVED, "rollout.max_response_tokens=24"))
        lengths = state_of(folder, 4)["feed"]["lengths"]
        assert len(lengths) == (16 if order == "longest_first" else 0)
        rows = [{k: v for k, v in timeless(row).items() if not k.startswith(engine_alone)} for row in rows_of(folder)]
        found[order] = rows, (folder / "trace.jsonl").read_text()
        assert all(row["perf/rollout_tail_s"] >= 0.0 for row in rows_of(folder) if "reward/mean" in row)
    assert found["drawn"] == found["longest_first"]
    one, other = (weights_of(tmp_path / order) for order in found)
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_lengths_go_on_from_a_checkpoint(pool, arithmetic, tmp_path):
    """A run that goes on from a checkpoint has the lengths of the whole one, and ends with its queue and weights."""
    whole, part = tmp_path / "whole", tmp_path / "part"
    given = (
        few_prompts(arithmetic, tmp_path, 16),
        LONGEST_FIRST,
        *SAVED,
        "rollout.producer.mode=prefetch",
        "train.num_rollouts=4",
    )
    end_of(pool, 2, arguments(arithmetic, whole, *given))
    shutil.copytree(whole, part)
    for iteration in (3, 4):
        shutil.rmtree(part / "checkpoints" / f"iter_{iteration:07d}")
    shutil.rmtree(part / "checkpoints" / "step_8")
    before = state_of(part, 2)["feed"]["lengths"]
    end_of(pool, 2, arguments(arithmetic, part, *given))
    assert len(before) == 16 and state_of(part, 4)["feed"] == state_of(whole, 4)["feed"]
    assert [timeless(row) for row in rows_of(part)] == [timeless(row) for row in rows_of(whole)]
    one, other = weights_of(whole), weights_of(part)
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def check_straggling(run_dir: pathlib.Path, num_rollouts: int, *, limit: float) -> list[float]:
    """Check that each rollout trained its 8 groups, none twice and none too old; return the stragglers of each."""
    firsts = [row for row in rows_of(run_dir) if "async/stragglers" in row]
    assert [row["rollout"] for row in firsts] == list(range(1, num_rollouts + 1))
    batches = [json.loads(line)["prompts"] for line in (run_dir / "trace.jsonl").read_text().splitlines()]
    assert [len(batch) for batch in batches] == [8] * num_rollouts
    assert len(set(trained_prompts(run_dir))) == 8 * num_rollouts
    assert max(row["async/staleness_max"] for row in firsts) <= limit
    assert sum(row["async/dropped_stale"] for row in firsts) == 0.0
    return [row["async/stragglers"] for row in firsts]


@pytest.mark.parametrize("ahead", [1, 2])
def test_every_group_is_trained_once_beside_stragglers(pool, arithmetic, tmp_path, ahead):
    """At DP2 each rollout but the last leaves 2 of its groups to the next, within the bound of staleness."""
    limit = 2 * (ahead + 1)
    extra = (
        f"rollout.producer.prefetch_rollouts={ahead}",
        f"rollout.producer.max_staleness_steps={limit}",
        "train.num_rollouts=5",
    )
    end_of(pool, 2, arguments(arithmetic, tmp_path, *STRAGGLING, *extra), straggling)
    assert check_straggling(tmp_path, 5, limit=limit) == [2.0] * 4 + [0.0]


def test_stragglers_go_on_from_a_checkpoint(pool, arithmetic, tmp_path):
    """A run that goes on has the groups that were left under way: every prompt is trained once, by one rank of two too.

    With ``straggler_share: 0`` it goes on as well, and takes them in.
    """
    whole = tmp_path / "whole"
    given = (*STRAGGLING, *SAVED, "train.num_rollouts=4")
    end_of(pool, 2, arguments(arithmetic, whole, *given), straggling)
    check_straggling(whole, 4, limit=4.0)
    assert len(state_of(whole, 2)["feed"]["left"]) == 2 and not state_of(whole, 4)["feed"]["left"]
    for world, share in ((2, 0.25), (1, 0.25), (2, 0)):
        part = tmp_path / f"by-{world}-{share}"
        shutil.copytree(whole, part)
        for iteration in (3, 4):
            shutil.rmtree(part / "checkpoints" / f"iter_{iteration:07d}")
        shutil.rmtree(part / "checkpoints" / "step_8")
        again = (*given, f"rollout.producer.straggler_share={share}")
        end_of(pool, world, arguments(arithmetic, part, *again), straggling)
        prompts = trained_prompts(part)
        assert len(prompts) == 32 and sorted(prompts) == sorted(trained_prompts(whole)), (world, share)
        assert weights_of_last(part)


def test_an_epoch_ends_with_every_prompt_trained_once(pool, arithmetic, tmp_path):
    """Under ``train.epochs`` the stragglers of the last prompts make up the last rollout: 20 prompts in 3 rollouts."""
    data = few_prompts(arithmetic, tmp_path, 20)
    extra = (data, "train.num_rollouts=null", "train.epochs=1")
    end_of(pool, 2, arguments(arithmetic, tmp_path / "run", *STRAGGLING, *extra), straggling)
    prompts = trained_prompts(tmp_path / "run")
    assert len(prompts) == len(set(prompts)) == 20
    batches = [json.loads(line)["prompts"] for line in (tmp_path / "run/trace.jsonl").read_text().splitlines()]
    assert [len(batch) for batch in batches] == [8, 8, 4]
