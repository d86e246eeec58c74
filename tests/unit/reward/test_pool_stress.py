"""reward/pool.py with many samples of which some raise, hang and kill."""

from __future__ import annotations

import pytest

from megatron_rl.types import Rollout
from tests.unit.reward.pool_rig import SHORT_S
from tests.unit.reward.rig import groups_of, reward_of, totals

pytestmark = pytest.mark.process


def misbehaving(num_samples: int, group: int, each: int) -> tuple[list[Rollout], list[float | None]]:
    """Return a batch in which ``each`` samples raise, as many hang and as many kill, and its expected totals.

    They are spread over the batch; the totals are those under on_error=drop.
    """
    texts = ["x" * (1 + i * 7919 % 53) for i in range(num_samples)]
    step = num_samples // (3 * each)
    for k in range(3 * each):
        texts[k * step + k % step] = ("raise", "hang", "kill")[k % 3]
    expected = [None if text in ("raise", "hang", "kill") else float(len(text)) for text in texts]
    assert expected.count(None) == 3 * each
    return groups_of(*(texts[i : i + group] for i in range(0, num_samples, group))), expected


def check_stress(num_samples: int, each: int, num_workers: int, caplog) -> None:
    """Assert that a batch takes no more than its faults cost, and that only guilty samples fail.

    That is at most two deadlines for a hang, two starts of a worker for it and three for a kill.
    """
    rollouts, expected = misbehaving(num_samples, 8, each)
    with reward_of("act", num_workers=num_workers, deadline_s=SHORT_S) as reward:
        assert totals(reward.score(rollouts)) == expected
        guilty = [rollout.sample_id for rollout, total in zip(rollouts, expected, strict=True) if total is None]
        assert [failure.sample_id for failure in reward.last_errors] == guilty
        assert reward.pool.num_started <= num_workers + 5 * each
        assert each <= sum("did not answer in" in record.getMessage() for record in caplog.records) <= 2 * each
        assert totals(reward.score(rollouts[:1])) == expected[:1]


def test_a_hundred_samples_of_which_three_misbehave(only_endless, caplog):
    check_stress(96, 1, 2, caplog)


@pytest.mark.long
def test_a_thousand_samples_of_which_thirty_misbehave(only_endless, caplog):
    """With 1 % that raise, 1 % that hang and 1 % that kill their worker, the others' scores are right and in order."""
    check_stress(1000, 10, 4, caplog)
