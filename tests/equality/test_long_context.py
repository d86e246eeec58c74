"""Memory grows with a sample's tokens and not with their square: on the host, in attention and over a whole update.

Bytes are counted, not seconds: numpy's by tracemalloc, torch's by tests/allocated.py. A square would show as four times
as much at twice the tokens; what does not grow at all only lowers the ratio.
"""

import dataclasses
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch

from megatron_rl.backend import MegatronBackend
from megatron_rl.backend.batch import Batch
from megatron_rl.backend.packing import Packer
from megatron_rl.config import load_config
from megatron_rl.distributed import topology
from megatron_rl.model.attention.flash import span_attention
from megatron_rl.model.attention.layout import Layout
from megatron_rl.model.attention.spans import ContextShard, batch_spans, causal_spans
from megatron_rl.model.invariant.visible_keys import Sight
from megatron_rl.planning.plan import PlanRules, plan_steps
from megatron_rl.planning.tokens import tokens_of
from megatron_rl.types import MicroBatch, Sample
from tests.allocated import AllocationMeter
from tests.equality.rig import DEFAULTS, Rig
from tests.reference import file_weights, sample_of, tiny_config
from tests.unit.backend.packed import CPU, facts_of, inputs_of

TWICE = 2.2  # of memory at twice the tokens, with a tenth for what comes in steps; a square would give 4
TOKENS = 8192


def long_sample(tokens: int, number: int = 0) -> Sample:
    return sample_of(f"long{number}", np.random.default_rng(0).integers(2, 99, tokens), tokens * 3 // 4, logprob=-5.0)


def host_bytes(work: Callable[[], object]) -> int:
    """Return the most bytes that numpy and torch held within ``work``."""
    meter = AllocationMeter()
    tracemalloc.start()
    try:
        with meter:
            kept = work()
        return tracemalloc.get_traced_memory()[1] + meter.peak_bytes
    finally:
        tracemalloc.stop()
        del kept


@pytest.mark.parametrize("size", [1, 2, 4], ids="CP{}".format)
@pytest.mark.parametrize("shares", [False, True], ids=["alone", "shared prompt"])
def test_planning_and_packing_hold_what_grows_with_the_tokens(size, shares):
    rules = PlanRules(max_tokens=4 * TOKENS, pad_multiple=2 * size, share_prompts=shares)

    def work(tokens: int) -> object:
        samples = [long_sample(tokens, i) for i in range(2)]
        facts = dataclasses.replace(facts_of(samples), prompt_keys=np.zeros(2, dtype=np.int64))
        sample_tokens = tokens_of(facts, share_prompts=shares)
        plan = plan_steps("train", [np.arange(2)], sample_tokens, np.ones(2, dtype=bool), rules, drops=True)
        context = ContextShard(rank=0, size=size)
        packer = Packer(pad_token=0, needs_tokens=True, needs_loss=True, device=CPU, context=context)
        batch = Batch(facts=facts, local=(), rows=dict(enumerate(samples)))
        whole = MicroBatch(samples=np.arange(2), filler=False)
        return plan, packer.pack(whole, batch=batch, inputs=inputs_of(samples), rules=rules)

    work(64)
    assert host_bytes(lambda: work(2 * TOKENS)) < TWICE * host_bytes(lambda: work(TOKENS))


def test_what_each_query_of_the_bitwise_layers_sees_grows_with_the_tokens():
    def held(tokens: int) -> int:
        sight = Sight.of_layout(Layout.of((tokens, 64)))
        return sum(x.numel() for x in (sight.queries, sight.real, sight.seen, sight.keys, sight.first))

    assert held(2 * TOKENS) < TWICE * held(TOKENS)
    assert host_bytes(lambda: held(2 * TOKENS)) < TWICE * host_bytes(lambda: held(TOKENS))


def test_attention_makes_no_scores_and_no_mask():
    """Forward and backward hold no tensor of the size [queries, keys], whichever kernel they call."""

    def peak(tokens: int) -> int:
        query, key, value = (torch.randn(tokens, heads, 16, requires_grad=True) for heads in (2, 1, 1))
        batches = batch_spans(causal_spans((2 * tokens,), ContextShard(rank=1, size=2)), tokens, 2 * tokens, CPU)
        keys = [torch.cat([x, x]) for x in (key, value)]
        meter = AllocationMeter()
        with meter:
            span_attention(query, *keys, batches, 0.25).sum().backward()
        return meter.peak_bytes

    assert peak(2048) < TWICE * peak(1024)


def update_bytes(rank: int, world: int) -> list[int]:
    """Return the most bytes that torch held in the gradient of one sample, of 512 tokens and of 1,024."""
    hf_config = tiny_config("qwen3")
    hf_config.max_position_embeddings = 1024
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(hf_config).float()
    config = load_config(None, [*DEFAULTS, f"parallel.context={world}", "plan.max_tokens_per_microbatch=1024"])
    found = []
    try:
        backend = MegatronBackend(config, hf_config=hf_config, weights=file_weights(model))
        rig = Rig(backend=backend, model=model)
        for tokens in (64, 512, 1024):
            rig.take([long_sample(tokens)], [0])
            plan = rig.plan(np.ones(1), drops=True)
            with (meter := AllocationMeter()):
                rig.accumulate(np.ones(1), plan)
            backend.zero_grad()
            found.append(meter.peak_bytes)
    finally:
        topology.destroy()
    return found[1:]


@pytest.mark.parametrize("world", [1, 2], ids="CP{}".format)
def test_an_update_holds_what_grows_with_the_tokens(pool, world):
    for less, more in pool.run(world, update_bytes, timeout_s=60):
        assert 1.5 * less < more < TWICE * less
