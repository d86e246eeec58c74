"""Samples that end early in a real vLLM engine equal its whole samples, cut by hand; an error ends the call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from megatron_rl.errors import RewardError
from megatron_rl.rollout.vllm import early_ends
from megatron_rl.types import Prompt
from tests.runs.command import rows_of
from tests.vllm.calls import LONG, Call, lengths_of, spans
from tests.vllm.rig import LOGPROB_TOLERANCE, Bench, make_prompts, running
from tests.vllm.served import GAP

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("bounded")]

PROMPTS, SAMPLES, MOST = make_prompts(5, 2, 17, 33), 3, 72
EVERY = 4


@pytest.fixture
def long(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Return the engine with weights, long answers without a stop token, and no early end after the test."""
    bench.load(1)
    monkeypatch.setattr(bench.engine, "_rollout", replace(bench.config.rollout, max_response_tokens=MOST))
    monkeypatch.setattr(bench.engine, "_stop_ids", ())
    monkeypatch.setattr(bench.engine, "early_end", None)
    yield bench


class Divisible:
    """Ends a sample if its tokens' sum is a multiple of 5; of one prompt never."""

    every_tokens = EVERY

    def ends(self, prompt: Prompt, sample_index: int, token_ids) -> bool:
        return prompt.prompt_id != "1@0" and sum(token_ids) % 5 == 0


def cut_by_hand(rollout) -> tuple[tuple[int, ...], str]:
    ids = rollout.response_ids
    ends = [n for n in range(EVERY, len(ids), EVERY) if sum(ids[:n]) % 5 == 0] if rollout.prompt != PROMPTS[1] else []
    return (ids[: ends[0]], "decided") if ends else (ids, rollout.finish_reason)


def test_samples_equal_whole_samples_cut_by_hand(long: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = long.engine.generate(PROMPTS, SAMPLES)
    arrived, cut = [], early_ends.EarlyEnds.cut

    def watched(self, request_id, completions):
        arrived.extend((x.finish_reason, len(x.token_ids)) for x in completions)
        return cut(self, request_id, completions)

    monkeypatch.setattr(early_ends.EarlyEnds, "cut", watched)
    long.engine.early_end = Divisible()
    early = long.engine.generate(PROMPTS, SAMPLES)
    wanted = [cut_by_hand(x) for x in whole]
    assert [(x.response_ids, x.finish_reason) for x in early] == wanted
    assert {x.finish_reason for x in early} == {"length", "decided"}
    for one, other in zip(early, whole, strict=True):
        length = len(one.response_ids)
        assert max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs[:length], strict=True)) < LOGPROB_TOLERANCE
        assert one.weight_versions == ((long.engine.weight_version, length),)
    # The engine itself ended samples before their own ends.
    ended = [length for reason, length in arrived if reason == "decided"]
    assert sum(reason == "length" for reason, _ in arrived) >= SAMPLES and len(ended) >= SAMPLES
    assert sum(length for _, length in arrived) < 0.9 * sum(len(x.response_ids) for x in whole)
    # Calls at a temperature of their own, evaluations', have whole samples. So have later calls.
    at_its_own = long.engine.generate(PROMPTS, SAMPLES, temperature=long.config.rollout.temperature)
    assert [x.response_ids for x in at_its_own] == [x.response_ids for x in whole]


def test_an_error_of_the_function_ends_the_call_and_the_engine_serves_on(long: Bench) -> None:
    class Fails(Divisible):
        def ends(self, prompt: Prompt, sample_index: int, token_ids) -> bool:
            raise RewardError("no verdict")

    long.engine.early_end = Fails()
    with pytest.raises(RewardError, match="no verdict"):
        long.engine.generate(PROMPTS, SAMPLES)
    long.engine.early_end = None
    assert long.engine.lost == [] and {len(x.response_ids) for x in long.engine.generate(PROMPTS, 1)} == {MOST}


class SecondsEndAt48:
    """Ends the second sample of each prompt after 48 tokens."""

    every_tokens = 16

    def ends(self, prompt: Prompt, sample_index: int, token_ids) -> bool:
        return sample_index == 1 and len(token_ids) == 48


@pytest.mark.long(seconds=60)
def test_tokens_before_an_end_are_of_the_weights_that_their_span_names(inputs, tmp_path) -> None:
    """The weights change twice while samples run and end early; nothing is lost, and the others have their lengths."""
    with running(inputs, tmp_path, "qwen2", *LONG, "rollout.vllm={max_num_seqs: 4}") as bench:
        bench.engine._stop_ids, bench.engine.early_end = (), SecondsEndAt48()
        versions, call = {bench.load(1): 1}, Call(bench)
        for seed in (2, 3):
            call.wait_for_the_middle()
            versions[bench.load(seed)] = seed
        rollouts = call.result()
        wanted = [(n, "length") if first else (48, "decided") for n in lengths_of(call.prompts) for first in (1, 0)]
        assert [(len(x.response_ids), x.finish_reason) for x in rollouts] == wanted
        mixed = [x for x in rollouts if x.finish_reason == "decided" and len(x.weight_versions) > 1]
        assert mixed and {version for x in rollouts for version, _ in x.weight_versions} == set(versions)
        for version, seed in versions.items():
            bench.weights(seed)
            for rollout in [*mixed, *rollouts[1::4]]:
                gap = bench.gap(rollout)
                assert len(gap) == sum(count for _, count in rollout.weight_versions) == 48
                found = [gap[tokens].max() for named, tokens in spans(rollout) if named == version]
                assert max(found, default=0.0) < LOGPROB_TOLERANCE


@pytest.mark.long(seconds=60)
def test_a_runs_gap_is_that_of_whole_samples(run, tmp_path) -> None:
    decided = ("reward.functions=[tests.decided_functions:has_three]", "reward.decided_every_tokens=1",
               "reward.decided=tests.decided_functions:three_is_there")  # fmt: skip
    run(*decided)
    first = [row for row in rows_of(tmp_path) if "rollout/decided_share" in row]
    assert len(first) == 2 and all(0 < row["rollout/decided_share"] < 1 for row in first)
    assert max(row["train/logprob_gap_max"] for row in first) < GAP
