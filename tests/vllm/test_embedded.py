"""A real embedded vLLM engine gives Hugging Face's tokens and log-probs, whichever weights it got, and however."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.config import ProducerConfig
from megatron_rl.rollout.engines.engine import NO_WEIGHTS
from megatron_rl.rollout.groups.longest_first import LongestFirst
from megatron_rl.rollout.job import RolloutJob
from megatron_rl.rollout.worker import RolloutWorker
from megatron_rl.types import Score
from tests.patience import until
from tests.vllm.rig import BLOCK_TOKENS, LOGPROB_TOLERANCE, REQUEST_S, gap_of, make_prompts, running, sender_of, told

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("bounded")]

PROMPTS = make_prompts(5, 2, 40, 1, 17, 33, 100, 64)
STOP = 0


@pytest.fixture
def loaded(bench):
    """Return the engine with weights of seed 1."""
    bench.load(1)
    return bench


@contextlib.contextmanager
def temperature(bench, value: float) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.engine, "_rollout", replace(bench.engine._rollout, temperature=value))
        yield


def test_greedy_equals_the_transformers_engine(loaded):
    ours = loaded.engine.generate(PROMPTS, 2, temperature=0.0)
    theirs = loaded.in_this_process(1).generate(PROMPTS, 2, temperature=0.0)
    assert told(ours) == told(theirs) and [x.text for x in ours] == [x.text for x in theirs]
    assert {x.finish_reason for x in ours} == {"stop", "length"}  # or one of the two ends is not compared


def test_logprobs_equal_hugging_faces_at_the_sampling_temperature(loaded):
    """A call's temperature draws and scores as the config's, and neither's log-probs are the other's."""
    before = loaded.engine.generate(PROMPTS, 4)
    with temperature(loaded, 1.0):
        wanted = loaded.engine.generate(PROMPTS, 4)
    found = loaded.engine.generate(PROMPTS, 4, temperature=1.0)
    assert told(found) == told(wanted) != told(before) == told(loaded.engine.generate(PROMPTS, 4))
    for rollouts, value in ((before, 0.7), (wanted, 1.0), (found, 1.0)):
        assert max(gap_of(loaded.model, x, value).max() for x in rollouts) < LOGPROB_TOLERANCE
        assert max(gap_of(loaded.model, x, 1.7 - value).max() for x in rollouts) > 0.1


def test_alone_equals_in_a_batch(loaded):
    together = loaded.engine.generate(PROMPTS, 4)
    alone = [x for prompt in PROMPTS for x in loaded.engine.generate([prompt], 4)]
    assert told(together) == told(alone) == told(loaded.engine.generate(PROMPTS, 4))
    assert sorted(told(loaded.engine.generate(PROMPTS[::-1], 4))) == sorted(told(together))


def test_samples_of_a_prompt_are_distinct_draws(loaded):
    """Each sample, attempt and version has draws of its own."""
    rollouts = loaded.engine.generate([PROMPTS[2]], 16)
    assert [x.sample_index for x in rollouts] == list(range(16)) and len({x.response_ids for x in rollouts}) > 12
    assert [x.response_ids for x in loaded.engine.generate([PROMPTS[2]], 4)] == [x.response_ids for x in rollouts[:4]]
    first = told(loaded.engine.generate(PROMPTS, 4))
    assert told(loaded.engine.generate([replace(prompt, attempt=1) for prompt in PROMPTS], 4)) != first
    loaded.load(1)  # the same weights under another version
    assert told(loaded.engine.generate(PROMPTS, 4)) != first


def test_a_stop_token_ends_a_completion_and_stands_last(loaded):
    rollouts = loaded.engine.generate(PROMPTS, 16)
    most = loaded.config.rollout.max_response_tokens
    stopped = [x for x in rollouts if x.finish_reason == "stop"]
    cut = [x for x in rollouts if x.finish_reason == "length"]
    assert stopped and cut and len(stopped) + len(cut) == len(rollouts)
    assert all(x.response_ids[-1] == STOP and STOP not in x.response_ids[:-1] for x in stopped)
    assert all(len(x.response_ids) == most and STOP not in x.response_ids for x in cut)
    assert all(len(x.logprobs) == len(x.response_ids) for x in rollouts)
    assert all(x.weight_versions == ((loaded.engine.weight_version, len(x.response_ids)),) for x in rollouts)


OTHERS = [pytest.param(name, marks=pytest.mark.long) for name in ("qwen2 untied", "llama untied", "qwen3 tied")]


@pytest.fixture(scope="module", params=["qwen2 tied", *OTHERS])
def family(request, inputs, tmp_path_factory):
    name, tied = request.param.split()
    if request.param == "qwen2 tied":
        yield request.getfixturevalue("bench")
        return
    with running(inputs, tmp_path_factory.mktemp(name), name, tied=tied == "tied") as started:
        yield started


SYNCS = [(channel, size) for channel in ("shared_memory", "broadcast") for size in (1, 12_000, 1 << 26)]
SYNCS += [("shared_memory", 5_000)]


def test_after_every_sync_logprobs_equal_hugging_faces(family):
    """Several weights come one after the other; a bucket of one byte takes one tensor, and grows to it."""
    last = NO_WEIGHTS
    for seed, (channel, bucket_bytes) in enumerate(SYNCS):
        version = family.load(seed, channel=channel, bucket_bytes=bucket_bytes)
        assert version > last and family.engine.weight_version == version
        rollouts = family.engine.generate(PROMPTS, 2)
        assert {x.weight_versions for x in rollouts} == {((version, len(x.response_ids)),) for x in rollouts}
        assert family.worst(rollouts) < LOGPROB_TOLERANCE, (channel, bucket_bytes)
        last = version


def test_a_broadcast_channel_is_opened_once_and_serves_every_sync(bench):
    sender = sender_of(channel="broadcast", bucket_bytes=12_000)
    for seed in (1, 2):
        report = sender.deliver(iter(bench.weights(seed).items()), next(bench.versions), [bench.replica])
        assert not report.failed and sender.group.spans([bench.replica])
        assert bench.largest_gap(PROMPTS, 1) < LOGPROB_TOLERANCE
    sender.forget(bench.replica)
    bench.engine._sync.forget(bench.replica)


def test_an_engine_says_how_full_it_is_and_when_it_is_idle(loaded):
    """With its progress come vLLM's own counts; the most of a call stays until the next one begins."""
    loaded.engine.generate(PROMPTS, 8)  # a frame comes after the first step, before any sample of more than a token
    assert loaded.engine.readings()[0].most_running > 0
    assert until(lambda: loaded.replica.load.running == 0)  # the frame of the last step may come after its samples
    (reading,) = loaded.engine.readings()
    assert (reading.number, reading.is_up, reading.weight_version) == (None, True, loaded.engine.weight_version)
    assert (reading.running, reading.waiting) == (0, 0) and 0 <= reading.kv_cache_usage <= 1
    assert 0 < reading.most_running <= 8 * len(PROMPTS) and 0 < reading.most_kv_cache_usage <= 1
    assert reading.most_running + reading.most_waiting <= 8 * len(PROMPTS)


def test_a_sync_resets_the_prefix_cache(bench, monkeypatch):
    """Leaving the reset out shows: a prompt's prefix would find the old weights' keys and values."""
    prompts = make_prompts(3 * BLOCK_TOKENS + 4, 2 * BLOCK_TOKENS + 9)
    bench.load(1)
    bench.engine.generate(prompts, 1)
    bench.load(2)
    assert bench.largest_gap(prompts) < LOGPROB_TOLERANCE
    with monkeypatch.context() as planted:
        bench.skip_resets(planted)
        bench.load(3)
    assert bench.largest_gap(prompts) > 1000 * LOGPROB_TOLERANCE
    bench.load(4)
    assert bench.largest_gap(prompts) < LOGPROB_TOLERANCE


def test_longest_first_draws_the_samples_of_drawn_order(bench):
    """Longest first draws the tokens of drawn order, and their log-probs to the rounding of other batches."""
    bench.load(5)
    prompts = dict(enumerate(make_prompts(*range(3, 63, 3))))
    order = LongestFirst()
    order.load_state({str(row): (7 * row) % 11 for row in range(0, 20, 2)})
    found = []
    for arranged in (prompts, order.arrange(prompts)):
        worker = RolloutWorker(
            bench.engine, lambda rollouts: [Score(total=0.0, by_function=()) for _ in rollouts], ProducerConfig(),
            apart=False, share=(0, 1), deadline_s=REQUEST_S,
        )  # fmt: skip
        job = RolloutJob(arranged, list(arranged), dict.fromkeys(arranged, 4))
        worker.generate(job)
        assert job.error is None and job.lost is None and len(job.ended_s) == len(prompts)
        found.append([x for place in sorted(prompts) for x in job.rollouts[place]])
    drawn, longest = found
    assert list(order.arrange(prompts)) != list(prompts) and told(drawn) == told(longest)
    gaps = [np.abs(np.subtract(a.logprobs, b.logprobs)).max() for a, b in zip(drawn, longest, strict=True)]
    assert max(gaps) < LOGPROB_TOLERANCE
