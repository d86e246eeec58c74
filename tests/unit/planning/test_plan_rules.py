"""Checks the rules that a run gives its plan (planning/plan.py), and FP8's pads in them and in packed micro-batches."""

from types import SimpleNamespace

import pytest
import torch

from megatron_rl.config import load_config
from megatron_rl.errors import ConfigError
from megatron_rl.model.attention.spans import ContextShard
from megatron_rl.planning.plan import PlanRules, plan_rules
from tests.reference import make_samples
from tests.unit.backend.packed import run_pack


def rules_of(tensor: int, pipeline: int, virtual: int, context: int, sequence_parallel: bool, given: tuple[str, ...],
             sizes: dict) -> PlanRules:
    split = f"parallel.tensor={tensor}", f"parallel.sequence_parallel={str(sequence_parallel).lower()}"
    degrees = dict(tensor_size=tensor, pipeline_size=pipeline, virtual_size=virtual, context_size=context)
    place = SimpleNamespace(**degrees, data_size=6, lockstep_replicas=3)
    shares = [(sizes.pop("num_layers") / pipeline,) * 3] * pipeline
    shape = SimpleNamespace(**sizes, rank_shares=lambda _: shares)
    config = load_config(None, [*given, *split])
    return plan_rules(config.plan, place, shape, sequence_parallel=config.parallel.sequence_parallel,
                      fp8=bool(config.megatron.transformer.get("fp8")))


@pytest.mark.parametrize(("tensor", "pipeline", "virtual", "context", "sequence_parallel", "pads", "multiple"), [
    (1, 1, 1, 1, False, 1, 1),
    (4, 2, 1, 1, True, 4, 1),
    (4, 2, 1, 1, False, 1, 1),
    (2, 4, 3, 2, True, 8, 4),
    (1, 2, 2, 2, False, 4, 2),
])
def test_rules_of_a_run_are_its_settings(tensor: int, pipeline: int, virtual: int, context: int,
                                         sequence_parallel: bool, pads: int, multiple: int) -> None:
    """The LM head, worth 3 layers here, is counted over the layers of the last stage alone."""
    given = "plan.max_tokens_per_microbatch=4096", "plan.microbatch_overhead_tokens=100"
    sizes = dict(num_layers=12, square_share=1e-3, head_layers=3.0)
    rules = rules_of(tensor, pipeline, virtual, context, sequence_parallel, given, sizes)
    assert (rules.max_tokens, rules.data_size, rules.lockstep_ranks) == (4096, 6, 3)
    assert (rules.pad_multiple, rules.microbatch_multiple, rules.row_multiple) == (pads, multiple, 1)
    assert [x.token for x in rules.cost.stages] == [1.0] * (pipeline - 1) + [1.0 + 3.0 * pipeline / 12]
    assert {(x.overhead, x.square) for x in rules.cost.stages} == {(100.0, 1e-3)} and rules.cost.virtual == virtual


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("context", [1, 2])
def test_fp8_pads_micro_batches_to_16_rows_a_rank_within_the_cap(context: int, sequence_parallel: bool) -> None:
    """The cap is lowered to a multiple of the pads; one below a single multiple is refused, with the number."""

    def capped(cap: int) -> PlanRules:
        given = "megatron.transformer.fp8=hybrid", "skip.mode=off", f"plan.max_tokens_per_microbatch={cap}"
        sizes = dict(num_layers=2, square_share=0.0, head_layers=1.0)
        return rules_of(2, 1, 1, context, sequence_parallel, given, sizes)

    rows = 16 * context * (2 if sequence_parallel else 1)
    for cap in (rows, 1000):
        assert (capped(cap).row_multiple, capped(cap).max_tokens) == (rows, cap // rows * rows)
    with pytest.raises(ConfigError, match=f"max_tokens_per_microbatch={rows - 1} is below {rows}"):
        capped(rows - 1)


def test_row_multiples_that_do_not_fit_are_refused() -> None:
    for wrong in (dict(max_tokens=40, row_multiple=16), dict(max_tokens=48, row_multiple=16, pad_multiple=6)):
        with pytest.raises(ValueError, match="row_multiple=16 must divide max_tokens"):
            PlanRules(**wrong)


@pytest.mark.parametrize("context", [1, 2])
def test_the_last_sequence_takes_a_micro_batch_s_pads(context: int) -> None:
    """All tokens of all ranks are a multiple of the rows; what is trained is that of the micro-batch without them."""
    samples, chosen, rows = make_samples(5, seed=3), [4, 0, 2], 16 * context
    shards = [ContextShard(rank=rank, size=context) for rank in range(context)]
    pads = 2 * context if context > 1 else 1
    plain, padded = ([run_pack(samples, chosen, pad_multiple=pads, context=shard, **more) for shard in shards]
                     for more in ({}, {"row_multiple": rows, "pad_token": 98}))
    lengths = padded[0].packed.layout.lengths
    assert lengths[:-1] == plain[0].packed.layout.lengths[:-1] and sum(lengths) % rows == 0
    assert 0 <= lengths[-1] - plain[0].packed.layout.lengths[-1] < rows
    alone = [-(-len(samples[i].token_ids) // pads) * pads for i in chosen]
    assert lengths == (*alone[:-1], alone[-1] + -sum(alone) % rows)
    for name in ("targets", "flat", "advantages", "rollout_logprobs"):
        found, wanted = (torch.cat([torch.as_tensor(getattr(part, name)) for part in parts]).sort().values
                         for parts in (padded, plain))
        assert torch.equal(found, wanted), name
    assert sum(len(part.packed.position_ids) for part in padded) == sum(lengths)
