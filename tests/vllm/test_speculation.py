"""Speculative decoding in a real engine on a CPU: tokens, their distribution and log-probs are as without it."""

import itertools
import json
import math
import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from megatron_rl.rollout.engines.engine import EngineLost
from megatron_rl.rollout.engines.replica import GenerateRequest
from megatron_rl.rollout.engines.sampling import SampleRequest, request_seed
from megatron_rl.rollout.groups.serialization import pack_groups, unpack_history
from megatron_rl.rollout.speculation.counts import ACCEPTED, DRAFTED, PASSES
from megatron_rl.rollout.vllm.answers import generate_request
from megatron_rl.types import Prompt
from tests.runs.command import few_prompts, rows_of
from tests.unit.rollout.endpoint.agents_at_work import asked
from tests.vllm.agents import agents_on
from tests.vllm.calls import LONG, spans_hold
from tests.vllm.distribution import Pairs, chance_of, pair_probabilities
from tests.vllm.rig import BLOCK_TOKENS, LOGPROB_TOLERANCE, REQUEST_S, make_prompts, running, told
from tests.vllm.served import GAP

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("bounded")]

# Of lengths 1 and BLOCK_TOKENS + 1 one token is left to compute, and vLLM pads their first steps with drafts of −1.
PROMPTS = make_prompts(5, 2, 40, 1, 17, BLOCK_TOKENS + 1, 100, 64)
SHORT = "rollout.vllm={max_num_seqs: 64, speculative_config: {num_speculative_tokens: 4, prompt_lookup_min: 1}}"
METHODS = {"history": ("rollout.speculation=history",), "ngram": ("rollout.speculation=ngram", SHORT)}
SAMPLES, CALLS, DRAWN = 16, 30, 40
STOP, SUMS = 0, range(12)


@pytest.fixture(scope="module", params=METHODS)
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


def pairs_of(bench, prompt, temperature: float, **cuts) -> Pairs:
    return pair_probabilities(bench.model, prompt.token_ids, temperature, STOP, **cuts)


def repeated_prompt(bench, length: int) -> Prompt:
    """Return the prompt, of some drawn ones, whose own pairs of tokens likeliest follow it: ngram drafts them."""

    def repeated(prompt) -> float:
        chances = pairs_of(bench, prompt, bench.config.rollout.temperature)
        return sum(chances.get(pair, 0.0) for pair in set(itertools.pairwise(prompt.token_ids)))

    return max(make_prompts(*[length] * DRAWN), key=repeated)


def test_sampled_pairs_have_the_models_distribution(drafting):
    """A chi-square test of all samples of a prompt, most of them drafted; of 10,000 right engines a few fail."""
    drafting.engine.speculation.take_counts()
    for place, length in enumerate((7, BLOCK_TOKENS + 1)):
        prompt = repeated_prompt(drafting, length)
        prompts = [replace(prompt, prompt_id=f"{place}@{call}") for call in range(CALLS)]
        rollouts = drafting.engine.generate(prompts, SAMPLES, max_tokens=[3] * CALLS)
        found = Counter(x.response_ids[:2] for x in rollouts)
        wanted = pairs_of(drafting, prompt, drafting.config.rollout.temperature)
        assert sum(found.values()) == CALLS * SAMPLES and set(found) <= set(wanted)
        assert chance_of(found, wanted) > 1e-4
        assert chance_of(found, pairs_of(drafting, prompt, 1.4)) < 1e-6  # or the test could not fail
        counts = drafting.engine.speculation.take_counts()
        assert place or min(counts[DRAFTED], 4 * counts[ACCEPTED]) > 0.5 * CALLS * SAMPLES


CUTS = {"top_k": {"top_k": 4}, "top_p": {"top_p": 0.6}}


@pytest.mark.parametrize("name", CUTS)
def test_pairs_within_a_cut_have_the_cut_distribution(drafting, name):
    """A chi-square test as above, of requests with top_k or top_p. Log-probs are of the cut distribution too."""
    prompt, temperature = repeated_prompt(drafting, 7), drafting.config.rollout.temperature
    given = dict(token_ids=prompt.token_ids, num_samples=SAMPLES, max_tokens=3, temperature=temperature)
    given |= dict(stop_ids=(STOP,), **CUTS[name])
    requests = [SampleRequest(request_id=f"{call}", seed=request_seed(name, call), **given) for call in range(CALLS)]
    drafting.engine.speculation.take_counts()
    sequences = [sequence for result in drafting.engine.sample(requests) for sequence in result.sequences]
    counts = drafting.engine.speculation.take_counts()
    found = Counter(tuple(x.token_ids[:2].tolist()) for x in sequences)
    wanted = pairs_of(drafting, prompt, temperature, **CUTS[name])
    assert sum(found.values()) == CALLS * SAMPLES and set(found) <= set(wanted)
    assert chance_of(found, wanted) > 1e-4
    assert chance_of(found, pairs_of(drafting, prompt, temperature)) < 1e-6  # or the test could not fail
    for x in sequences:
        assert abs(x.logprobs[:2].sum() - math.log(wanted[tuple(x.token_ids[:2].tolist())])) < LOGPROB_TOLERANCE
    assert min(counts[DRAFTED], 4 * counts[ACCEPTED]) > 0.5 * CALLS * SAMPLES


ENDS = range(3, 23, 2)  # places of a greedy answer at which a stop may stand


def stops_in(answers, decode: Callable[[list[int]], str]) -> list[SampleRequest]:
    """Return greedy requests that end within the answers: at three tokens' text, or at a token's first occurrence."""
    requests = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        given = dict(token_ids=prompt.token_ids, num_samples=1, max_tokens=24, temperature=0.0, seed=0)
        for end in (end for end in ENDS if end < len(answer)):
            stops = {"text": {"stop_texts": (decode(answer[end - 2 : end + 1]),)}, "id": {"stop_ids": (answer[end],)}}
            name = f"{prompt.prompt_id}/{end}"
            requests += [SampleRequest(request_id=f"{name}/{kind}", **given, **stop) for kind, stop in stops.items()]
    return requests


def ends_of(results) -> list[tuple]:
    return [(x.token_ids.tolist(), x.finish_reason, len(x.logprobs)) for y in results for x in y.sequences]


def test_a_stop_within_an_accepted_draft_ends_as_without_drafts(drafting):
    """The answers were sampled before, so that the history's drafts hold tokens on both sides of each stop.

    A token's first occurrence is in no n-gram of the sample, and seldom in one of the prompt.
    """
    plain, decode = drafting.in_this_process(1), AutoTokenizer.from_pretrained(drafting.folder).decode
    whole = dict(num_samples=1, max_tokens=24, temperature=0.0, seed=0)
    whole = [SampleRequest(request_id=x.prompt_id, token_ids=x.token_ids, **whole) for x in PROMPTS]
    answers = [ids for ids, _, _ in ends_of(plain.sample(whole))]
    assert [ids for ids, _, _ in ends_of(drafting.engine.sample(whole))] == answers
    requests = stops_in(answers, decode)
    drafting.engine.speculation.take_counts()
    wanted, found = plain.sample(requests), drafting.engine.sample(requests)
    assert drafting.engine.speculation.take_counts()[ACCEPTED] > len(requests)
    assert ends_of(found) == ends_of(wanted)
    assert {reason for _, reason, _ in ends_of(found)} == {"stop"} and len(requests) > 100
    for one, other in zip(found, wanted, strict=True):
        assert abs(one.sequences[0].logprobs - other.sequences[0].logprobs).max() < LOGPROB_TOLERANCE
    # A text ends a sample only in the trainer. A stop token ends it in the engine, which had accepted more.
    with_ids = [generate_request(f"alone {x.request_id}", x) for x in requests if x.stop_ids]
    alone = [future.result(REQUEST_S)[0] for future in [drafting.replica.submit(x) for x in with_ids]]
    assert all(len(x.logprobs) == len(x.token_ids) for x in alone)
    if drafting.config.rollout.speculation == "history":
        assert sum(x.drafts[1] >= len(x.token_ids) for x in alone) > 10


def counting(answers: list[dict]) -> Callable[[str, dict], float]:
    """Return an agent that lets a text go on three times, and adds each of the endpoint's answers to ``answers``."""

    def agent(base_url: str, row: dict) -> float:
        text = row["prompt"]
        for number in range(3):
            status, said = asked(f"{base_url}/completions", {"prompt": text, "max_tokens": 5})
            assert status == 200, said
            said = json.loads(said)
            answers.append({"prompt": text, "usage": said["usage"], "choices": said["choices"]})
            text += said["choices"][0]["text"] + f"+{number}="
        return 0.5

    return agent


def test_agents_get_the_tokens_and_the_usage_of_a_plain_engine(drafting):
    """Greedy turns through the run's endpoint; the second call drafts what the first one sampled."""
    prompts = [Prompt(prompt_id=f"{k}@0", text="", token_ids=(2,), columns={"prompt": f"{k}+{7 * k}="}) for k in SUMS]

    def made(engine) -> tuple[list, list[dict], int]:
        answers: list[dict] = []
        with agents_on(engine, drafting, counting(answers)) as opened:
            rollouts = opened.generate(prompts, 1, temperature=0.0)
        facts = [(*told([x])[0], x.text, x.loss_mask, x.num_turns) for x in rollouts]
        return facts, sorted(answers, key=lambda x: x["prompt"]), sum(sum(x.loss_mask) for x in rollouts)

    wanted = made(drafting.in_this_process(1))
    for _ in range(2):
        drafting.engine.speculation.take_counts()
        assert made(drafting.engine) == wanted
        counts = drafting.engine.speculation.take_counts()
    assert 0 < counts[ACCEPTED] <= counts[DRAFTED]
    _, answers, sampled = wanted
    assert len(answers) == 3 * len(prompts)
    assert sum(x["usage"]["completion_tokens"] for x in answers) == sampled
    encode = AutoTokenizer.from_pretrained(drafting.folder).encode
    for usage, text in ((x["usage"], x["prompt"]) for x in answers):
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens"] >= len(encode(text, add_special_tokens=False))  # an end token is no text


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


def test_an_engine_started_again_drafts_from_the_answers_in_a_checkpoint(drafting):
    """Its first greedy tokens are the plain engine's, half of them drafted; the rank kept the answers."""
    wanted = told(drafting.in_this_process(1).generate(PROMPTS, 1, temperature=0.0))
    speculation = drafting.engine.speculation
    assert told(drafting.engine.generate(PROMPTS, 1, temperature=0.0)) == wanted
    version, lost, history = drafting.engine.weight_version, drafting.replica.name, speculation.history
    os.kill(drafting.pid, signal.SIGKILL)
    with pytest.raises(EngineLost, match="ended"):
        drafting.engine.generate(PROMPTS, 1, temperature=0.0)
    if history is not None:
        saved = pack_groups({}, history.state())
        history.load_state()
        assert len(history) == 0
        history.load_state(unpack_history(saved))
    drafting.load_again(1, version, [lost])
    speculation.take_counts()
    assert told(drafting.engine.generate(PROMPTS, 1, temperature=0.0)) == wanted
    counts = speculation.take_counts()
    assert 0 < counts[ACCEPTED] <= counts[DRAFTED]
    if history is not None:
        assert counts[PASSES] < 0.5 * sum(len(ids) for _, ids, _ in wanted)


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


@pytest.mark.long
def test_a_resumed_run_drafts_from_the_answers_before(run, arithmetic, tmp_path):
    """The third rollout, the first after the resume, asks the first one's prompts again."""
    saved = ("checkpoint.save_every_rollouts=1", "optimizer.schedule=constant")
    given = ("rollout.speculation=history", few_prompts(arithmetic, tmp_path, 16), *saved)
    for rollouts in (2, 4):
        ((said,),) = run(*given, f"train.num_rollouts={rollouts}")
        assert ("drafts from the earlier answers to 16 prompts" in said) == (rollouts == 4), said
    firsts = [row for row in rows_of(tmp_path) if "speculation/drafted" in row and "train/logprob_gap_max" in row]
    assert len(firsts) == 4 and max(row["train/logprob_gap_max"] for row in firsts) < GAP
    assert min(firsts[2]["speculation/drafted"], firsts[2]["speculation/accepted"]) > 0
