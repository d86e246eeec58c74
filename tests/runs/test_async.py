"""Rollouts ahead of training, in parts, replayed and asked again.

On every layout the samples are the same, in the same order, to the bit.
"""

from __future__ import annotations

import math
import pathlib
import shutil

import pytest
import torch

from tests.pairwise import quick
from tests.runs.command import arguments, command_line, rows_of, timeless, trained_prompts, weights_of

LAYOUTS = {"DP2": (2, ()), "TP2-PP2": (4, ("parallel.tensor=2", "parallel.pipeline=2"))}
VERIFIED = ("reward.functions=[tests.reward_functions:unsteady,math_verify]", "reward.weights=[1.0,0.5]")
MODES = {
    "sync": ("rollout.producer.mode=sync",),
    "prefetch": ("rollout.producer.mode=prefetch", "rollout.producer.prefetch_rollouts=2"),
    "streaming": ("rollout.producer.mode=streaming",),
    "streaming-workers": ("rollout.producer.mode=streaming", "reward.num_workers=1"),
}
PARTS = "rollout.producer.min_groups=3"
AHEAD = (*MODES["prefetch"], "rollout.producer.prefetch_rollouts=1")


def end_of(pool, world: int, given: list[str], timeout_s: float = 240) -> None:
    results = pool.run(world, command_line, given, timeout_s=timeout_s)
    assert [code for code, _ in results] == [0] * world, results


@pytest.mark.parametrize("layout", quick(LAYOUTS, "DP2"))
def test_producers_without_staleness_train_the_same(pool, arithmetic, tmp_path, layout):
    """Producers without staleness train the synchronous run: its rows, trace and weights, in every mode.

    ``max_staleness_steps`` is 0, and the math-verify rewards take their time.
    """
    world, degrees = LAYOUTS[layout]
    found = {}
    for mode, extra in MODES.items():
        folder = tmp_path / mode
        end_of(
            pool,
            world,
            arguments(arithmetic, folder, *degrees, *VERIFIED, *extra, PARTS, "rollout.producer.max_staleness_steps=0"),
        )
        found[mode] = (
            [timeless(row) for row in rows_of(folder)],
            (folder / "trace.jsonl").read_text(),
            weights_of(folder),
        )
    rows, trace, weights = found.pop("sync")
    assert len(rows) == 4 and {row["async/staleness_max"] for row in rows if "async/staleness_max" in row} == {0.0}
    for mode, (its_rows, its_trace, its_weights) in found.items():
        assert its_rows == rows and its_trace == trace, mode
        assert all(torch.equal(weights[name], its_weights[name]) for name in weights), mode


@pytest.mark.parametrize("layout", quick(LAYOUTS, "DP2"))
def test_a_run_ahead_repeats_to_the_bit(pool, arithmetic, tmp_path, layout):
    """A run one rollout ahead repeats to the bit, as no clock decides anything.

    With two optimizer steps each, rollouts are stale by two from the second one on.
    """
    world, degrees = LAYOUTS[layout]
    found = []
    for name in ("one", "two"):
        folder = tmp_path / name
        extra = (*AHEAD, PARTS, "train.num_rollouts=4", "correction.mode=token_truncate")
        end_of(pool, world, arguments(arithmetic, folder, *degrees, *VERIFIED, *extra))
        found.append(([timeless(row) for row in rows_of(folder)], weights_of(folder)))
    (rows, weights), (other_rows, other_weights) = found
    assert rows == other_rows and all(torch.equal(weights[name], other_weights[name]) for name in weights)
    firsts = [row for row in rows if "async/staleness_max" in row]
    assert [row["async/staleness_max"] for row in firsts] == [0.0, 2.0, 2.0, 2.0]
    assert [row["rollout/weight_version_min"] for row in firsts] == [0.0, 0.0, 2.0, 4.0]
    assert any(row["correction/weight_mean"] != 1.0 for row in firsts)


def test_staleness_is_bounded_by_admission(pool, arithmetic, tmp_path):
    """Admission bounds staleness.

    ``max_staleness_steps: 1`` with two steps a rollout leaves no room for one ahead; with
    ``weight_sync.interval_steps`` the engines lag.
    """
    for name, extra, wanted in (
        ("bound", ("rollout.producer.max_staleness_steps=1",), [0.0] * 4),
        ("interval", ("weight_sync.interval_steps=4",), [0.0, 2.0, 4.0, 2.0]),
        ("both", ("weight_sync.interval_steps=4", "rollout.producer.max_staleness_steps=2"), [0.0, 2.0, 2.0, 2.0]),
    ):
        folder = tmp_path / name
        end_of(pool, 1, arguments(arithmetic, folder, *AHEAD, *extra, "train.num_rollouts=4"))
        assert [row["async/staleness_max"] for row in rows_of(folder) if "async/staleness_max" in row] == wanted, name


AGAIN = (
    "reward.functions=[tests.reward_functions:mostly_dead,math_verify]",
    "reward.weights=[1.0,0.5]",
    "replay.capacity_groups=6",
    "replay.max_uses=2",
    "reroll.max_groups=2",
    "reroll.start_fraction=0.25",
    "reroll.max_attempts=2",
    "train.num_rollouts=6",
    "optimizer.schedule=constant",
)


@pytest.mark.parametrize("layout", quick(LAYOUTS, "TP2-PP2"))
def test_replay_and_reroll_on_every_layout(pool, arithmetic, tmp_path, layout):
    """Replay and re-roll on every layout equal the run of one process, ahead and with both buffers.

    Prompts, rewards and buffers are the same, weights to rounding.
    """
    world, degrees = LAYOUTS[layout]
    given = (*AHEAD, *AGAIN)
    found = []
    for ranks, layout_degrees, folder in ((1, (), tmp_path / "alone"), (world, degrees, tmp_path / layout)):
        end_of(pool, ranks, arguments(arithmetic, folder, *layout_degrees, *given))
        rows = [row for row in rows_of(folder) if "async/staleness_max" in row]
        counted = [
            {name: value for name, value in row.items() if name.startswith(("replay/", "reroll/", "reward/"))}
            for row in rows
        ]
        found.append((counted, weights_of(folder)))
    (counted, weights), (other, other_weights) = found
    assert counted == other
    assert sum(row["replay/replaced"] for row in counted) > 4 and counted[-1]["reroll/issued"] > 2
    difference = math.sqrt(sum(((weights[name] - other_weights[name]).double() ** 2).sum().item() for name in weights))
    assert difference / math.sqrt(sum((weights[name].double() ** 2).sum().item() for name in weights)) < 1e-5


def test_a_run_that_goes_on_from_any_checkpoint_equals_the_whole_one(pool, arithmetic, tmp_path):
    """A run that goes on from any of its checkpoints equals the whole one, as a checkpoint carries all that there is.

    The run has DP2, streaming, one rollout ahead, replay, re-roll and reward workers. Going on with as many ranks is
    equal to the bit; with one rank of two, whose gradients sum otherwise, the same groups are trained.
    """
    given = (
        "checkpoint.save_every_rollouts=1",
        "checkpoint.keep_last=null",
        *MODES["streaming"],
        PARTS,
        *AGAIN,
        "reward.num_workers=1",
    )
    whole = tmp_path / "whole"
    end_of(pool, 2, arguments(arithmetic, whole, *given))
    for taken, world in ((0, 2), (3, 2), (5, 2), (3, 1)):
        part = tmp_path / f"from-{taken}-by-{world}"
        shutil.copytree(whole, part)
        for iteration in range(taken + 1, 7):
            shutil.rmtree(part / "checkpoints" / f"iter_{iteration:07d}")
        shutil.rmtree(part / "checkpoints" / "step_12")
        end_of(pool, world, arguments(arithmetic, part, *given))
        if world == 1:
            names = (
                "reward/mean",
                "async/staleness_max",
                "replay/size",
                "replay/replaced",
                "reroll/issued",
                "reroll/size",
            )
            assert [[row.get(name) for name in names] for row in rows_of(part)] == [
                [row.get(x) for x in names] for row in rows_of(whole)
            ]
            continue
        for row, other in zip(rows_of(whole), rows_of(part), strict=True):
            assert timeless(row) == timeless(other), taken
        one, two = weights_of(whole), weights_of(part)
        assert all(torch.equal(one[name], two[name]) for name in one), taken
        assert (whole / "trace.jsonl").read_text() == (part / "trace.jsonl").read_text()


def test_what_is_too_old_is_dropped_counted_and_asked_again(pool, arithmetic, tmp_path):
    """Rollouts that are too old are dropped, counted and asked again.

    A run ahead by two goes on under a smaller bound: its pending rollouts are too old, and every prompt is trained once
    all the same (an epoch of 48 prompts, none twice).
    """
    given = (
        "data.train=" + str(few_prompts(arithmetic, tmp_path, 48)),
        *MODES["prefetch"],
        "optimizer.schedule=constant",
    )
    given = (
        *given,
        "checkpoint.save_every_rollouts=1",
        "checkpoint.keep_last=null",
        "train.num_rollouts=null",
        "train.epochs=1",
    )
    whole, part = tmp_path / "whole", tmp_path / "part"
    end_of(pool, 2, arguments(arithmetic, whole, *given))
    assert len(trained_prompts(whole)) == len(set(trained_prompts(whole))) == 48
    shutil.copytree(whole, part)
    for iteration in range(4, 7):
        shutil.rmtree(part / "checkpoints" / f"iter_{iteration:07d}")
    shutil.rmtree(part / "checkpoints" / "step_12")
    end_of(pool, 2, arguments(arithmetic, part, *given, "rollout.producer.max_staleness_steps=2"))
    rows = [row for row in rows_of(part) if "async/staleness_max" in row]
    assert (
        sum(row["async/dropped_stale"] for row in rows) == 16
        and max(row["async/staleness_max"] for row in rows[3:]) == 2.0
    )
    assert sorted(trained_prompts(part)) == sorted(trained_prompts(whole))


def few_prompts(folder: pathlib.Path, out: pathlib.Path, count: int) -> pathlib.Path:
    path = out / "few.jsonl"
    path.write_text("\n".join((folder / "train.jsonl").read_text().splitlines()[:count]) + "\n")
    return path


@pytest.mark.parametrize("layout", quick(LAYOUTS, "DP2"))
def test_dynamic_sampling_fills_every_place_or_stops(pool, arithmetic, tmp_path, layout):
    """Dynamic sampling fills every place or stops.

    Two prompts of three never have signal: refilled until none is left, and then nothing is skipped; with one round
    some stay.
    """
    world, degrees = LAYOUTS[layout]
    given = ("reward.functions=[tests.reward_functions:mostly_dead]", "rollout.samples_per_prompt=8", *degrees)
    folder = tmp_path / "filled"
    end_of(pool, world, arguments(arithmetic, folder, *given, "rollout.dynamic_sampling.max_rounds=30"))
    rows = rows_of(folder)
    assert all(row["skip/zero_advantage_ratio"] == 0.0 for row in rows)
    firsts = [row for row in rows if "dynamic_sampling/rounds" in row]
    assert len(firsts) == 2 and all(
        row["dynamic_sampling/left"] == 0.0 and row["dynamic_sampling/rounds"] > 1 for row in firsts
    )
    once = ("rollout.dynamic_sampling.max_rounds=1", "train.num_rollouts=1")
    end_of(pool, world, arguments(arithmetic, tmp_path / "once", *given, *once))
    (left,) = [row["dynamic_sampling/left"] for row in rows_of(tmp_path / "once") if "dynamic_sampling/left" in row]
    assert left > 0
    stopped = arguments(arithmetic, tmp_path / "stopped", *given, *once, "rollout.dynamic_sampling.on_exhausted=fail")
    results = pool.run(world, command_line, stopped, timeout_s=120)
    assert [code for code, _ in results] == [1] * world
    assert f"{left:.0f} of 8 groups have no signal after 1 rounds" in results[0][1]


def test_what_is_generated_meanwhile_is_what_lagging_weights_generate(pool, arithmetic, tmp_path):
    """Generation during training is that of lagging weights, equal to the bit.

    The second rollout of a run ahead comes from the first weights, as that of a synchronous run whose engine lags.
    """
    found = []
    for name, extra in (("ahead", AHEAD), ("lagging", ("weight_sync.interval_steps=100",))):
        end_of(
            pool, 2, arguments(arithmetic, tmp_path / name, *extra, "optimizer.lr=1e-2", "correction.mode=token_mask")
        )
        found.append(([timeless(row) for row in rows_of(tmp_path / name)], weights_of(tmp_path / name)))
    (rows, weights), (other_rows, other_weights) = found
    assert rows == other_rows and rows[2]["async/staleness_max"] == 2.0 and rows[2]["train/logprob_gap_mean"] > 1e-3
    assert all(torch.equal(value, other_weights[name]) for name, value in weights.items())
