"""The order in which groups are started equals a naive choice, moves no sample, and survives a checkpoint."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.rollout.engines.engine import sample_seed
from megatron_rl.rollout.groups.longest_first import LongestFirst
from megatron_rl.rollout.groups.parts import AsDrawn
from megatron_rl.rollout.job import RolloutJob
from megatron_rl.rollout.rollout_metrics import tail_s
from megatron_rl.types import BatchFacts, Prompt, Rollout
from tests.unit.rollout import fake_engine
from tests.unit.rollout.fake_engine import SAMPLES, WillingEngine, producer_of, rollout_of, scored_by, value_of


def prompt_of(row: int, *, epoch: int = 0, tokens: int = 1) -> Prompt:
    return fake_engine.prompt_of(row, epoch=epoch, token_ids=(5,) * tokens)


def facts_of(lengths: dict[int, list[int]]) -> BatchFacts:
    """Make facts of groups. ``lengths``: by place, the tokens of each sample."""
    return fake_engine.facts_of(list(lengths), lengths=[length for group in lengths.values() for length in group])


def naive_order(prompts: dict[int, Prompt], lengths: dict[str, int]) -> list[int]:
    """Choose one place after the other: any unknown one before a known one, then the longest, then the lowest place."""
    left, order = sorted(prompts), []
    while left:
        best = left[0]
        for place in left[1:]:
            row, other = prompts[place].prompt_id.split("@")[0], prompts[best].prompt_id.split("@")[0]
            unknown, other_unknown = row not in lengths, other not in lengths
            if unknown and other_unknown:
                better = len(prompts[place].token_ids) > len(prompts[best].token_ids)
            elif unknown or other_unknown:
                better = unknown
            else:
                better = lengths[row] > lengths[other]
            best = place if better else best
        order.append(best)
        left.remove(best)
    return order


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), max_size=14),
    known=st.dictionaries(st.integers(0, 12), st.lists(st.integers(1, 5), min_size=SAMPLES, max_size=SAMPLES)),
)
def test_the_order_equals_a_naive_choice(rows, known):
    prompts = {place: prompt_of(row, epoch=1, tokens=tokens) for place, (row, tokens) in enumerate(rows)}
    order = LongestFirst()
    order.note({row: prompt_of(row) for row in known}, facts_of(known))
    arranged = order.arrange(prompts)
    assert list(arranged) == naive_order(prompts, {str(row): max(group) for row, group in known.items()})
    assert arranged == prompts and list(AsDrawn().arrange(prompts)) == sorted(prompts)


def test_the_length_is_that_of_the_last_time_and_survives_a_checkpoint():
    """The latest group of a row counts, a run that goes on has its length, and one in drawn order keeps none."""
    order = LongestFirst()
    order.note({0: prompt_of(3), 1: prompt_of(4)}, facts_of({0: [9, 2], 1: [5, 6]}))
    order.note({0: prompt_of(3, epoch=1)}, facts_of({0: [1, 4]}))
    assert order.lengths == {"3": 4, "4": 6}
    again = LongestFirst()
    again.load_state(json.loads(json.dumps(order.state())))
    prompts = {place: prompt_of(3 + place, epoch=2) for place in range(2)}
    assert list(again.arrange(prompts)) == list(order.arrange(prompts)) == [1, 0]
    drawn = AsDrawn()
    drawn.load_state(order.state())
    drawn.note(prompts, facts_of({0: [7, 7], 1: [7, 7]}))
    assert drawn.state() == {}


@given(st.lists(st.floats(0, 1e3), max_size=30))
def test_the_tail_equals_a_count_of_the_groups_that_ended(ends):
    """The tail begins when at least three quarters have ended."""
    begins = next((at for at in sorted(ends) if 4 * sum(end <= at for end in ends) >= 3 * len(ends)), 0.0)
    assert tail_s(ends) == (max(ends) - begins if ends else 0.0)


class SeededEngine(WillingEngine):
    """Draws each sample from its seed alone."""

    def group(self, prompt: Prompt, samples: int) -> list[Rollout]:
        seeds = (sample_seed(1, prompt.prompt_id, k, self.weight_version, prompt.attempt) for k in range(samples))
        randoms = [np.random.default_rng(seed) for seed in seeds]
        ids = [tuple(random.integers(0, 99, size=random.integers(1, 9)).tolist()) for random in randoms]
        return [rollout_of(prompt, k, ids=ids[k]) for k in range(samples)]


@pytest.mark.parametrize("ranks", [1, 3])
def test_longest_first_equals_drawn_order_bit_for_bit(ranks):
    prompts = {place: prompt_of(row, tokens=1 + row % 3) for place, row in enumerate([4, 9, 2, 7, 5, 0, 1])}
    order = LongestFirst()
    order.note({0: prompt_of(9), 1: prompt_of(2), 2: prompt_of(5)}, facts_of({0: [3, 1], 1: [8, 2], 2: [5, 5]}))
    found = {}
    for name, arranged in (("drawn", prompts), ("longest first", order.arrange(prompts))):
        groups, asked = {}, []
        for rank in range(ranks):
            engine = SeededEngine()
            worker = producer_of(engine, scored_by(value_of), "sync", apart=False, share=(rank, ranks))
            mine = [list(arranged)[k] for k in worker.places(len(arranged))]
            job = RolloutJob(arranged, mine, dict.fromkeys(arranged, SAMPLES))
            worker.generate(job)
            groups |= job.rollouts
            asked += engine.calls
        found[name] = groups, asked
    (drawn, asked_drawn), (longest, asked_longest) = found.values()
    assert drawn == longest and sorted(drawn) == sorted(prompts)
    dealt = [prompts[place].prompt_id for place in naive_order(prompts, order.lengths)]
    assert asked_longest == [dealt[rank::ranks] for rank in range(ranks)] and asked_longest != asked_drawn
