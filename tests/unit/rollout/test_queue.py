"""Checks rollout/queue.py and rollout/training_batch.py without a world.

That is the age of groups, the groups that are replayed, and the log-probs that are known already.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.algorithm.advantage import GroupRewards
from megatron_rl.backend.backend import LogProbs
from megatron_rl.config import load_config
from megatron_rl.rollout.queue import RolloutQueue
from megatron_rl.rollout.replay_buffer import Entry
from megatron_rl.rollout.selection import Selection
from megatron_rl.rollout.training_batch import (
    KnownLogProbs,
    LogProbPass,
    ScoredBatch,
    TrainingBatch,
    merge_passes,
    spread,
)
from megatron_rl.rollout.worker import Group
from megatron_rl.types import BatchFacts, Prompt, Rollout, Score

SAMPLES = 2


def facts_of(places: list[int], *, versions: list[int] | None = None, lengths: list[int] | None = None) -> BatchFacts:
    """Make facts of SAMPLES samples for the group at each place."""
    groups = np.repeat(np.array(places, dtype=np.int64), SAMPLES)
    zeros = np.zeros(len(groups), dtype=np.int64)
    lengths = zeros + 2 if lengths is None else np.array(lengths)
    return BatchFacts(
        sample_ids=tuple(f"s{i}" for i in range(len(groups))),
        groups=groups,
        prompt_tokens=zeros + 1,
        response_tokens=lengths,
        loss_tokens=lengths,
        owners=zeros,
        owner_rows=np.arange(len(groups)),
        places=groups * SAMPLES + np.arange(len(groups)) % SAMPLES,
        weight_versions=zeros if versions is None else np.array(versions),
    )


def scored_of(facts: BatchFacts, *, live: list[bool] | None = None) -> ScoredBatch:
    """Return a scored batch in which each group has rewards of 1 and 0."""
    totals = np.tile([1.0, 0.0], facts.num_samples // SAMPLES)
    live = np.ones(facts.num_samples, dtype=bool) if live is None else np.array(live)
    rewards = GroupRewards(totals=totals, groups=facts.groups, included=np.ones(len(totals), dtype=bool))
    batch = SimpleNamespace(facts=facts)
    return ScoredBatch(
        batch=batch, rewards=rewards, by_function=totals[:, None], overlong=np.zeros(len(totals)), live=live
    )


def test_spread_equals_the_naive_formulas():
    """Quartiles lie between the sorted rewards, linearly; the deviation is that of all of them."""
    rewards = [0.5, 2.0, -1.0, 0.5, 1.0, 0.25]
    ordered, mean = sorted(rewards), sum(rewards) / 6

    def quantile(share: float) -> float:
        below = int(share * 5)
        return ordered[below] + (share * 5 - below) * (ordered[below + 1] - ordered[below])

    assert spread(np.array(rewards)) == pytest.approx(
        {
            "mean": mean,
            "std": (sum((x - mean) ** 2 for x in rewards) / 6) ** 0.5,
            "min": -1.0,
            "p25": quantile(0.25),
            "median": 0.5,
            "p75": quantile(0.75),
            "max": 2.0,
        },
        rel=1e-15,  # the order of additions
    )
    assert set(spread(np.array([0.75])).values()) == {0.75, 0.0}


def prompt_of(number: int) -> Prompt:
    return Prompt(prompt_id=f"{number}@0", text="", token_ids=(5,), columns={})


def group_of(number: int) -> Group:
    same = {
        "response_ids": (3, 7),
        "logprobs": (-1.0, -2.0),
        "text": "",
        "finish_reason": "stop",
        "weight_versions": ((0, 2),),
    }
    rollouts = tuple(Rollout(prompt=prompt_of(number), sample_index=index, **same) for index in range(SAMPLES))
    return Group(rollouts=rollouts, scores=(Score(total=1.0, by_function=(1.0,)), Score(total=0.0, by_function=(0.0,))))


def feed_of(*overrides: str, version: int = 0) -> RolloutQueue:
    """Make a queue with its configuration and a trainer at that version, and with neither engines nor prompts."""
    given = {"passes_parts": False, "passes_all": False, "steps_per_rollout": 1}
    return RolloutQueue(
        load_config(None, list(overrides)), SimpleNamespace(weight_version=version), None, None, None, **given
    )


@pytest.mark.parametrize(
    ("limit", "wanted"), [("null", [0, 1, 2, 3]), (4, [0, 1, 2, 3]), (3, [0, 1, 3]), (2, [0, 3]), (0, [])]
)
def test_a_group_is_too_old_where_one_of_its_samples_is(limit: object, wanted: list[int]) -> None:
    """A group is too old where one of its samples is, and ``max_staleness_steps`` itself is not too old.

    At version 7, group 1 has a sample of version 4, group 2 one of version 3.
    """
    feed = feed_of(f"rollout.producer.max_staleness_steps={limit}", version=7)
    assert feed._fresh_places(scored_of(facts_of([0, 1, 2, 3], versions=[6, 6, 4, 7, 7, 3, 5, 5]))) == wanted


def test_a_remembered_group_is_as_old_as_its_oldest_sample() -> None:
    feed, facts = feed_of("replay.capacity_groups=4", version=7), facts_of([0, 1], versions=[5, 3, 6, 7])
    prompts, held = {place: prompt_of(place) for place in (0, 1)}, {place: group_of(place) for place in (0, 1)}
    nothing = KnownLogProbs(values=np.zeros(8, dtype=np.float32), covered=np.zeros(4, dtype=bool))
    taken = TrainingBatch(
        scored=scored_of(facts),
        known=nothing,
        replayed=np.zeros(4, dtype=bool),
        trained_version=7,
        prompts=prompts,
        groups=held,
    )
    assert feed.remember(taken, np.array([0.5, -0.5, 0.5, -0.5]))["replay/size"] == 2.0
    assert {entry.key: entry.version for entry in feed.replay.entries} == {"0@0": 3, "1@0": 6}
    assert set(feed.replay_groups) == {"0@0", "1@0"}


def test_no_group_is_replayed_beside_itself() -> None:
    """No group is replayed beside itself: group 8 is in the batch, so the dead places take others.

    Group 8 has by far the best score.
    """
    feed = feed_of("replay.capacity_groups=4", "replay.max_age_versions=null")
    feed.replay.add(
        [
            Entry(key="8@0", score=1e9, version=0),
            Entry(key="9@0", score=1.0, version=0),
            Entry(key="7@0", score=1.0, version=0),
        ]
    )
    feed.replay_groups = {f"{number}@0": group_of(number) for number in (7, 8, 9)}
    before = Selection(
        prompts={0: prompt_of(8), 1: prompt_of(1), 2: prompt_of(2)}, groups={0: group_of(8)}, live=frozenset({0})
    )
    after, metrics = feed._replay(3, before)
    assert after.replayed == after.replaced == {1, 2} and metrics["replay/replaced"] == 2.0
    names = {place: group.prompt.name for place, group in after.groups.items()}
    assert names[0] == "8@0" and {names[1], names[2]} == {"7@0", "9@0"} and after.prompts == before.prompts
    assert set(before.groups) == {0} and not before.replaced  # a selection is a value: a replay does not change it


def test_known_log_probs_equal_a_loop_over_what_was_passed_and_not_replaced() -> None:
    """Known log-probs equal a loop over the samples that were passed and not replaced.

    Three groups were passed in two parts, one sample of them left out; group 1 has given way to another of other
    lengths.
    """
    whole = facts_of([0, 1, 2], lengths=[2, 3, 5, 4, 1, 3])
    random, passes = np.random.default_rng(0), []
    for facts, chosen in (
        (facts_of([0, 1], lengths=[2, 3, 5, 4]), [1, 1, 1, 1]),
        (facts_of([2], lengths=[1, 3]), [0, 1]),
    ):
        flat = random.normal(size=int(facts.response_tokens.sum())).astype(np.float32)
        chosen = np.array(chosen, dtype=bool)
        passes.append(
            LogProbPass(facts=facts, chosen=chosen, logprobs=LogProbs(flat=flat, sums={"tokens": float(len(flat))}))
        )
    known = merge_passes(whole, passes, {0, 2})
    first, second = passes[0].logprobs.flat, passes[1].logprobs.flat
    wanted = [*first[:5], *[0.0] * 9, 0.0, *second[1:]]
    assert known.values.tolist() == [float(x) for x in wanted]
    assert known.covered.tolist() == [True, True, False, False, False, True] and known.sums == {"tokens": 14.0 + 4.0}


def test_a_replayed_group_is_not_remembered_anew() -> None:
    """The group at place 1 was drawn from the buffer: it keeps its uses, and goes once they are used up."""
    feed, facts = feed_of("replay.capacity_groups=4", "replay.max_uses=2", version=7), facts_of([0, 1])
    feed.replay.add([Entry(key="1@0", score=1.0, version=3)])
    feed.replay_groups = {"1@0": group_of(1)}
    for uses, kept in ((1, {"0@0", "1@0"}), (2, {"0@0"})):
        assert feed.replay.draw(1, rollout=uses, exclude=["0@0"]) == ["1@0"]
        taken = TrainingBatch(
            scored=scored_of(facts),
            known=KnownLogProbs(values=np.zeros(8, dtype=np.float32), covered=np.zeros(4, dtype=bool)),
            replayed=facts.groups == 1,
            trained_version=7,
            prompts={place: prompt_of(place) for place in (0, 1)},
            groups={place: group_of(place) for place in (0, 1)},
        )
        feed.remember(taken, np.array([0.5, -0.5, 0.5, -0.5]))
        assert {entry.key for entry in feed.replay.entries} == set(feed.replay_groups) == kept
        assert all((entry.version, entry.uses) == (3, uses) for entry in feed.replay.entries if entry.key == "1@0")


def test_a_failed_group_that_is_too_old_waits_for_no_reroll() -> None:
    """Its prompt is put back under the attempt that it had: of groups 0 to 2, which all failed, group 1 is too old."""
    settings = ("reroll.max_groups=4", "reroll.fail_threshold=1", "rollout.producer.max_staleness_steps=2")
    feed = feed_of(*settings, version=7)
    facts = facts_of([0, 1, 2], versions=[6, 6, 4, 7, 5, 5])
    feed._note(scored_of(facts), {place: prompt_of(place) for place in range(3)})
    assert feed.reroll.state()["waiting"] == [["0@0", 0], ["2@0", 0]]
