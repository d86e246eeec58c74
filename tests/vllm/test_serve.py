"""The server of Tinker's API over a real vLLM engine samples from the weights that a client trained."""

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from megatron_rl.serve import messages
from tests.faults.serve_client import Client, Refused, address_of, training_body
from tests.vllm.served import BASE, GAP, engines_of

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("bounded")]
SERVE = "megatron_rl.serve.__main__:command_line"
PROMPT = [3, 4, 5]
TEXTS = [[3, 4, 5, 6, 7, 8], [7, 8, 9]]


EVERY_WEIGHT = pytest.param(None, id="every weight", marks=pytest.mark.long)


@pytest.fixture(scope="module", params=[EVERY_WEIGHT, pytest.param(4, id="adapters")])
def client(request, nursery, arithmetic, tmp_path_factory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("server")
    given = ["--run-dir", str(folder / "run"), f"model.hf_path={arithmetic}/model", "parallel.pipeline=2", *BASE[:-1]]
    given += ["serve.port=0", "rollout.num_engines=1", f"lora.rank={request.param or 'null'}"]
    given += ["data.max_prompt_tokens=40", "rollout.max_response_tokens=24"]
    with nursery.ranks(2, given, folder, SERVE) as ranks:
        yield Client(address_of(ranks.printed[0]))
        assert ranks.run(), ranks.said()


def trained_sampler(client: Client, session: str, number: int, weight: float) -> tuple[str, str]:
    """Train a new model by one step; return its name and that of a session which samples from it."""
    model = client.model(session, number)
    client.logprobs(client.train(training_body(model, 1, TEXTS, weight=weight)))
    client.outcome(client.step(model, 2))
    asked = {"model_id": model, "seq_id": 3, "sampling_session_seq_id": number}
    return model, client.outcome(client.ask("save_weights_for_sampler", asked))["sampling_session_id"]


def draw(client: Client, sampler: str, seq: int, **params: object) -> list[tuple[list[int], np.ndarray]]:
    asked = client.sample(sampler, seq, PROMPT, samples=4, max_tokens=6, seed=seq, **params)
    sequences = messages.SampleResponse.FromString(client.result(asked)).sequences
    return [(np.frombuffer(x.tokens, np.int32).tolist(), np.frombuffer(x.logprobs, np.float32)) for x in sequences]


def gap_to_trainer(client: Client, model: str, seq: int, draws: list[tuple[list[int], np.ndarray]]) -> float:
    """Return the largest difference between the draws' log-probs and the trainer's of the same tokens."""
    body = training_body(model, seq, [PROMPT + tokens for tokens, _ in draws], weight=0.0)
    found = client.logprobs(client.train(body))
    start, gap = 0, 0.0
    for tokens, logprobs in draws:
        start += len(PROMPT) - 1
        gap = max(gap, float(np.abs(found[start : start + len(tokens)] - logprobs).max()))
        start += len(tokens)
    assert start == len(found)
    return gap


def test_draws_are_the_trained_models_and_outlive_their_engine(client: Client, nursery) -> None:
    session = client.session()
    models = [trained_sampler(client, session, number, weight) for number, weight in ((0, 1.0), (1, -1.0))]
    first = [draw(client, sampler, 0) for _, sampler in models]
    for (model, _), draws in zip(models, first, strict=True):  # by turns: each has the engine loaded anew
        assert len(draws) == 4 and gap_to_trainer(client, model, 4, draws) < GAP
    others = [gap_to_trainer(client, models[i][0], 5, first[1 - i]) for i in range(2)]
    assert min(others) > 10 * GAP  # not one policy under two names
    (engine,) = engines_of(nursery.process.pid)
    os.kill(engine, signal.SIGKILL)
    for (model, sampler), draws in zip(models, first, strict=True):
        again = draw(client, sampler, 1)
        assert gap_to_trainer(client, model, 6, again) < GAP
        greedy = draw(client, sampler, 2, temperature=0.0)
        assert all(tokens == greedy[0][0] for tokens, _ in greedy) and draws != again
    assert engines_of(nursery.process.pid) != [engine]


def test_what_this_engine_cannot_give_is_refused_by_name(client: Client) -> None:
    asked = {"session_id": client.session(), "sampling_session_seq_id": 0, "base_model": "model"}
    sampler = client.ask("create_sampling_session", asked)["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}
    body = {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 1, "prompt": prompt}
    body |= {"sampling_params": {"max_tokens": 2}, "prompt_logprobs": True}
    for wrong, words in (
        ({"topk_prompt_logprobs": 2}, "topk_prompt_logprobs=2 is not served by rollout.engine=vllm"),
        ({"topk_sample_logprobs": 2}, "topk_sample_logprobs=2 is not served by rollout.engine=vllm"),
        ({"sampling_params": {"temperature": 1e-3}}, "temperature=0.001 must be 0"),  # it would sample at 0.01
    ):
        with pytest.raises(Refused, match=words):
            client.ask("asample", body | wrong)
    assert len(draw(client, sampler, 1)) == 4  # the server goes on
