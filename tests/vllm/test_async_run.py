"""Whole runs that generate ahead on a real engine: the modes agree, and a lost engine is mended."""

import json

import pytest
import torch

from tests.pairwise import quick
from tests.runs.command import rows_of, timeless, trained_prompts, weights_of
from tests.vllm.served import BASE, run_killing_engines

pytestmark = pytest.mark.vllm
REWARDS = ("reward.functions=[tests.reward_functions:parity,math_verify]", "reward.num_workers=1")
AHEAD = (*BASE, *REWARDS, "rollout.producer.min_groups=2")
STREAMING = ("rollout.producer.mode=streaming",)
LAYOUTS = {"DP2, two engines": (2, ()),
           "TP2-PP2, one engine": (4, ("parallel.tensor=2", "parallel.pipeline=2", "rollout.num_engines=1"))}


def exact(row: dict) -> dict:
    """Return a row without what rounds otherwise where an engine batches what it has: its own log-probs."""
    return {k: v for k, v in timeless(row).items() if not k.startswith(("train/logprob_gap", "train/approx"))}


@pytest.mark.parametrize("layout", quick(LAYOUTS, "DP2, two engines"))
def test_streaming_without_staleness_is_the_synchronous_run(run, tmp_path, layout):
    """The same prompts, samples and weights, to the bit; the trainer's own log-probs are trained on."""
    (world, degrees), one, two = LAYOUTS[layout], tmp_path / "sync", tmp_path / "streaming"
    run(*degrees, base=AHEAD, world=world, out=one)
    run(*degrees, *STREAMING, "rollout.producer.max_staleness_steps=0", base=AHEAD, world=world, out=two)
    assert [exact(row) for row in rows_of(one)] == [exact(row) for row in rows_of(two)]
    assert all(torch.equal(value, weights_of(two)[name]) for name, value in weights_of(one).items())


@pytest.mark.long
def test_retries_in_parts_are_those_of_the_synchronous_run(run, tmp_path):
    """A third of the completions fails. Engines sample these again beside the other groups of the rollout."""
    failing = ("reward.functions=[tests.reward_functions:picky]", "reward.on_error=retry_sample")
    base = (*AHEAD, *failing, "reward.max_retries=9", "rollout.producer.max_staleness_steps=0")
    out = (tmp_path / "sync", tmp_path / "streaming")
    for folder, mode in zip(out, ((), STREAMING), strict=True):
        run(*mode, base=base, out=folder)
    one, two = ([exact(row) for row in rows_of(folder)] for folder in out)
    assert one == two and max(row.get("reward/retried", 0.0) for row in one) > 4
    assert all(torch.equal(value, weights_of(out[1])[name]) for name, value in weights_of(out[0]).items())


@pytest.mark.long
def test_an_engine_that_dies_twice_while_it_works_ahead(run, tmp_path):
    """It is killed under a request by the second and by the third weights: what it owed is asked again."""
    given = (*STREAMING, "train.num_rollouts=5", "rollout.max_response_tokens=24")
    ((said, killed),) = run(*given, base=AHEAD, function=run_killing_engines, more=((2, 3),))
    assert killed == 2, said
    # two jobs under way may name two causes of one loss
    assert said.count("lost its engine") >= 2 and said.count("is started again") == 2, said
    firsts = [row["rollout"] for row in rows_of(tmp_path) if "async/staleness_max" in row]
    assert firsts == [1, 2, 3, 4, 5] and len(set(trained_prompts(tmp_path))) == len(trained_prompts(tmp_path)) == 40


@pytest.mark.long
def test_stragglers_of_a_whole_run_go_on_under_new_weights(run, tmp_path):
    """Each rollout but the last leaves 2 of its 8 groups to the next, and every prompt is trained once."""
    given = ("rollout.start_order=longest_first", "rollout.producer.mode=prefetch", "weight_sync.in_flight=true")
    given += ("rollout.producer.straggler_share=0.25", "rollout.producer.max_staleness_steps=4")
    given += ("correction.mode=token_truncate", "reward.num_workers=1", "train.num_rollouts=5")
    run(*given, "rollout.vllm={max_num_seqs: 8}", "rollout.max_response_tokens=32", "optimizer.lr=3e-4", base=BASE)
    firsts = [row for row in rows_of(tmp_path) if "async/stragglers" in row]
    assert [row["async/stragglers"] for row in firsts] == [2.0] * 4 + [0.0]
    assert max(row["async/staleness_max"] for row in firsts) <= 4.0
    batches = [json.loads(line)["prompts"] for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert [len(batch) for batch in batches] == [8] * 5 and len(set(trained_prompts(tmp_path))) == 40
