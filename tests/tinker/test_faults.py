"""The SDK behind a line that loses and doubles requests and answers trains what it trains on a good line."""

import numpy as np
import pytest

pytest.importorskip("tinker", reason="Tinker's SDK is not installed; `make test-tinker` installs it")

import tinker
from tinker import types

from tests.pairwise import quick
from tests.tinker.clients import ADAM, TEXTS, answer, datum, scores, service, texts, trainer
from tests.tinker.flaky import FAULTS, Flaky


def trained(client: tinker.ServiceClient) -> tuple[np.ndarray, list[list[int]]]:
    """Train for three steps, all sent before any is answered; sample; return log-probs and draws."""
    model = trainer(client)
    promises = []
    for number in range(3):
        for tokens in TEXTS:
            data = [datum(tokens, weights=[0.5 + number] * (len(tokens) - 1))]
            promises.append(model.forward_backward(data, "cross_entropy"))
        promises.append(model.optim_step(ADAM))
    for promise in promises:
        answer(promise)
    sampler = model.save_weights_and_get_sampling_client()
    prompts = [types.ModelInput.from_ints(tokens[:2]) for tokens in TEXTS]
    params = types.SamplingParams(max_tokens=4, temperature=1.0, seed=1)
    draws = [sampler.sample(prompt, 2, params) for prompt in prompts]
    tokens = [list(sequence.tokens) for promise in draws for sequence in answer(promise).sequences]
    return scores(model), tokens


@pytest.mark.parametrize("seed", quick([0, 1], 0))
def test_a_line_that_loses_and_doubles_changes_nothing(address: str, seed: int) -> None:
    want, drawn = trained(service(address))
    with Flaky(address, seed) as line:
        found, again = trained(service(line.address))
    assert all(line.made[fault] for fault in FAULTS), line.made
    assert np.array_equal(found, want)
    assert again == drawn


@pytest.mark.long
def test_many_samples_at_once(address: str) -> None:
    sampler = trainer(service(address)).save_weights_and_get_sampling_client()
    params = [types.SamplingParams(max_tokens=4, temperature=1.0, seed=i) for i in range(512)]
    prompts = [types.ModelInput.from_ints(TEXTS[i % 3]) for i in range(512)]
    draws = [sampler.sample(prompt, 1, one) for prompt, one in zip(prompts, params, strict=True)]
    assert sum(len(answer(draw).sequences) for draw in draws) == 512


def test_a_failed_request_is_an_error_of_the_clients_and_training_goes_on(address: str) -> None:
    model, plain = trainer(service(address)), trainer(service(address))
    with pytest.raises(Exception, match="the vocabulary has"):
        answer(model.forward_backward([datum([5, 10**6], weights=[1.0])], "cross_entropy"))
    for each in (model, plain):
        answer(each.forward_backward(texts(), "cross_entropy"))
        answer(each.optim_step(ADAM))
    assert np.array_equal(scores(model), scores(plain))
