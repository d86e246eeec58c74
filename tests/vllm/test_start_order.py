"""Start orders and stragglers with a real engine: the same samples in either order, and none lost or trained twice."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megatron_rl.config import ProducerConfig
from megatron_rl.rollout.start_order import StartOrder
from megatron_rl.rollout.worker import RolloutJob, RolloutWorker
from megatron_rl.types import Score
from tests.runs.command import arguments, command_line, rows_of, trained_prompts
from tests.vllm.rig import LOGPROB_TOLERANCE, REQUEST_S, make_prompts, told

pytestmark = pytest.mark.vllm
SAMPLES = 4


@pytest.mark.usefixtures("bounded")
def test_longest_first_draws_the_samples_of_drawn_order(bench):
    """Longest first draws the tokens of drawn order, and their log-probs to the rounding of other batches."""
    bench.load(5)
    prompts = dict(enumerate(make_prompts(*range(3, 63, 3))))
    order = StartOrder(longest_first=True)
    order.load_state({str(row): (7 * row) % 11 for row in range(0, 20, 2)})
    found = []
    for arranged in (prompts, order.arrange(prompts)):
        worker = RolloutWorker(
            bench.engine,
            lambda rollouts: [Score(total=0.0, by_function=()) for _ in rollouts],
            ProducerConfig(),
            apart=False,
            share=(0, 1),
            deadline_s=REQUEST_S,
        )
        job = RolloutJob(arranged, list(arranged), SAMPLES)
        worker.generate(job)
        assert job.error is None and job.lost is None and len(job.ended_s) == len(prompts)
        found.append([x for place in sorted(prompts) for x in job.rollouts[place]])
    drawn, longest = found
    assert list(order.arrange(prompts)) != list(prompts) and told(drawn) == told(longest)
    gaps = [np.abs(np.subtract(a.logprobs, b.logprobs)).max() for a, b in zip(drawn, longest, strict=True)]
    assert max(gaps) < LOGPROB_TOLERANCE


def test_stragglers_of_a_whole_run_go_on_under_new_weights(pool, arithmetic, tmp_path):
    """Each rollout but the last leaves 2 of its 8 groups to the next, and every prompt is trained once."""
    given = arguments(
        arithmetic,
        tmp_path,
        "rollout.engine=vllm",
        "run.deadline_s=150",
        "rollout.start_s=120",
        "rollout.request_s=60",
        "rollout.vllm={max_num_seqs: 8}",
        "rollout.start_order=longest_first",
        "rollout.producer.mode=prefetch",
        "rollout.producer.straggler_share=0.25",
        "rollout.producer.max_staleness_steps=4",
        "weight_sync.in_flight=true",
        "correction.mode=token_truncate",
        "reward.num_workers=1",
        "train.num_rollouts=5",
        "rollout.max_response_tokens=32",
    )
    ((code, said),) = pool.run(1, command_line, given, timeout_s=240)
    assert code == 0, said
    firsts = [row for row in rows_of(tmp_path) if "async/stragglers" in row]
    assert [row["async/stragglers"] for row in firsts] == [2.0] * 4 + [0.0]
    assert max(row["async/staleness_max"] for row in firsts) <= 4.0
    batches = [json.loads(line)["prompts"] for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert [len(batch) for batch in batches] == [8] * 5 and len(set(trained_prompts(tmp_path))) == 40
