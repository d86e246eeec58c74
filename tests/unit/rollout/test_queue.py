"""Checks rollout/queue.py and rollout/training_batch.py without a world."""

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.algorithm.advantage import GroupRewards, reduction_weights
from megatron_rl.backend.backend import LogProbs
from megatron_rl.backend.batch import Batch
from megatron_rl.backend.batch_exchange import gather_facts
from megatron_rl.config import load_config
from megatron_rl.observability.timer import StepTimer
from megatron_rl.rollout.groups.replay_buffer import Entry
from megatron_rl.rollout.groups.selection import Selection
from megatron_rl.rollout.job import Group
from megatron_rl.rollout.queue import RolloutQueue
from megatron_rl.rollout.reward_metrics import RewardErrors, reward_metrics, spread
from megatron_rl.rollout.scored_batch import ScoredBatch
from megatron_rl.rollout.training_batch import KnownLogProbs, LogProbPass, TrainingBatch, merge_passes
from megatron_rl.trainer.advantages.group import GroupAdvantages
from megatron_rl.trainer.passes.passes import Passes
from megatron_rl.trainer.rollouts import build_queue
from megatron_rl.types import BatchFacts, Prompt, Rollout, Score
from tests.unit.rollout.fake_engine import (
    SAMPLES,
    WillingEngine,
    facts_of,
    manager_of,
    prompt_of,
    prompts_of,
    rollout_of,
    value_of,
)
from tests.unit.rollout.fake_engine import group_of as rollouts_of


def scored_of(facts: BatchFacts) -> ScoredBatch:
    """Return a scored batch in which each group has rewards of 1 and 0."""
    totals, every = np.tile([1.0, 0.0], facts.num_samples // SAMPLES), np.ones(facts.num_samples, dtype=bool)
    rewards = GroupRewards(totals=totals, groups=facts.groups, included=every)
    by_function, batch = {"by_function": totals[:, None], "overlong": 0.0 * totals}, SimpleNamespace(facts=facts)
    return ScoredBatch(batch=batch, rewards=rewards, live=every, **by_function)


def test_spread_equals_the_naive_formulas():
    """Quartiles lie between the sorted rewards, linearly; the deviation is that of all of them."""
    rewards = [0.5, 2.0, -1.0, 0.5, 1.0, 0.25]
    ordered, mean = sorted(rewards), sum(rewards) / 6

    def quantile(share: float) -> float:
        below = int(share * 5)
        return ordered[below] + (share * 5 - below) * (ordered[below + 1] - ordered[below])

    wanted = {"mean": mean, "std": (sum((x - mean) ** 2 for x in rewards) / 6) ** 0.5, "min": -1.0, "max": 2.0}
    wanted |= {"p25": quantile(0.25), "median": 0.5, "p75": quantile(0.75)}
    assert spread(np.array(rewards)) == pytest.approx(wanted, rel=1e-15)  # the order of additions
    assert set(spread(np.array([0.75])).values()) == {0.75, 0.0}


def group_of(number: int) -> Group:
    scores = tuple(Score(total=total, by_function=(total,)) for total in (1.0, 0.0))
    return Group(rollouts=tuple(rollouts_of(prompt_of(number))), scores=scores)


def taken_of(facts: BatchFacts, *, replayed: int = -1) -> TrainingBatch:
    """Return the batch of the groups 0 and 1 that was trained at version 7; ``replayed``: the replayed one."""
    nothing = KnownLogProbs(values=np.zeros(8, dtype=np.float32), covered=np.zeros(4, dtype=bool))
    given = {"replayed": facts.groups == replayed, "trained_version": 7, "prompts": prompts_of((0, 1))}
    return TrainingBatch(scored=scored_of(facts), known=nothing, groups={k: group_of(k) for k in (0, 1)}, **given)


class FakeTrainer:
    """A trainer without a model, which notes the samples that are gathered."""

    def __init__(self, version: int = 0, rank: int = 0) -> None:
        self.weight_version, self.topology, self.gathered = version, SimpleNamespace(rank=rank), []

    def gather(self, samples, groups, order) -> Batch:
        batch = Batch(facts=gather_facts(samples, groups, order), local=samples)
        self.gathered += batch.facts.sample_ids
        return batch

    def check_samples(self, batch: Batch) -> None: ...


def feed_of(*overrides: str, version: int = 0, manager=None, prompts=None, rank: int = 0) -> RolloutQueue:
    """Make a queue with its configuration and a trainer at that version."""
    config, trainer = load_config(None, list(overrides)), FakeTrainer(version, rank)
    timer = StepTimer(lambda stage: contextlib.nullcontext())
    return build_queue(config, trainer, manager, prompts, timer, passes_parts=False, passes_all=False)


@pytest.mark.parametrize("limit, wanted", [("null", "0123"), (4, "0123"), (3, "013"), (2, "03"), (0, "")])
def test_a_group_is_too_old_where_one_of_its_samples_is(limit: object, wanted: str) -> None:
    """``max_staleness_steps`` itself is not too old. At version 7, group 1 has a sample of version 4, group 2 of 3."""
    feed = feed_of(f"rollout.producer.max_staleness_steps={limit}", version=7)
    scored = scored_of(facts_of([0, 1, 2, 3], versions=[6, 6, 4, 7, 7, 3, 5, 5]))
    assert feed._fresh_places(scored) == [int(place) for place in wanted]


def test_a_remembered_group_is_as_old_as_its_oldest_sample() -> None:
    feed, facts = feed_of("replay.capacity_groups=4", version=7), facts_of([0, 1], versions=[5, 3, 6, 7])
    assert feed.remember(taken_of(facts), np.array([0.5, -0.5, 0.5, -0.5]))["replay/size"] == 2.0
    assert {entry.key: entry.version for entry in feed.parts.replay.buffer.entries} == {"0@0": 3, "1@0": 6}
    assert set(feed.parts.replay.groups) == {"0@0", "1@0"}


def test_no_group_is_replayed_beside_itself(alone) -> None:
    """Group 8, which has by far the best score, is in the batch, so the dead places take others."""
    settings = ("replay.capacity_groups=4", "replay.max_age_versions=null", "rollout.samples_per_prompt=2")
    feed, scores = feed_of(*settings, "reward.functions=[a:f]"), {8: 1e9, 9: 1.0, 7: 1.0}
    feed.parts.replay.buffer.add([Entry(key=f"{number}@0", score=score, version=0) for number, score in scores.items()])
    feed.parts.replay.groups = {f"{number}@0": group_of(number) for number in scores}
    groups = {place: group_of(number) for place, number in enumerate((8, 1, 2))}
    given = {"prompts": prompts_of((8, 1, 2)), "scored": feed.scorer.gather(groups)}
    before = Selection(groups={0: groups[0]}, live=frozenset({0}), **given)
    (replay,) = feed.parts.filters
    after = replay.fill(3, before)
    assert after.replayed == after.replaced == {1, 2} and after.metrics["replay/replaced"] == 2.0
    names = {place: group.prompt.name for place, group in after.groups.items()}
    assert names[0] == "8@0" and {names[1], names[2]} == {"7@0", "9@0"} and after.prompts == before.prompts
    assert set(before.groups) == {0} and not before.replaced  # a selection is a value: a replay does not change it


@pytest.mark.parametrize("masks", [False, True])
def test_lengths_count_masked_cut_and_excluded_responses_whole(alone, masks: bool) -> None:
    """``rollout/tokens`` counts what the policy sampled, and the other metrics of lengths all tokens of a response."""
    turns = (True, True, False, False, False, True)
    kinds = [  # (tokens, mask, end, total reward)
        [(4, None, "stop", 1.0), (9, None, "length", 0.0), (6, turns, "stop", 1.0)],
        [(2, None, "stop", None), (9, None, "length", None), (9, (*turns, *turns[:3]), "length", 1.0)],
    ]
    settings = (f"loss.mask_truncated={str(masks).lower()}", "rollout.samples_per_prompt=3", "reward.functions=[a:f]")
    groups = {}
    for place, members in enumerate(kinds):
        rollouts = [
            dataclasses.replace(
                rollout_of(prompt_of(place), k, ids=(3,) * length),
                loss_mask=mask, finish_reason=end, excluded="it hung" if total is None else None,
            )
            for k, (length, mask, end, total) in enumerate(members)
        ]
        scores = tuple(Score(total=total, by_function=(total,)) for *_, total in members)
        groups[place] = Group(rollouts=tuple(rollouts), scores=scores)
    every = [member for members in kinds for member in members]

    feed, manager = feed_of(*settings), manager_of(WillingEngine(), *settings)
    scored = feed.scorer.gather(groups)
    found = reward_metrics(feed.scorer.scoring, scored, RewardErrors())
    assert found["rollout/response_tokens_mean"] == sum(length for length, *_ in every) / 6
    cut = sum(end == "length" and total is not None for _, _, end, total in every)
    assert found.get("rollout/masked_truncated") == (cut if masks else None)
    expected = [
        0 if total is None or (masks and end == "length") else length if mask is None else sum(mask)
        for length, mask, end, total in every
    ]
    assert scored.facts.loss_tokens.tolist() == expected

    job = manager.job({place: group.prompt for place, group in groups.items()}, dict.fromkeys(groups, 3))
    for place, group in groups.items():
        job.put(place, group.rollouts, group.scores)
    manager.finish(job)
    counted = manager.take_metrics()
    assert counted["rollout/tokens"] == sum(length if mask is None else sum(mask) for length, mask, *_ in every)
    assert counted["rollout/truncated_share"] == sum(end == "length" for _, _, end, _ in every) / 6
    manager.close()


def test_a_prompt_drawn_twice_is_two_groups_of_all_its_repeats(alone) -> None:
    """Rows 0 and 1 have one text, and row 0 comes again in the next epoch; each draw has its own mean and tokens."""
    settings = ("rollout.samples_per_prompt=4", "reward.functions=[a:f]", "advantage.estimator=dr_grpo")
    rewards = [[0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 1]]
    groups = {}
    for place, (number, epoch) in enumerate([(0, 0), (1, 0), (0, 1)]):
        prompt = prompt_of(number, epoch=epoch)
        rollouts = tuple(rollout_of(prompt, k, ids=(3,) * (place + k + 1)) for k in range(4))
        scores = tuple(Score(total=float(total), by_function=(float(total),)) for total in rewards[place])
        groups[place] = Group(rollouts=rollouts, scores=scores)
    scored = feed_of(*settings).scorer.gather(groups)
    assert len({rollout.prompt.token_ids for group in groups.values() for rollout in group.rollouts}) == 1
    assert scored.facts.groups.tolist() == [0] * 4 + [1] * 4 + [2] * 4 and scored.live_places() == {2}
    found = GroupAdvantages(load_config(None, list(settings)).advantage)(scored, Passes()).advantages.of_sample
    assert found.tolist() == [own - sum(group) / 4 for group in rewards for own in group]
    weights = reduction_weights("prompt_mean", scored.facts, np.arange(12), max_response_tokens=8)
    assert weights.tolist() == [1 / (3 * sum(place + k + 1 for k in range(4))) for place in range(3) for _ in range(4)]


def test_the_overlong_penalty_counts_the_environments_tokens_as_the_limit_does(alone) -> None:
    """Limit 10, buffer 4: of responses with 5, 8, 8 and 10 tokens the last two have 4 and 6 tokens of an environment.

    An episode ends at the same count (test_multi_turn.py).
    """
    limits = ("reward.overlong_buffer_tokens=4", "reward.overlong_penalty=2", "rollout.max_response_tokens=10")
    masks = [None, None, (True,) * 2 + (False,) * 4 + (True,) * 2, (True,) * 3 + (False,) * 6 + (True,)]
    rollouts = tuple(
        dataclasses.replace(rollout_of(prompt_of(0), k, ids=(3,) * length), loss_mask=mask)
        for k, (length, mask) in enumerate(zip([5, 8, 8, 10], masks, strict=True))
    )
    group = Group(rollouts=rollouts, scores=(Score(total=1.0, by_function=(1.0,)),) * 4)
    scored = feed_of(*limits, "rollout.samples_per_prompt=4", "reward.functions=[a:f]").scorer.gather({0: group})
    assert scored.facts.loss_tokens.tolist() == [5, 8, 4, 4]
    assert scored.overlong.tolist() == [0.0, -0.5, -0.5, -1.0]
    assert scored.rewards.totals.tolist() == [1.0, 0.0, 0.0, -1.0]


class Aging(WillingEngine):
    """Samples every third prompt by weights of long ago, at its first attempt."""

    def group(self, prompt: Prompt, samples: int) -> list[Rollout]:
        number = int(prompt.prompt_id.split("@")[0])
        old = number % 3 == 2 and prompt.attempt == 0
        lengths = [1 + (number + k) % 4 for k in range(samples)]
        return [rollout_of(prompt, k, version=0 if old else 9, ids=(3,) * lengths[k]) for k in range(samples)]


@pytest.mark.parametrize("metric", ["null", "shaped"])
def test_dynamic_sampling_keeps_or_replaces_whole_groups_under_rloo(alone, metric: str) -> None:
    """Group 3 alone has equal rewards; in groups 0, 1 and 4 the three others of one sample have equal rewards."""
    rewards = {0: [1, 0, 0, 0], 1: [1, 1, 1, 0], 2: [1, 1, 0, 0], 3: [0, 0, 0, 0], 4: [0, 1, 0, 0]}
    given = (
        *("rollout.samples_per_prompt=4", "train.prompts_per_rollout=4", "train.num_rollouts=1"),
        *("rollout.dynamic_sampling.max_rounds=2", f"rollout.dynamic_sampling.metric={metric}"),
        *("advantage.estimator=rloo", "reward.functions=[a:f]"),
    )

    def score(rollouts: Sequence[Rollout]) -> list[Score]:
        values = [float(rewards[int(x.prompt.prompt_id.split("@")[0])][x.sample_index]) for x in rollouts]
        return [Score(total=value, by_function=(value,)) for value in values]

    manager, numbers = manager_of(WillingEngine(), *given, score=score), itertools.count()
    drawn = SimpleNamespace(next=lambda count, epochs: [prompt_of(next(numbers)) for _ in range(count)])
    taken = feed_of(*given, manager=manager, prompts=drawn).take(0)
    manager.close()
    kept = [0, 1, 2, 4]
    assert taken.facts.sample_ids == tuple(f"{number}@0#{index}" for number in kept for index in range(4))
    assert taken.facts.groups.tolist() == [place for place in range(4) for _ in range(4)]
    assert taken.scored.rewards.included.all()
    wanted = [
        own - sum(rewards[number][other] for other in range(4) if other != index) / 3
        for number in kept
        for index, own in enumerate(rewards[number])
    ]
    found = GroupAdvantages(load_config(None, list(given)).advantage)(taken.scored, Passes()).advantages.of_sample
    np.testing.assert_allclose(found, wanted, rtol=1e-15)  # one rounding


def is_dead(rollout: Rollout) -> bool:
    return int(rollout.prompt.prompt_id.split("@")[0]) % 3 == 1


def gather_rollout(rank: int, world: int) -> tuple[int, int]:
    """Take a rollout in parts, a third of it too old, a third dead; return how many groups were refilled, replayed."""
    given = (
        *("rollout.samples_per_prompt=2", "train.prompts_per_rollout=12", "rollout.producer.min_groups=4"),
        *("rollout.producer.max_staleness_steps=2", "rollout.dynamic_sampling.max_rounds=1", "reward.functions=[a:f]"),
        *("replay.capacity_groups=8", "rollout.producer.mode=prefetch", "train.num_rollouts=1"),
    )

    def score(rollouts: Sequence[Rollout]) -> list[Score]:
        values = [0.5 if is_dead(rollout) else value_of(rollout) for rollout in rollouts]
        return [Score(total=value, by_function=(value,)) for value in values]

    manager = manager_of(Aging(), *given, score=score, version=lambda: 9, share=(rank, world))
    numbers = itertools.count()
    drawn = SimpleNamespace(
        next=lambda count, epochs: [prompt_of(next(numbers)) for _ in range(count)], put_back=lambda prompts: None
    )
    feed = feed_of(*given, version=9, manager=manager, prompts=drawn, rank=rank)
    feed.parts.replay.groups = {"99@0": group_of(99)} if rank else {"98@0": group_of(98)}
    feed.parts.replay.buffer.add([Entry(key=f"{number}@0", score=1.0, version=9) for number in (98, 99)])
    taken = feed.take(0)
    manager.close()
    assert len(set(feed.backend.gathered)) == len(feed.backend.gathered)  # no group is gathered twice
    assert_equal(taken.scored, feed.scorer.gather(taken.groups))
    numbers = [int(name.split("@")[0]) for name in taken.facts.sample_ids]
    return len({number for number in numbers if 12 <= number < 98}), len({n for n in numbers if n >= 98})


def assert_equal(scored: ScoredBatch, other: ScoredBatch) -> None:
    """Assert that two batches are equal in every array and row."""
    for one, two in ((scored.facts, other.facts), (scored.rewards, other.rewards)):
        for field in dataclasses.fields(one):
            np.testing.assert_array_equal(getattr(one, field.name), getattr(two, field.name), field.name)
    for name in ("by_function", "overlong", "live"):
        np.testing.assert_array_equal(getattr(scored, name), getattr(other, name), name)
    assert [sample.sample_id for sample in scored.batch.local] == [sample.sample_id for sample in other.batch.local]


def test_a_rollouts_groups_are_gathered_once_and_joined_as_if_gathered_together(pool) -> None:
    """Of 12 groups in parts of 4, 4 are too old; of 4 dead ones a round of new prompts replaces 3, and replay 1."""
    assert pool.run(2, gather_rollout) == [(3, 1)] * 2


def test_known_log_probs_equal_a_loop_over_what_was_passed_and_not_replaced() -> None:
    """Three groups were passed in two parts, one sample of them left out; group 1 gave way to one of other lengths."""
    whole = facts_of([0, 1, 2], lengths=[2, 3, 5, 4, 1, 3])
    random, passes = np.random.default_rng(0), []
    for facts, chosen in (
        (facts_of([0, 1], lengths=[2, 3, 5, 4]), [1, 1, 1, 1]),
        (facts_of([2], lengths=[1, 3]), [0, 1]),
    ):
        flat = random.normal(size=int(facts.response_tokens.sum())).astype(np.float32)
        logprobs = LogProbs(flat=flat, sums={"tokens": float(len(flat))})
        passes.append(LogProbPass(facts=facts, chosen=np.array(chosen, dtype=bool), logprobs=logprobs))
    known = merge_passes(whole, passes, {0, 2})
    first, second = passes[0].logprobs.flat, passes[1].logprobs.flat
    wanted = [*first[:5], *[0.0] * 9, 0.0, *second[1:]]
    assert known.values.tolist() == [float(x) for x in wanted]
    assert known.covered.tolist() == [True, True, False, False, False, True] and known.sums == {"tokens": 14.0 + 4.0}


def test_a_replayed_group_is_not_remembered_anew() -> None:
    """The group at place 1 was drawn from the buffer: it keeps its uses, and goes once they are used up."""
    feed, facts = feed_of("replay.capacity_groups=4", "replay.max_uses=2", version=7), facts_of([0, 1])
    buffer = feed.parts.replay.buffer
    buffer.add([Entry(key="1@0", score=1.0, version=3)])
    feed.parts.replay.groups = {"1@0": group_of(1)}
    for uses, kept in ((1, {"0@0", "1@0"}), (2, {"0@0"})):
        assert buffer.draw(1, rollout=uses, exclude=["0@0"]) == ["1@0"]
        feed.remember(taken_of(facts, replayed=1), np.array([0.5, -0.5, 0.5, -0.5]))
        assert {entry.key for entry in buffer.entries} == set(feed.parts.replay.groups) == kept
        assert all((entry.version, entry.uses) == (3, uses) for entry in buffer.entries if entry.key == "1@0")


def test_a_failed_group_that_is_too_old_waits_for_no_reroll() -> None:
    """Its prompt is put back under the attempt that it had: of groups 0 to 2, which all failed, group 1 is too old."""
    settings = ("reroll.max_groups=4", "reroll.fail_threshold=1", "rollout.producer.max_staleness_steps=2")
    feed, facts = feed_of(*settings, version=7), facts_of([0, 1, 2], versions=[6, 6, 4, 7, 5, 5])
    feed._note(scored_of(facts), prompts_of(range(3)))
    assert feed.parts.reroll.state()["waiting"] == [["0@0", 0], ["2@0", 0]]
