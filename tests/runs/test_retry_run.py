"""Whole runs whose rewards and environments fail: groups keep their size, equal in every mode, on layouts, resumed."""

import json

import pytest

from megatron_rl.environment import Step
from tests.runs.command import SAVED, apart, assert_same_run, firsts_of

RETRIED = ("reward.functions=[tests.reward_functions:picky]", "reward.on_error=retry_sample", "reward.max_retries=9",
           "rollout.producer.min_groups=3")
STREAMING = ("rollout.producer.mode=streaming", "reward.num_workers=1")
COUNTS = ("reward/retried", "reward/retry_failed", "reward/excluded", "reward/errors", "reward/mean", "rollout/tokens")


class Shaky:
    """An environment of one turn, which fails at a turn of three characters."""

    def reset(self, prompt) -> None: ...

    def step(self, action: str) -> Step:
        if len(action) == 3:
            raise OSError("the sandbox is full")
        return Step(reward=float(len(action) % 2), done=True)


def counts_of(run) -> list[list[float]]:
    return [[row[name] for name in COUNTS] for row in firsts_of(run)]


def test_groups_keep_their_size_in_every_mode_and_on_every_layout(made):
    """A third of the completions fails on a function, and none is missing in the end."""
    given = (*RETRIED, "rollout.producer.max_staleness_steps=0")
    synchronous = made(2, *given, "rollout.producer.mode=sync")
    for num_retried, *lost, _, _ in counts_of(synchronous):
        assert num_retried > 8 and lost == [0.0, 0.0, 0.0]
    for line in (synchronous / "trace.jsonl").read_text().splitlines():
        assert min(json.loads(line)["loss_tokens"]) > 0
    assert_same_run(synchronous, made(2, *given, *STREAMING))
    alone = made(1, *given, "rollout.producer.mode=prefetch")
    assert counts_of(alone) == counts_of(synchronous) and apart(alone, synchronous) < 1e-5


@pytest.mark.long(seconds=10)
def test_a_run_that_goes_on_from_a_checkpoint_equals_the_whole_one(made):
    """Workers have scored the rollout ahead when the checkpoint is written, and it is retried after the resume."""
    ahead = ("rollout.producer.mode=prefetch", "rollout.producer.prefetch_rollouts=1", "reward.num_workers=1")
    whole = made(2, *RETRIED, *ahead, *SAVED, "train.num_rollouts=3", "correction.mode=token_truncate")
    assert_same_run(whole, made.again(whole, 1))
    assert all(row["reward/retried"] > 4 for row in firsts_of(whole))


def test_an_environments_failures_are_retried_too(made):
    given = ("environment.name=tests.runs.test_retry_run:Shaky", "reward.functions=[environment]")
    given += ("train.num_rollouts=1", "environment.max_retries=9")
    (dropped,), (retried,) = (
        firsts_of(made(1, *given, f"environment.on_error={policy}")) for policy in ("drop", "retry_sample")
    )
    assert dropped["reward/excluded"] > 0 and "reward/retried" not in dropped
    assert retried["reward/retried"] >= dropped["reward/excluded"] and retried["reward/excluded"] == 0.0


def test_a_reward_that_fails_on_every_sample_ends_the_run_after_its_retries(made, tmp_path):
    broken = ("reward.functions=[tests.reward_functions:broken]", "reward.on_error=retry_sample")
    (said,) = made.into(tmp_path, 1, *broken, code=1)
    words = ("the reward of all 32 samples failed", "reward.on_error=retry_sample", "retry 1", "retry 2")
    assert all(word in said for word in words) and "retry 3" not in said, said
