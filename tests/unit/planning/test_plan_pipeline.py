"""planning/plan.py on a pipeline: the number of micro-batches and their order."""

import numpy as np

from megatron_rl.planning.plan import PlanRules
from megatron_rl.planning.timeline import simulate
from tests.unit.planning.lockstep import one_step, pipeline


def test_pipeline_takes_the_best_number_under_the_cap_and_balance_counts_attention_too() -> None:
    """For 64 equal samples at p = 4 the cap alone asks for 4 micro-batches and the cost for more."""
    rules = PlanRules(cost=pipeline(4, overhead=64), max_tokens=2048)
    sizes = np.diff(one_step([128] * 64, rules).microbatch_offsets)
    assert len(sizes) == rules.cost.best_count(64 * 128, 64 * 128**2) == 20 and sizes.max() - sizes.min() <= 1
    # one sample of 1,000 tokens costs as much as 2,000 tokens in short ones where a square costs 1/1000 of a token
    lengths = [1000, *[100] * 20]
    plain, squared = (PlanRules(data_size=2, cost=pipeline(1, square=x)) for x in (0.0, 1e-3))
    for rules, with_the_long_one in ((plain, 6), (squared, 2)):
        one = one_step(lengths, rules)
        ranks = [one.rank_samples(rank).tolist() for rank in range(2)]
        assert len(next(rank for rank in ranks if 0 in rank)) == with_the_long_one


def test_the_order_of_microbatches_saves_time_on_the_clock() -> None:
    """By planning/timeline.py's clock, against the order of the samples, in the mean on every pipeline."""
    for stages, cap, spread in ((2, 4096, 0.6), (4, 4096, 0.6), (4, 2048, 0.9), (8, 2048, 0.6)):
        saved = []
        for seed in range(20):
            random, rules = np.random.default_rng(seed), PlanRules(cost=pipeline(stages), max_tokens=cap)
            lengths = np.minimum(500 * np.exp(random.normal(0, spread, 40)), 4000).astype(int)
            one = one_step(lengths, rules)
            cut = np.split(one.order, one.microbatch_offsets[1:-1])
            clock = {}
            for name, order in (("planned", cut), ("as they come", sorted(cut, key=min))):
                forward_s = np.tile([256.0 + lengths[m].sum() for m in order], (stages, 1))
                clock[name] = simulate(forward_s, 2 * forward_s, pipeline=stages).makespan
            saved.append(clock["planned"] / clock["as they come"])
        assert np.mean(saved) < 0.995 and max(saved) < 1.05, (stages, np.mean(saved), max(saved))
