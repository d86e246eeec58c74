"""The server holds: doubled, reordered, wrong and foreign requests, many at once, and ranks that are killed."""

import concurrent.futures
import json
import pathlib
import random
import signal
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from megatron_rl.serve import messages
from tests.faults.serve_client import Client, Refused, address_of, put, training_body
from tests.pairwise import quick
from tests.patience import patient

pytestmark = pytest.mark.process
SERVE = "megatron_rl.serve.__main__:command_line"
END_S = 60.0
ROUNDING = 1e-5  # float32; batches of other sizes sum in another order
TEXTS = [[3, 4, 5, 6], [7, 8, 9], [3, 5, 7, 9, 11]]


def arguments(inputs: pathlib.Path, run: pathlib.Path, *overrides: str) -> list[str]:
    given = ["parallel.pipeline=2", "lora.rank=4", "serve.port=0", "run.deadline_s=120", "serve.max_body_mb=4"]
    return ["--run-dir", str(run), f"model.hf_path={inputs}/model", *given, *overrides]


@pytest.fixture(scope="module")
def server(nursery, arithmetic, tmp_path_factory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    with nursery.ranks(2, arguments(arithmetic, folder / "run"), folder, SERVE) as ranks:
        yield address_of(ranks.printed[0])
        assert ranks.run(), ranks.said()


@pytest.fixture
def client(server: str) -> Client:
    return Client(server)


def sampler_of(client: Client, session: str, **of: str) -> str:
    body = {"session_id": session, "sampling_session_seq_id": 0, **of}
    return client.ask("create_sampling_session", body)["sampling_session_id"]


def trained(client: Client, model: str) -> np.ndarray:
    """Take a step of three requests, all sent at once; return the log-probs of the texts after it."""
    promises = [client.train(training_body(model, seq, TEXTS[seq - 1 : seq])) for seq in (1, 2, 3)]
    client.outcome(client.step(model, 4))
    for promise in promises:
        client.logprobs(promise)
    return client.logprobs(client.train(training_body(model, 5, TEXTS)))


def test_doubled_reordered_and_repeated_requests_train_once(client: Client) -> None:
    session = client.session()
    want = trained(client, client.model(session, 0))
    model = client.model(session, 1)
    bodies = {seq: training_body(model, seq, TEXTS[seq - 1 : seq]) for seq in (1, 2, 3)}
    order = [3, 2, 2, 1, 3, 1, 2]
    random.Random(0).shuffle(order)
    promises = [client.train(bodies[seq]) for seq in order]
    steps = [client.step(model, 4) for _ in range(2)]
    found = {seq: client.logprobs(promise) for seq, promise in zip(order, promises, strict=True)}
    for seq, promise in zip(order, promises, strict=True):  # asked again: the same answer
        assert np.array_equal(client.logprobs(promise), found[seq])
    assert client.result(steps[0]) == client.result(steps[1])
    assert np.array_equal(client.logprobs(client.train(training_body(model, 5, TEXTS))), want)
    with pytest.raises(Refused, match="number 2 of .* was used by another") as refused:
        client.train(training_body(model, 2, TEXTS))
    assert refused.value.status == 422


def test_a_request_that_cannot_be_served_fails_by_name_and_nothing_else_does(client: Client) -> None:
    session = client.session()
    want = trained(client, client.model(session, 0))
    model = client.model(session, 1)
    assert np.array_equal(trained(client, model), want)
    wrong = {
        "loss_fn='stable_reinforce' has no published formula": dict(loss_fn="stable_reinforce"),
        "pass one of cross_entropy": dict(loss_fn="my_loss"),
        "holds token 99, and the vocabulary has 17 tokens": dict(tokens=[3, 99]),
        "this model reads 63 at most": dict(tokens=[3] * 80),
    }
    seq = 6
    for words, change in wrong.items():
        message = messages.ForwardBackwardRequest.FromString(training_body(model, seq, [change.get("tokens", [3, 4])]))
        message.loss_fn = change.get("loss_fn", "cross_entropy")
        failed, behind = client.train(message.SerializeToString()), client.step(model, seq + 1)
        outcome = client.outcome(failed)
        assert words in outcome["error"] and outcome["category"] == "user"
        assert f"it was queued behind number {seq}, which failed" in client.outcome(behind)["error"]
        seq += 2
    found = client.logprobs(client.train(training_body(model, seq, TEXTS)))
    assert np.array_equal(found, want)  # the failures moved nothing
    # the gradient of the request before is still there: a failed one would have taken it along
    assert client.outcome(client.step(model, seq + 1))["metrics"]["ghost_steps:sum"] == 0.0


def test_wrong_bodies_and_foreign_names_are_refused_by_name(client: Client, server: str) -> None:
    session = client.session()
    model = client.model(session)
    mine = client.train(training_body(model, 1, TEXTS))
    client.result(mine)
    saved = client.outcome(client.ask("save_weights", {"model_id": model, "seq_id": 2, "path": "a"}))["path"]
    other = Client(server, "tml-other")
    theirs = other.session()
    nobody = "s-0123456789abcdef:train:0"
    sampler = {"session_id": theirs, "sampling_session_seq_id": 0, "model_path": saved}
    foreign, unknown = (404, "is another client's"), (404, "is not known here")
    create = {"session_id": session, "model_seq_id": 9, "base_model": "gpt"}
    for expected, call in [
        ((400, "is no ForwardBackwardRequest"), lambda: client.train(b"\xff\xffnothing of the kind")),
        ((404, "is not known here"), lambda: client.train(training_body("", 3, []))),
        ((413, "serve.max_body_mb"), lambda: client.train(b"\0" * (5 * 2**20))),
        ((400, "not valid JSON"), lambda: client.send("optim_step", b"{")),
        ((400, "model_id=3 is refused"), lambda: client.ask("optim_step", {"model_id": 3, "seq_id": 1})),
        (unknown, lambda: client.train(training_body(nobody, 1, TEXTS))), (unknown, lambda: client.step(nobody, 1)),
        (foreign, lambda: other.train(training_body(model, 3, TEXTS))), (foreign, lambda: other.result(mine)),
        (foreign, lambda: other.ask("get_info", {"model_id": model})),
        (foreign, lambda: other.ask("create_sampling_session", sampler)),
        (foreign, lambda: other.ask("load_weights", {**sampler, "path": saved, "optimizer": True})),
        ((404, "is none of this server's"), lambda: client.result({"request_id": "what"})),
        ((404, "is not served here"), lambda: client.ask("billing", {})),
        ((400, "speaks to tinker 0.34 to 0.38"), lambda: client.ask("create_session", {"sdk_version": "0.20.1"})),
        ((400, "base_model='gpt' is not served"), lambda: client.ask("create_model", create)),
        ((400, "lora_config.rank=64 must be a whole number from 1 to 4"), lambda: client.model(session, 9, rank=64)),
    ]:
        status, words = expected
        with pytest.raises(Refused) as refused:
            call()
        assert refused.value.status == status and words in refused.value.detail, refused.value
    runs = json.loads(other.send("training_runs", b"", method="GET"))["training_runs"]
    assert not runs  # nobody else's is shown
    assert client.outcome(client.step(model, 3))["metrics"]["ghost_steps:sum"] == 0.0  # nothing was lost


def test_many_sampling_requests_at_once_are_all_answered(client: Client) -> None:
    session = client.session()
    sampler = sampler_of(client, session, base_model="model")

    def ask(number: int) -> tuple[np.ndarray, np.ndarray]:
        prompt = [3 + number % 5, 4, 5][: 1 + number % 3]
        body = client.result(client.sample(sampler, number, prompt, seed=number % 7))
        (sequence,) = messages.SampleResponse.FromString(body).sequences
        return np.frombuffer(sequence.tokens, np.int32), np.frombuffer(sequence.logprobs, np.float32)

    with concurrent.futures.ThreadPoolExecutor(max_workers=64) as threads:
        answers = list(threads.map(ask, range(256)))
    assert len(answers) == 256
    for number, (tokens, logprobs) in enumerate(answers):
        assert 1 <= len(tokens) <= 4
        same_tokens, same_logprobs = answers[number % 105]  # of the same prompt and seed, in another batch
        assert np.array_equal(tokens, same_tokens)
        assert np.allclose(logprobs, same_logprobs, atol=ROUNDING)


def test_a_client_that_goes_away_in_mid_step_leaves_the_others_as_they_are(client: Client, server: str) -> None:
    session = client.session()
    want = trained(client, client.model(session, 0))
    gone = Client(server, "tml-gone")
    lost = gone.model(gone.session())
    gone.train(training_body(lost, 1, TEXTS))  # and never asks for it, nor sends number 2
    gone.step(lost, 3)
    assert np.array_equal(trained(client, client.model(session, 1)), want)


def until_there_is_room(ask: Callable[[int], bytes], first: int) -> tuple[int, bytes]:
    """Ask with number after number until there is room for the model; return the number and the answer."""
    for number in range(first, first + 1000):
        answer = ask(number)
        if b"serve.max_models allows no more" not in answer:
            return number, answer
        time.sleep(0.1)
    raise AssertionError("a silent session's model made no room")


def test_a_silent_sessions_model_makes_room_and_comes_back_as_it_was(nursery, arithmetic, tmp_path) -> None:
    given = arguments(arithmetic, tmp_path / "run", "serve.max_models=1", "serve.session_s=1")
    with nursery.ranks(2, given, tmp_path / "server", SERVE) as ranks:
        client, other = Client(address_of(ranks.printed[0])), Client(address_of(ranks.printed[0]), "tml-other")
        model = client.model(client.session())
        want = trained(client, model)
        session = other.session()

        def create(number: int) -> bytes:
            body = {"session_id": session, "model_seq_id": number, "base_model": "model", "lora_config": None}
            return other.result(other.ask("create_model", body))

        _, made = until_there_is_room(create, 0)
        assert other.outcome(other.step(json.loads(made)["model_id"], 1))["metrics"]["ghost_steps:sum"] == 1.0

        def read(number: int) -> bytes:
            return client.result(client.train(training_body(model, number, TEXTS)))

        told = read(6)
        assert b"goes on from its state after request 4; lost: forward_backward 5." in told, told  # no step took it
        number, answer = until_there_is_room(read, 7)
        output = messages.ForwardBackwardOutput.FromString(answer)
        found = b"".join(record.fields["logprobs"].data for record in output.loss_fn_outputs)
        assert np.array_equal(np.frombuffer(found, dtype=np.float32), want)
        assert "error" not in client.outcome(client.step(model, number + 1))


@pytest.mark.parametrize("killed", quick([0, 1], 1))
def test_a_killed_server_goes_on_from_what_was_saved_and_says_what_is_lost(nursery, arithmetic, tmp_path, killed):
    given = arguments(arithmetic, tmp_path / "run")
    with nursery.ranks(2, given, tmp_path / "first", SERVE) as ranks:
        client = Client(address_of(ranks.printed[0]))
        session = client.session()
        saved, unsaved = client.model(session, 0), client.model(session, 1)
        trained(client, saved)
        path = client.outcome(client.ask("save_weights", {"model_id": saved, "seq_id": 6, "path": "a"}))["path"]
        gone = client.outcome(client.ask("save_weights", {"model_id": saved, "seq_id": 7, "path": "gone"}))["path"]
        removed = gone.removeprefix(f"tinker://{saved}/")  # what the model goes on from is not its client's to remove
        client.send(f"training_runs/{saved}/checkpoints/{removed}", b"", method="DELETE")
        want = client.logprobs(client.train(training_body(saved, 8, TEXTS)))
        client.outcome(client.step(saved, 9))
        pending = client.train(training_body(saved, 11, TEXTS))  # number 10 never comes
        client.outcome(client.step(unsaved, 1))
        sampler = sampler_of(client, session, model_path=path)
        ranks.forks[killed].send_signal(signal.SIGKILL)
        codes = ranks.wait(patient(END_S), but=[killed])
        assert None not in codes, ranks.said()
        assert f"rank {killed}" in ranks.said()
    with nursery.ranks(2, given, tmp_path / "second", SERVE) as ranks:
        client = Client(address_of(ranks.printed[0]))
        lost = client.outcome(pending)
        assert "forward_backward 11" in lost["error"] and "was lost before it ended" in lost["error"]
        assert "its state after request 7; lost: forward_backward 8, optim_step 9" in lost["error"]
        assert lost["category"] == "server"
        assert np.array_equal(client.logprobs(client.train(training_body(saved, 12, TEXTS))), want)
        # the other's client was told nothing yet: it learns of its loss by its next request
        failed = client.outcome(client.step(unsaved, 2))
        assert "goes on from its start; lost: optim_step 1" in failed["error"]
        assert client.outcome(client.step(unsaved, 3))["metrics"]["ghost_steps:sum"] == 1.0
        with pytest.raises(Refused, match="send it again") as refused:
            client.result({"request_id": f"{sampler}:5"})
        assert refused.value.status == 410  # the SDK samples again then
        client.result(client.sample(sampler, 6, [3, 4]))
        load = {"session_id": session, "model_seq_id": 2, "path": path, "optimizer": True}
        assert client.outcome(client.ask("load_weights", load))["model_id"] == f"{session}:train:2"
        assert np.array_equal(client.logprobs(client.train(training_body(f"{session}:train:2", 1, TEXTS))), want)


@pytest.mark.long(seconds=60)
def test_two_hundred_requests_of_three_megabytes(nursery, arithmetic, tmp_path) -> None:
    """Their weights are 0 and nobody reads their log-probs, so that what is tried is the way to the ranks."""
    given = arguments(arithmetic, tmp_path / "run", "serve.logprobs=trained", "serve.max_body_mb=32")
    message = messages.ForwardBackwardRequest(loss_fn="cross_entropy")
    for _ in range(250):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.full(60, 5, dtype=np.int32).tobytes()
        put(datum, "target_tokens", np.full((60, 17), 3, dtype=np.int64))
        put(datum, "weights", np.zeros((60, 17), dtype=np.float32))
    with nursery.ranks(2, given, tmp_path / "server", SERVE) as ranks:
        client = Client(address_of(ranks.printed[0]))
        message.model_id = client.model(client.session())

        def send(seq: int) -> dict:
            one = messages.ForwardBackwardRequest()
            one.CopyFrom(message)
            one.seq_id = seq
            return client.train(one.SerializeToString())

        with concurrent.futures.ThreadPoolExecutor(max_workers=16) as threads:
            promises = list(threads.map(send, range(1, 201)))
            sizes = list(threads.map(lambda promise: len(client.logprobs(promise)), promises))
        assert sizes == [250 * 60 * 17] * 200
        assert client.outcome(client.step(message.model_id, 201))["metrics"]["ghost_steps:sum"] == 1.0
