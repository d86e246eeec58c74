"""Speculative decoding in a real engine on a CPU: tokens, their distribution and log-probs are as without it."""

import pytest

from tests.vllm.rig import LOGPROB_TOLERANCE, make_prompts, running, told

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("bounded")]

PROMPTS = make_prompts(5, 2, 40, 1, 17, 33, 100, 64)
DRAFTS = 4


@pytest.fixture(scope="module")
def drafting(inputs, tmp_path_factory):
    """Return an engine whose drafts come from n-grams, with the weights of seed 1."""
    config = f"{{method: ngram, num_speculative_tokens: {DRAFTS}, prompt_lookup_max: 3, prompt_lookup_min: 1}}"
    overrides = f"rollout.vllm={{max_num_seqs: 64, speculative_config: {config}}}"
    with running(inputs, tmp_path_factory.mktemp("drafting"), "qwen2", overrides) as started:
        started.load(1)
        yield started


def test_greedy_tokens_equal_the_plain_engines(drafting, bench):
    bench.load(1)
    drafted = drafting.engine.generate(PROMPTS, 1, temperature=0.0)
    assert told(drafted) == told(bench.engine.generate(PROMPTS, 1, temperature=0.0))


def test_logprobs_equal_hugging_faces(drafting):
    drafted = drafting.engine.generate(PROMPTS, 8)
    assert drafting.worst(drafted) < LOGPROB_TOLERANCE
