"""Speculative decoding in a real engine on a CPU: tokens, their distribution and log-probs are as without it."""

import os
import signal
from dataclasses import replace

import pytest

from megatron_rl.rollout.engines.engine import EngineLost
from megatron_rl.rollout.engines.replica import GenerateRequest
from megatron_rl.rollout.speculation.counts import ACCEPTED, DRAFTED, PASSES
from tests.runs.command import few_prompts, rows_of
from tests.vllm.calls import LONG, spans_hold
from tests.vllm.pairs import chance_of_pairs
from tests.vllm.rig import BLOCK_TOKENS, LOGPROB_TOLERANCE, REQUEST_S, make_prompts, running, told
from tests.vllm.served import GAP

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("bounded")]

# Of lengths 1 and BLOCK_TOKENS + 1 one token is left to compute, and vLLM pads their first steps with drafts of −1.
PROMPTS = make_prompts(5, 2, 40, 1, 17, BLOCK_TOKENS + 1, 100, 64)
SHORT = "rollout.vllm={max_num_seqs: 64, speculative_config: {num_speculative_tokens: 4, prompt_lookup_min: 1}}"
METHODS = {"history": ("rollout.speculation=history",), "ngram": ("rollout.speculation=ngram", SHORT)}
SAMPLES, CALLS = 16, 30


@pytest.fixture(scope="module", params=["history", pytest.param("ngram", marks=pytest.mark.long)])
def drafting(request, inputs, tmp_path_factory):
    """Return an engine that drafts, with the weights of seed 1."""
    with running(inputs, tmp_path_factory.mktemp("drafting"), "qwen2", *METHODS[request.param]) as started:
        started.load(1)
        yield started


def test_greedy_tokens_equal_the_plain_engines(drafting):
    """The second call drafts the first one's answers, and all drafts are accepted."""
    wanted = told(drafting.in_this_process(1).generate(PROMPTS, 1, temperature=0.0))
    for _ in range(2):
        drafting.engine.speculation.take_counts()
        assert told(drafting.engine.generate(PROMPTS, 1, temperature=0.0)) == wanted
        counts = drafting.engine.speculation.take_counts()
    assert 0 < counts[ACCEPTED] <= counts[DRAFTED]
    tokens = sum(len(ids) for _, ids, _ in wanted)
    assert counts[PASSES] < (0.5 if "history" in drafting.config.rollout.speculation else 1.0) * tokens


def test_logprobs_equal_hugging_faces(drafting):
    for attempt in range(4):
        prompts = [replace(prompt, attempt=attempt) for prompt in PROMPTS]
        assert drafting.largest_gap(prompts, 8) < LOGPROB_TOLERANCE


def test_sampled_pairs_have_the_models_distribution(drafting):
    """A chi-square test of all samples of a prompt, most of them drafted; of 1000 right engines one fails."""
    drafting.engine.speculation.take_counts()
    for place, length in enumerate((7, BLOCK_TOKENS + 1)):
        assert chance_of_pairs(drafting, place, length, CALLS, SAMPLES) > 1e-3
        counts = drafting.engine.speculation.take_counts()
        assert place or min(counts[DRAFTED], 4 * counts[ACCEPTED]) > 0.5 * CALLS * SAMPLES


def cached_tokens(bench, prompt, name: str) -> int:
    """Return how many of a prompt's tokens an engine finds in its prefix cache."""
    request = dict(token_ids=prompt.token_ids, n=1, max_tokens=3, temperature=0.0, seed=0, stop_token_ids=(0,))
    (completion,) = bench.replica.submit(GenerateRequest(request_id=name, **request)).result(REQUEST_S)
    return completion.cached_tokens


def test_a_sync_resets_the_prefix_cache(drafting):
    """Within a version a prompt's whole blocks are found again; after a sync none, and log-probs are the new ones'."""
    prompts = make_prompts(3 * BLOCK_TOKENS + 4, 2 * BLOCK_TOKENS + 9)
    for seed in (2, 3, 1):
        drafting.load(seed)
        found = [cached_tokens(drafting, prompts[0], f"{seed}-{turn}") for turn in range(2)]
        assert found == [0, 3 * BLOCK_TOKENS]
        assert drafting.largest_gap(prompts) < LOGPROB_TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_weights_in_flight(method, inputs, tmp_path):
    """Each token is of the weights of its span, with drafts too; LONG's requests meet two syncs."""
    few = "rollout.vllm={max_num_seqs: 4, speculative_config: {num_speculative_tokens: 3}}"
    with running(inputs, tmp_path, "qwen2", f"rollout.speculation={method}", *LONG, few) as bench:
        bench.engine._stop_ids = ()
        spans_hold(bench, bench.load, bench.weights)


@pytest.mark.long
def test_an_engine_that_is_killed_begins_a_new_history(drafting):
    wanted = told(drafting.engine.generate(PROMPTS, 1, temperature=0.0))
    version, lost = drafting.engine.weight_version, drafting.replica.name
    os.kill(drafting.pid, signal.SIGKILL)
    with pytest.raises(EngineLost, match="ended"):
        drafting.engine.generate(PROMPTS, 1, temperature=0.0)
    drafting.load_again(1, version, [lost])
    assert told(drafting.engine.generate(PROMPTS, 1, temperature=0.0)) == wanted


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_a_run_counts_what_was_drafted(run, arithmetic, tmp_path, method):
    """Prompts come again in the second epoch, and weights move between; the gap stays a plain run's."""
    fields = () if method == "history" else ("rollout.vllm={speculative_config: {prompt_lookup_min: 1}}",)
    given = (few_prompts(arithmetic, tmp_path, 16), "train.num_rollouts=4")
    run(f"rollout.speculation={method}", *fields, *given)
    rows = [row for row in rows_of(tmp_path) if "speculation/drafted" in row and "train/logprob_gap_max" in row]
    assert len(rows) >= 2 and max(row["train/logprob_gap_max"] for row in rows) < GAP
    assert all(0 <= row["speculation/accepted"] <= row["speculation/drafted"] for row in rows)
    assert sum(row["speculation/accepted"] for row in rows) > 0
    assert all(row["speculation/tokens_per_pass"] >= 1 for row in rows)
