"""Sampling by request with the embedded engine, against its own rollouts and plain Hugging Face forwards."""

import dataclasses

import numpy as np
import pytest
import torch

from megatron_rl.rollout.engines.embedded import TransformersEngine
from megatron_rl.rollout.engines.engine import sample_seed
from megatron_rl.rollout.engines.sampling import EMPTY, SampleRequest
from megatron_rl.serve.samplers import answers_of
from megatron_rl.serve.values import SampleFailed
from tests.unit.rollout.fake_engine import prompt_of
from tests.unit.rollout.tiny_model import EOS, ROUNDING, VOCAB, _tokenizer, engine_of

PROMPT = (3, 5, 2, 7)


@pytest.fixture(scope="module")
def engine(model, hf_path) -> TransformersEngine:
    return engine_of(hf_path, model, temperature=1.0)


def ask(number: int = 0, **changes: object) -> SampleRequest:
    fields = dict(request_id=str(number), token_ids=PROMPT, num_samples=1, max_tokens=6, seed=number)
    return SampleRequest(**{**fields, **changes})


def distribution(model, tokens: tuple[int, ...]) -> torch.Tensor:
    """Return the log-probs [V] after the tokens, by one plain forward."""
    with torch.no_grad():
        return model(torch.tensor(tokens)[None]).logits[0, -1].float().log_softmax(-1)


def test_draws_are_those_of_a_rollout_with_the_same_seed_and_logprobs_a_plain_forwards(engine, model) -> None:
    prompt = prompt_of(0, token_ids=PROMPT)
    for rollout in engine.generate([prompt], 4):
        seed = sample_seed(3, prompt.prompt_id, rollout.sample_index, 1, 0)
        (result,) = engine.sample([ask(seed=seed, max_tokens=12, stop_ids=(EOS,))])
        assert tuple(result.sequences[0].token_ids.tolist()) == rollout.response_ids
        assert np.allclose(result.sequences[0].logprobs, rollout.logprobs, atol=ROUNDING)
    drawn, greedy = engine.sample([ask(max_tokens=8, num_samples=3), ask(1, temperature=0.0, max_tokens=5)])
    for sequence in [*drawn.sequences, *greedy.sequences]:
        tokens = PROMPT
        for token, logprob in zip(sequence.token_ids.tolist(), sequence.logprobs, strict=True):
            wanted = distribution(model, tokens)
            assert sequence in drawn.sequences or token == int(wanted.argmax())
            assert sequence in greedy.sequences or logprob == pytest.approx(wanted[token].item(), abs=ROUNDING)
            tokens += (token,)
    assert len({tuple(sequence.token_ids.tolist()) for sequence in drawn.sequences}) > 1


def test_a_request_that_the_engine_cannot_answer_fails_alone(engine) -> None:
    good, bad = ask(0), [ask(1, token_ids=(10**6,)), ask(2, top=10**6), ask(3, temperature=1e-40)]
    first, *failed, last = answers_of(engine, [good, *bad, ask(4)])
    assert all(isinstance(result, SampleFailed) for result in failed)
    assert not any(f"request {name}" in x.reason for x, name in zip(failed, "340", strict=True))  # nobody else's name
    for result, request in ((first, good), (last, ask(4))):
        (alone,) = engine.sample([request])
        assert np.array_equal(result.sequences[0].token_ids, alone.sequences[0].token_ids)
        assert np.allclose(result.sequences[0].logprobs, alone.sequences[0].logprobs, atol=ROUNDING)


def test_draws_do_not_depend_on_the_rest_of_the_batch(engine) -> None:
    requests = [
        ask(0, num_samples=2), ask(1, token_ids=PROMPT[:2], temperature=0.5),
        ask(2, token_ids=(4,), top_k=3, max_tokens=9), ask(3, temperature=0.0), ask(4, token_ids=PROMPT * 3, top_p=0.6),
    ]
    together = engine.sample(requests)
    for request, want in zip(requests, together, strict=True):
        (alone,) = engine.sample([request])
        for found, wanted in zip(alone.sequences, want.sequences, strict=True):
            assert np.array_equal(found.token_ids, wanted.token_ids)
            assert np.allclose(found.logprobs, wanted.logprobs, atol=ROUNDING)


@pytest.mark.parametrize("top_k, top_p, temperature", [(3, 1.0, 1.0), (0, 0.4, 1.0), (4, 0.5, 2.0), (1, 1.0, 1.0)])
def test_cuts_leave_the_likely_tokens_renormalised(engine, model, top_k: int, top_p: float, temperature: float) -> None:
    """200 draws of one token; the naive set: sort, keep top_k, then the fewest whose share is top_p."""
    probabilities = (distribution(model, PROMPT) / temperature).softmax(-1).double()
    order = probabilities.argsort(descending=True, stable=True).tolist()
    kept = order[: top_k or len(order)]
    share = sum(probabilities[token].item() for token in kept)
    chosen: list[int] = []
    for token in kept:
        if sum(probabilities[t].item() for t in chosen) / share >= top_p:
            break
        chosen.append(token)
    total = sum(probabilities[token].item() for token in chosen)
    (result,) = engine.sample([ask(max_tokens=1, num_samples=200, top_k=top_k, top_p=top_p, temperature=temperature)])
    drawn = [sequence.token_ids.item() for sequence in result.sequences]
    assert set(drawn) <= set(chosen) and len(set(drawn)) >= min(len(chosen), 3)
    for token, sequence in zip(drawn, result.sequences, strict=True):
        assert np.exp(sequence.logprobs[0]) == pytest.approx(probabilities[token].item() / total, rel=1e-4)


def test_stops_end_a_sample(engine) -> None:
    (free,) = engine.sample([ask(max_tokens=12)])
    tokens = free.sequences[0].token_ids.tolist()
    assert free.sequences[0].finish_reason == "length" and len(tokens) == 12  # no end of sequence was asked for
    (ended,) = engine.sample([ask(max_tokens=12, stop_ids=(tokens[4],))])
    first = tokens.index(tokens[4])
    assert ended.sequences[0].token_ids.tolist() == tokens[: first + 1] and ended.sequences[0].finish_reason == "stop"
    text = _tokenizer().decode(tokens[2:4])
    (cut,) = engine.sample([ask(max_tokens=12, stop_texts=(text,))])
    found = cut.sequences[0].token_ids.tolist()
    assert found == tokens[: len(found)] and cut.sequences[0].finish_reason == "stop"
    assert text in _tokenizer().decode(found) and text not in _tokenizer().decode(found[:-1])


def test_a_prompts_logprobs_and_the_most_likely_tokens(engine, model) -> None:
    (result,) = engine.sample([ask(prompt_logprobs=True, prompt_top=3, top=2, max_tokens=2)])
    assert np.isnan(result.prompt_logprobs[0])
    for place in range(1, len(PROMPT)):
        want = distribution(model, PROMPT[:place])
        assert result.prompt_logprobs[place] == pytest.approx(want[PROMPT[place]].item(), abs=ROUNDING)
        assert result.prompt_top.token_ids[place].tolist() == want.topk(3).indices.tolist()
        assert np.allclose(result.prompt_top.logprobs[place], want.topk(3).values, atol=ROUNDING)
    assert (result.prompt_top.logprobs[0] == EMPTY).all()
    want = distribution(model, PROMPT).topk(2)
    assert result.sequences[0].top.token_ids[0].tolist() == want.indices.tolist()
    assert np.allclose(result.sequences[0].top.logprobs[0], want.values, atol=ROUNDING)
    (plain,) = engine.sample([dataclasses.replace(ask(), max_tokens=2)])
    assert plain.prompt_logprobs is None and plain.prompt_top is None and plain.sequences[0].top is None
    assert max(plain.sequences[0].token_ids) < len(VOCAB)
