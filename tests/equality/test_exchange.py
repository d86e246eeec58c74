"""Exchanges: facts reach everyone in one order, rows the ranks that need them bit for bit, scores with their gaps."""

import dataclasses

import numpy as np
import pytest

from megatron_rl.backend import batch_exchange
from megatron_rl.config import ParallelConfig
from megatron_rl.distributed import topology
from megatron_rl.errors import NonFiniteAdvantage
from megatron_rl.types import Sample, Score
from tests.reference import make_samples, sample_of

COUNT = 13


def owner_of(i: int, world: int) -> int:
    """Return the rank that owns sample i: uneven, and the last rank of several owns nothing."""
    return (i * i) % max(world - 1, 1)


def place(i: int) -> int:
    """Return the place of sample i: places are neither consecutive nor in the order of production."""
    return (i * 7) % COUNT * 10


def bits(sample: Sample) -> tuple:
    """Return all of a sample as values that are equal where its bits are."""
    arrays = (sample.token_ids, sample.loss_mask, sample.logprobs, sample.routed_experts)
    held = [None if x is None else (x.dtype, x.shape, x.tobytes()) for x in arrays]
    return sample.sample_id, sample.prompt_tokens, *held


def with_routing(samples: list[Sample], mode: str) -> list[Sample]:
    """Return samples of which none, all, or (mixed) two thirds have routed experts, in two shapes and with any bits."""
    random = np.random.default_rng(5)
    found = []
    for i, sample in enumerate(samples):
        routed = random.integers(-1, 2**15, (len(sample.token_ids), *((3, 1) if i % 2 else (2, 8)))).astype(np.int16)
        has = mode == "all" or (mode == "mixed" and i % 3 > 0)
        found.append(dataclasses.replace(sample, routed_experts=routed if has else None))
    return found


def bring(rank, world, tensor, pipeline, needs, routing) -> dict[str, list[bool]]:
    here = topology.initialize(ParallelConfig(tensor=tensor, pipeline=pipeline), deadline_s=30)
    samples, odd = with_routing(make_samples(COUNT), routing), [np.nan, -np.inf, -0.0, 1e-45]  # bits, not values
    samples[4].logprobs[:] = np.resize(np.array(odd, dtype=np.float32), len(samples[4].logprobs))
    mine = [i for i in range(COUNT) if owner_of(i, world) == rank]
    facts = batch_exchange.gather_facts([samples[i] for i in mine], [i // 3 for i in mine], [place(i) for i in mine])
    in_order = sorted(range(COUNT), key=place)
    ordered, rows_found = [samples[i] for i in in_order], []
    facts_found = [facts.sample_ids == tuple(s.sample_id for s in ordered),
                   facts.groups.tolist() == [i // 3 for i in in_order],
                   facts.prompt_tokens.tolist() == [s.prompt_tokens for s in ordered],
                   facts.response_tokens.tolist() == [len(s.loss_mask) for s in ordered],
                   facts.loss_tokens.tolist() == [int(s.loss_mask.sum()) for s in ordered],
                   facts.owners.tolist() == [owner_of(i, world) for i in in_order]]
    for need in needs:
        wanted = [np.array(x, dtype=np.int64) for x in need]
        rows = batch_exchange.exchange_rows(facts, [samples[i] for i in mine], wanted, here)
        rows_found.append(sorted(rows) == need[rank] and all(bits(row) == bits(ordered[i]) for i, row in rows.items()))
    return {"facts": facts_found, "rows": rows_found}


@pytest.mark.parametrize(
    ("world", "tensor", "pipeline", "routing"),
    [(1, 1, 1, "none"), (2, 1, 1, "none"), (2, 1, 1, "all"), (3, 1, 1, "mixed"), (4, 2, 1, "none"), (4, 1, 2, "mixed")],
)
def test_every_rank_gets_exactly_the_rows_it_needs(pool, world, tensor, pipeline, routing):
    """The needs are all, none, one rank alone, disjoint and random, with empty ranks on both sides."""
    random, everything = np.random.default_rng(world), list(range(COUNT))
    needs = [[everything] * world,
             [[]] * world,
             [everything if rank == world - 1 else [] for rank in range(world)],
             [everything[rank::world] for rank in range(world)],
             *[[np.flatnonzero(random.random(COUNT) < 0.5).tolist() for _ in range(world)] for _ in range(8)]]
    for found in pool.run(world, bring, tensor, pipeline, needs, routing, timeout_s=30):
        assert all(found["facts"]) and len(found["rows"]) == len(needs) and all(found["rows"]), found


def gather(rank: int, world: int, changed: int, score: Score) -> tuple[np.ndarray, np.ndarray] | str:
    """Gather nine scores, dealt backwards, of which one is ``score``; return them, or the words of the refusal."""
    values = {i: Score(total=i / 3, by_function=(i / 3, None if i % 2 else -float(i))) for i in range(9)}
    values[changed] = score
    mine = [i for i in reversed(range(9)) if owner_of(i, world) == rank]
    try:
        return batch_exchange.gather_scores([values[i] for i in mine], mine, 2, sample_ids=[f"s{i}" for i in mine])
    except NonFiniteAdvantage as error:
        return str(error)


@pytest.mark.parametrize(
    ("total", "second", "said"),
    [(float("inf"), 1e308, "inf, of reward.functions that gave (1, 1e+308)"), (float("nan"), float("nan"), "nan, of ")],
    ids=["overflow", "nan"],
)
def test_a_score_that_is_not_finite_is_refused_on_every_rank(pool, total, second, said):
    """A NaN stands for "no score": as one, a total of NaN would have taken its sample out in silence."""
    for found in pool.run(3, gather, 7, Score(total=total, by_function=(1.0, second)), timeout_s=30):
        assert f"the total reward of sample s7 is {said}" in found and "lower reward.weights" in found


@pytest.mark.parametrize("world", [1, 3])
def test_scores_arrive_in_order_with_their_gaps(pool, world):
    totals = np.array([i / 3 for i in range(9)])
    totals[4] = np.nan
    second = np.array([np.nan if i % 2 else -float(i) for i in range(9)])
    second[4] = np.nan
    for found, by_function in pool.run(world, gather, 4, Score(total=None, by_function=(None, None)), timeout_s=30):
        np.testing.assert_array_equal(found, totals)  # exactly: JSON carries float64 by repr
        np.testing.assert_array_equal(by_function, np.stack([totals, second], axis=1))


def refused(rank: int, world: int, samples: list[Sample], places: list[int], holders: list[int]) -> str:
    """Return the words about samples at ``places``, which the ranks of ``holders`` hold; the others hold none."""
    topology.initialize(deadline_s=30)
    own = (samples, [0] * len(samples), places) if rank in holders else ([], [], [])
    with pytest.raises(ValueError) as caught:
        batch_exchange.gather_facts(*own)
    return str(caught.value)


def test_two_samples_with_one_place_are_refused_everywhere(pool):
    for said in pool.run(2, refused, make_samples(2), [0, 1], [0, 1], timeout_s=30):
        assert "claim the same place" in said


@pytest.mark.parametrize(
    "routed",
    [np.zeros((3, 2, 2), dtype=np.int16),  # of the response alone
     np.zeros((7, 2, 2), dtype=np.int64),
     np.zeros((7, 4), dtype=np.int16),
     np.zeros((7, 0, 2), dtype=np.int16)],
    ids=["tokens", "dtype", "dimensions", "no layer"],
)
def test_routed_experts_that_do_not_fit_their_sample_are_refused_everywhere(pool, routed):
    sample = sample_of("7@0#1", np.arange(7), 3, routed_experts=routed)
    for said in pool.run(2, refused, [sample], [0], [1], timeout_s=30):
        assert f"routed_experts of sample 7@0#1 is {routed.dtype} {list(routed.shape)}" in said
        assert "it must be int16 [7, layers, top_k]" in said
