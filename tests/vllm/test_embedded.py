"""A real embedded vLLM engine gives Hugging Face's tokens and log-probs.

It does so whichever weights it was given, and however.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest

from megatron_rl.rollout.engine import NO_WEIGHTS
from megatron_rl.rollout.weight_sync.sender import WeightSender
from tests.vllm.rig import (
    BLOCK_TOKENS,
    CPU,
    DEADLINE_S,
    LOGPROB_TOLERANCE,
    make_prompts,
    model_folder,
    reference_logprobs,
    start_bench,
    told,
)

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("bounded")]

PROMPTS = make_prompts(5, 2, 40, 1, 17, 33, 100, 64)
STOP = 0


@pytest.fixture(scope="module")
def loaded(bench):
    """Return the engine with weights of seed 1."""
    bench.load(1)
    return bench


@contextlib.contextmanager
def temperature(bench, value: float) -> Iterator[None]:
    before = bench.engine._rollout, bench.config
    bench.engine._rollout = replace(bench.engine._rollout, temperature=value)
    bench.config = replace(bench.config, rollout=bench.engine._rollout)
    yield
    bench.engine._rollout, bench.config = before


def test_greedy_equals_the_transformers_engine(loaded):
    ours = loaded.engine.generate(PROMPTS, 2, temperature=0.0)
    other = loaded.in_this_process(1)
    theirs = other.generate(PROMPTS, 2, temperature=0.0)
    assert told(ours) == told(theirs) and [x.text for x in ours] == [x.text for x in theirs]
    assert {x.finish_reason for x in ours} == {"stop", "length"}  # or one of the two ends is not compared


@pytest.mark.parametrize("value", [0.7, 1.0])
def test_logprobs_equal_hugging_faces_at_the_sampling_temperature(loaded, value):
    with temperature(loaded, value):
        gap = loaded.largest_gap(PROMPTS, 6)
    print(f"temperature {value}: {gap:.2e}")
    assert gap < LOGPROB_TOLERANCE


def test_a_calls_temperature_equals_the_configs(loaded):
    before = told(loaded.engine.generate(PROMPTS, 4))
    with temperature(loaded, 1.0):
        wanted = told(loaded.engine.generate(PROMPTS, 4))
    found = loaded.engine.generate(PROMPTS, 4, temperature=1.0)
    assert told(found) == wanted != before == told(loaded.engine.generate(PROMPTS, 4))
    assert max(abs(reference_logprobs(loaded.model, x, 1.0) - x.logprobs).max() for x in found) < LOGPROB_TOLERANCE


def test_logprobs_are_not_those_of_another_temperature(loaded):
    """The comparison can fail: log-probs are not those of another temperature."""
    with temperature(loaded, 0.7):
        rollouts = loaded.engine.generate(PROMPTS, 2)
    assert max(abs(reference_logprobs(loaded.model, x, 1.0) - x.logprobs).max() for x in rollouts) > 0.1


def test_alone_equals_in_a_batch(loaded):
    together = loaded.engine.generate(PROMPTS, 4)
    alone = [x for prompt in PROMPTS for x in loaded.engine.generate([prompt], 4)]
    assert told(together) == told(alone) == told(loaded.engine.generate(PROMPTS, 4))
    reversed_order = loaded.engine.generate(PROMPTS[::-1], 4)
    assert sorted(told(reversed_order)) == sorted(told(together))


def test_samples_of_a_prompt_are_distinct_draws(loaded):
    rollouts = loaded.engine.generate([PROMPTS[2]], 16)
    assert [x.sample_index for x in rollouts] == list(range(16)) and len({x.response_ids for x in rollouts}) > 12
    assert [x.response_ids for x in loaded.engine.generate([PROMPTS[2]], 4)] == [x.response_ids for x in rollouts[:4]]


def test_another_attempt_or_version_draws_others(loaded):
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


@pytest.fixture(scope="module", params=["qwen2 tied", "qwen2 untied", "llama untied", "qwen3 tied"])
def family(request, inputs, tmp_path_factory):
    name, tied = request.param.split()
    if request.param == "qwen2 tied":
        yield request.getfixturevalue("bench")
        return
    root = tmp_path_factory.mktemp(name)
    started = start_bench(model_folder(inputs / "model", root / "model", name, tied=tied == "tied"), root / "run")
    try:
        started.engine.recover(())
        yield started
    finally:
        started.engine.close()


@pytest.mark.long
def test_after_every_sync_logprobs_equal_hugging_faces(family):
    """After every sync log-probs equal Hugging Face's.

    Several weights come one after the other; a bucket of one byte takes one tensor, and grows to it.
    """
    gaps, last = [], NO_WEIGHTS
    for seed, channel, bucket_bytes in [
        (1, "shared_memory", 1),
        (2, "shared_memory", 12_000),
        (3, "shared_memory", 1 << 26),
        (4, "broadcast", 1),
        (5, "broadcast", 12_000),
        (6, "broadcast", 1 << 26),
        (7, "shared_memory", 5_000),
    ]:
        version = family.load(seed, channel=channel, bucket_bytes=bucket_bytes)
        assert version > last and family.engine.weight_version == version
        rollouts = family.engine.generate(PROMPTS[:2], 2)
        assert {x.weight_versions for x in rollouts} == {((version, len(x.response_ids)),) for x in rollouts}
        gaps.append(family.largest_gap(PROMPTS, 2))
        last = version
    print("largest differences:", " ".join(f"{gap:.1e}" for gap in gaps))
    assert max(gaps) < LOGPROB_TOLERANCE


def test_a_broadcast_channel_is_opened_once_and_serves_every_sync(bench):
    sender = WeightSender(channel="broadcast", bucket_bytes=12_000, deadline_s=DEADLINE_S, device=CPU)
    for seed in (1, 2):
        report = sender.deliver(iter(bench.weights(seed).items()), next(bench.versions), [bench.replica])
        assert not report.failed and sender.group.spans([bench.replica])
        assert bench.largest_gap(PROMPTS, 1) < LOGPROB_TOLERANCE
    sender.forget(bench.replica)
    bench.engine._sync.forget(bench.replica)


def test_a_sync_resets_the_prefix_cache(bench, monkeypatch):
    """A sync resets the prefix cache, and leaving the reset out shows.

    Keys and values of the old weights, found by a prompt's prefix, would be taken for the new ones'.
    """
    prompts = make_prompts(3 * BLOCK_TOKENS + 4, 2 * BLOCK_TOKENS + 9)
    bench.load(1)
    bench.engine.generate(prompts, 1)
    bench.load(2)
    assert bench.largest_gap(prompts) < LOGPROB_TOLERANCE
    control = bench.replica.control
    with monkeypatch.context() as planted:
        planted.setattr(
            bench.replica, "control", lambda m, a, t: None if m == "reset_prefix_cache" else control(m, a, t)
        )
        bench.load(3)
    stale = bench.largest_gap(prompts)
    assert stale > 1000 * LOGPROB_TOLERANCE, stale
    bench.load(4)
    assert bench.largest_gap(prompts) < LOGPROB_TOLERANCE
