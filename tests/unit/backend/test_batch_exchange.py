"""Checks backend/batch_exchange.py without a world: the rows that ranks need, and that a row comes back as sent."""

import dataclasses

import numpy as np
import pytest

from megatron_rl.backend.batch_exchange import _decode, _encode, _row_words, needed_rows
from megatron_rl.distributed.topology import Topology
from megatron_rl.planning.plan import PlanRules, plan_steps, split_mini_batches
from megatron_rl.types import BatchFacts, Sample

ONE = {field.name: None if field.name.endswith("_group") else int(field.name.endswith("_size"))
       for field in dataclasses.fields(Topology)}


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("pipeline", [1, 2, 4])
def test_rows_go_to_the_ends_of_each_replicas_pipeline_alone(tensor: int, pipeline: int) -> None:
    """The first stage reads tokens and the last one masks; the order of ranks is tensor, data, pipeline."""
    data = 2
    sizes = dict(tensor_size=tensor, pipeline_size=pipeline, data_size=data, world_size=tensor * data * pipeline)
    topology, rules = Topology(**(ONE | sizes)), PlanRules(data_size=data, max_tokens=20)
    mini_batches, lengths, signal = split_mini_batches(np.arange(11), 6), np.arange(3, 14), np.arange(11) % 3 > 0
    plan = plan_steps("train", mini_batches, lengths, signal, rules, drops=True)
    found = needed_rows(plan, topology)
    assert len(found) == topology.world_size
    for rank, rows in enumerate(found):
        stage, replica = rank // (tensor * data), rank // tensor % data
        runs = sorted({i for mini_batch in plan.mini_batches for i in mini_batch.rank_samples(replica).tolist()})
        assert runs and rows.tolist() == (runs if stage in (0, pipeline - 1) else [])


@pytest.mark.parametrize("routed", [None, (2, 3), (3, 1)])
def test_a_row_comes_back_as_it_was_sent(routed: tuple[int, int] | None) -> None:
    """Every field, bit by bit, the weight version too; an odd number of experts is padded on the way."""
    random, tokens, prompt = np.random.default_rng(1), 7, 3
    sample = Sample(
        sample_id="7@0#1",
        prompt_tokens=prompt,
        token_ids=random.integers(0, 2**31, tokens),
        loss_mask=np.array([True, False, True, True]),
        logprobs=np.array([-0.5, np.nan, -np.inf, 1e-45], dtype=np.float32),
        weight_version=12,
        routed_experts=None if routed is None else random.integers(-1, 2**15, (tokens, *routed)).astype(np.int16),
    )
    facts = BatchFacts(sample_ids=("another", sample.sample_id),
                       groups=np.zeros(2, dtype=np.int64),
                       prompt_tokens=np.array([1, prompt]),
                       response_tokens=np.array([1, tokens - prompt]),
                       loss_tokens=np.array([1, 3]),
                       owners=np.zeros(2, dtype=np.int64),
                       owner_rows=np.arange(2),
                       weight_versions=np.array([0, 12]),
                       routed_shapes=None if routed is None else np.array([(0, 0), routed]))
    row = _encode(sample)
    assert row.dtype == np.int32 and len(row) == _row_words(facts)[1]
    found = _decode(row, 1, facts)
    for field in dataclasses.fields(Sample):
        one, other = (getattr(x, field.name) for x in (sample, found))
        if isinstance(one, np.ndarray):
            assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes()), field.name
        else:
            assert one == other, field.name
