"""Rollouts ahead of training, in parts, replayed and asked again: on every layout the same samples, to the bit."""

import pathlib

import pytest

from tests.pairwise import quick
from tests.runs.command import SAVED, apart, assert_same_run, few_prompts, firsts_of, rows_of, trained_prompts

LAYOUTS = {"DP2": (2, ()), "TP2-PP2": (4, ("parallel.tensor=2", "parallel.pipeline=2"))}
VERIFIED = ("reward.functions=[tests.reward_functions:unsteady,math_verify]", "reward.weights=[1.0,0.5]")
PARTS = "rollout.producer.min_groups=3"
MODES = {"prefetch": ("rollout.producer.mode=prefetch", "rollout.producer.prefetch_rollouts=2"),
         "streaming": ("rollout.producer.mode=streaming",),
         "streaming-workers": ("rollout.producer.mode=streaming", "reward.num_workers=1")}
AHEAD = (*MODES["prefetch"], "rollout.producer.prefetch_rollouts=1")
AGAIN = ("reward.functions=[tests.reward_functions:mostly_dead,math_verify]", "reward.weights=[1.0,0.5]",
         "replay.capacity_groups=6", "replay.max_uses=2", "reroll.max_groups=2", "reroll.start_fraction=0.25",
         "reroll.max_attempts=2", "train.num_rollouts=5", "optimizer.schedule=constant")
STALE, COUNTED = "async/staleness_max", ("replay/", "reroll/", "reward/")


def stale(run_dir: pathlib.Path) -> list[float]:
    return [row[STALE] for row in firsts_of(run_dir, STALE)]


@pytest.mark.parametrize("mode", quick(MODES, "streaming"))
@pytest.mark.parametrize("layout", quick(LAYOUTS, "DP2"))
def test_producers_without_staleness_train_the_same(made, layout, mode):
    """Rows, trace and weights are the synchronous run's; the math-verify rewards take their time."""
    world, degrees = LAYOUTS[layout]
    given = (*degrees, *VERIFIED, PARTS, "rollout.producer.max_staleness_steps=0")
    synchronous = made(world, *given, "rollout.producer.mode=sync")
    assert len(rows_of(synchronous)) == 4 and set(stale(synchronous)) == {0.0}
    assert_same_run(synchronous, made(world, *given, *MODES[mode]))


@pytest.mark.parametrize("layout", quick(LAYOUTS, "DP2"))
def test_a_run_ahead_repeats_to_the_bit(made, tmp_path, layout):
    """No clock decides anything. With two steps each, rollouts are stale by two from the second one on."""
    world, degrees = LAYOUTS[layout]
    given = (*degrees, *VERIFIED, *AHEAD, PARTS, "train.num_rollouts=3", "correction.mode=token_truncate")
    once = made(world, *given)
    made.into(tmp_path, world, *given)
    assert_same_run(once, tmp_path)
    assert stale(once) == [0.0, 2.0, 2.0]
    assert [row["rollout/weight_version_min"] for row in firsts_of(once, STALE)] == [0.0, 0.0, 2.0]
    assert any(row["correction/weight_mean"] != 1.0 for row in firsts_of(once, STALE))


@pytest.mark.parametrize(("extra", "wanted"), [
    (("rollout.producer.max_staleness_steps=1",), [0.0] * 4),
    (("weight_sync.interval_steps=4",), [0.0, 2.0, 4.0, 2.0]),
    (("weight_sync.interval_steps=4", "rollout.producer.max_staleness_steps=2"), [0.0, 2.0, 2.0, 2.0]),
], ids=["bound", "interval", "both"])
def test_staleness_is_bounded_by_admission(made, extra, wanted):
    """With two steps a rollout, a bound of 1 leaves no room for one ahead; with an interval the engines lag."""
    assert stale(made(1, *AHEAD, *extra, "train.num_rollouts=4")) == wanted


@pytest.mark.parametrize("layout", quick(LAYOUTS, "DP2"))
def test_replay_and_reroll_on_every_layout(made, layout):
    """Prompts, rewards and buffers are those of the run of one process, weights to rounding."""
    world, degrees = LAYOUTS[layout]
    runs = made(1, *AHEAD, *AGAIN), made(world, *degrees, *AHEAD, *AGAIN)
    counted, other = ([{k: v for k, v in row.items() if k.startswith(COUNTED)} for row in firsts_of(run, STALE)]
                      for run in runs)
    assert counted == other
    assert sum(row["replay/replaced"] for row in counted) > 4 and counted[-1]["reroll/issued"] > 1
    assert apart(*runs) < 1e-5


@pytest.mark.parametrize("resumed", quick([(0, 2), (3, 2), (4, 2), (3, 1)], (3, 2)), ids=str)
def test_a_run_that_goes_on_from_any_checkpoint_equals_the_whole_one(made, resumed):
    """On as many ranks it is equal to the bit. On one rank of two, which sums otherwise, it trains the same groups."""
    taken, world = resumed
    whole = made(2, *SAVED, *MODES["streaming"], PARTS, *AGAIN)
    part = made.again(whole, taken, world=world)
    if world == 2:
        return assert_same_run(whole, part)
    names = ("reward/mean", STALE, "replay/size", "replay/replaced", "reroll/issued", "reroll/size")
    found, wanted = ([[row.get(name) for name in names] for row in rows_of(run)] for run in (part, whole))
    assert found == wanted


def test_what_is_too_old_is_dropped_counted_and_asked_again(made, arithmetic, tmp_path):
    """A run ahead by two goes on under a smaller bound; every prompt is trained once (an epoch of 48, none twice)."""
    epoch = (few_prompts(arithmetic, tmp_path, 48), "train.num_rollouts=null", "train.epochs=1")
    whole = made(2, *epoch, *SAVED, *MODES["prefetch"])
    assert len(trained_prompts(whole)) == len(set(trained_prompts(whole))) == 48
    part = made.again(whole, 3, "rollout.producer.max_staleness_steps=2")
    assert sum(row["async/dropped_stale"] for row in firsts_of(part, STALE)) == 16 and max(stale(part)[3:]) == 2.0
    assert sorted(trained_prompts(part)) == sorted(trained_prompts(whole))


@pytest.mark.parametrize("layout", quick(LAYOUTS, "DP2"))
def test_dynamic_sampling_fills_every_place_or_stops(made, layout):
    """Two prompts of three never have signal: refilled until none is left, and nothing is skipped; in one round not."""
    world, degrees = LAYOUTS[layout]
    given = ("reward.functions=[tests.reward_functions:mostly_dead]", "rollout.samples_per_prompt=8", *degrees)
    filled = made(world, *given, "rollout.dynamic_sampling.max_rounds=30", "train.num_rollouts=1")
    assert all(row["skip/zero_advantage_ratio"] == 0.0 for row in rows_of(filled))
    rounds = firsts_of(filled, "dynamic_sampling/rounds")
    assert len(rounds) == 1
    assert all(row["dynamic_sampling/left"] == 0.0 and row["dynamic_sampling/rounds"] > 1 for row in rounds)
    once = (*given, "rollout.dynamic_sampling.max_rounds=1", "train.num_rollouts=1")
    (left,) = [row["dynamic_sampling/left"] for row in firsts_of(made(world, *once), "dynamic_sampling/left")]
    assert left > 0
    words = [f"{left:.0f} of 8 groups have no signal after 1 rounds"]
    made.refused(words, *once, "rollout.dynamic_sampling.on_exhausted=fail", world=world, code=1)


def test_what_is_generated_meanwhile_is_what_lagging_weights_generate(made):
    """A run ahead has its second rollout from the first weights, as a synchronous run whose engine lags."""
    given = ("optimizer.lr=1e-2", "correction.mode=token_mask")
    ahead, lagging = made(2, *AHEAD, *given), made(2, "weight_sync.interval_steps=100", *given)
    assert_same_run(ahead, lagging)
    row = rows_of(ahead)[2]
    assert row[STALE] == 2.0 and row["train/logprob_gap_mean"] > 1e-3
