"""No client of the server ends, starves or garbles what others use: attacks, and a fuzz of every route and field."""

import contextlib
import http.client
import json
import os
import pathlib
import resource
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from hypothesis import given, seed, settings

from megatron_rl.serve import messages
from tests.faults.serve_client import ADAM, Client, Refused, address_of, put, training_body
from tests.faults.serve_fuzzer import TEXTS, Fuzzer, Honest, beside

pytestmark = pytest.mark.process
SERVE = "megatron_rl.serve.__main__:command_line"
SETTINGS = ("parallel.pipeline=2", "lora.rank=4", "serve.port=0", "run.deadline_s=120", "serve.max_body_mb=8")
MOST_MB, MOST_DESCRIPTORS = 1000, 64  # that the server may have more at the end than before
LOSSES: dict[str, tuple[str, Mapping[str, float]]] = {
    "a ratio of infinity": ("importance_sampling", {"logprobs": -9999, "advantages": 1}),
    "a ratio of infinity, A < 0": ("ppo", {"logprobs": -9999, "advantages": -1}),
    "a large advantage": ("cispo", {"logprobs": -1, "advantages": 3e38}),
    "large weights": ("cross_entropy", {"weights": 3e38}),
}


@pytest.fixture(scope="module")
def ranks(nursery, arithmetic, tmp_path_factory) -> Iterator:
    folder = tmp_path_factory.mktemp("doors")
    given = ["--run-dir", str(folder / "run"), f"model.hf_path={arithmetic}/model", *SETTINGS]
    given += ["serve.gap_s=1", "serve.max_models=99999"]
    with nursery.ranks(2, given, folder, SERVE) as found:
        yield found
        assert found.run(), found.said()


@pytest.fixture(scope="module")
def server(ranks) -> str:
    return address_of(ranks.printed[0])


def held_by(ranks) -> tuple[int, int]:
    """Return the largest resident size of the first rank so far, in MB, and its open descriptors."""
    pid = ranks.forks[0].pid
    with open(f"/proc/{pid}/status") as file:
        status = dict(line.split(":", 1) for line in file)
    return int(status["VmHWM"].split()[0]) // 1024, len(os.listdir(f"/proc/{pid}/fd"))


def body_of(model: str, seq: int, loss: str, inputs: Mapping[str, float], tokens=(3, 4, 5)) -> bytes:
    """Return a training request of one datum, whose inputs are each the same number at all targets."""
    message = messages.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn=loss)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(tokens, np.int32).tobytes()
    for name, value in {"target_tokens": 5, **inputs}.items():
        put(datum, name, np.full(len(tokens), value, np.int64 if name == "target_tokens" else np.float32))
    return message.SerializeToString()


def scores(client: Client, model: str, seq: int) -> np.ndarray:
    return client.logprobs(client.train(training_body(model, seq, TEXTS)))


@pytest.mark.parametrize("kind", LOSSES)
def test_a_gradient_that_is_not_finite_is_an_error_of_its_request_and_moves_nothing(server: str, kind: str) -> None:
    client = Client(server)
    session = client.session()
    whole, hurt = client.model(session, 0), client.model(session, 1)
    for model in (whole, hurt):  # moments that are not zero
        scores(client, model, 1)
        assert "error" not in client.outcome(client.step(model, 2))
    client.result(client.train(body_of(hurt, 3, *LOSSES[kind])))
    failed = client.outcome(client.step(hurt, 4))
    assert "so that nothing was moved" in failed["error"] and failed["category"] == "user"
    for seq, model in ((5, hurt), (3, whole)):
        scores(client, model, seq)
        assert "error" not in client.outcome(client.step(model, seq + 1))
    assert np.array_equal(scores(client, hurt, 7), scores(client, whole, 5))


def test_steps_that_break_a_models_weights_break_no_others(server: str) -> None:
    honest, client = Honest(server, "tml-honest"), Client(server, "tml-wild")
    model = client.model(client.session())
    broken = ""
    for seq in range(1, 40, 2):
        broken = client.result(client.train(training_body(model, seq, TEXTS))).decode("latin-1")
        if "error" in broken:
            break
        wild = {**ADAM, "learning_rate": 1e3, "weight_decay": 1e3}
        client.result(client.ask("optim_step", {"model_id": model, "seq_id": seq + 1, "adam_params": wild}))
    assert "log-probs are not finite" in broken and "load a checkpoint" in broken
    assert honest.round() == honest.want


def test_a_request_whose_fields_are_wrong_fails_in_its_turn_by_name(server: str) -> None:
    client = Client(server)
    session = client.session()
    model = client.model(session)
    saved = {"model_id": model, "seq_id": 1, "path": "without-adam"}
    path = client.outcome(client.ask("save_weights_for_sampler", saved))["path"]
    seq = 1
    for route, fields, words in (
        *(("save_weights", {"ttl_seconds": x}, "ttl_seconds=") for x in ("x", [1], 10**400, -1, 0)),
        *(("save_weights", {"user_metadata": x}, "user_metadata=") for x in (5, [1])),
        ("save_weights", {"path": 5}, "path=5 is refused"),
        ("load_weights", {"path": path, "optimizer": True}, "which have no optimizer state"),  # and it stays as it was
        ("optim_step", {"adam_params": 5}, "adam_params=5 is refused"),
        ("optim_step", {"adam_params": {**ADAM, "eps": 0.0}}, "adam_params.eps=0.0 is refused"),
        ("optim_step", {"adam_params": {**ADAM, "momentum": 0.9}}, "'adam_params.momentum' is not known"),
    ):
        seq += 1
        outcome = client.outcome(client.ask(route, {"model_id": model, "seq_id": seq, **fields}))
        assert words in outcome["error"] and outcome["category"] == "user"
    for fields, words in (
        ({"model_seq_id": 10**300}, "model_seq_id="), ({"lora_config": 5}, "lora_config=5"),
        ({"lora_config": {"rank": True}}, "lora_config.rank=True"), ({"optimizer_config": [1]}, "optimizer_config=[1"),
        ({"user_metadata": {"x": float("nan")}}, "user_metadata={'x': nan}"), ({"base_model": "\ud800"}, "not valid"),
    ):
        body = {"session_id": session, "model_seq_id": 1, "base_model": "model", **fields}
        with pytest.raises(Refused) as refused:
            client.ask("create_model", body)
        assert refused.value.status == 400 and words in refused.value.detail
    (kept,) = json.loads(client.send(f"training_runs/{model}/checkpoints", b"", method="GET"))["checkpoints"]
    assert kept["tinker_path"] == path
    assert "error" not in client.outcome(client.step(model, seq + 1))


def test_a_body_of_few_bytes_cannot_take_much_memory(server: str, ranks) -> None:
    client, before = Client(server), held_by(ranks)[0]
    model = client.model(client.session())
    shapes = ([1, 2**26], [1, 2**32], [2**62, 2**62], [1, 18])
    for seq, shape in enumerate(shapes, start=1):
        message = messages.ForwardBackwardRequest.FromString(body_of(model, seq, "cross_entropy", {"weights": 1}, [3]))
        for tensor in message.data[0].loss_fn_inputs.values():
            del tensor.shape[:]
            tensor.shape.extend(shape)
            tensor.sparse_csr.crow_indices = np.array([0, 1], np.int64).tobytes()
            tensor.sparse_csr.col_indices = np.array([0], np.int64).tobytes()
            tensor.sparse_csr.values = np.ones(1, np.int64 if tensor.dtype == messages.INT64 else np.float32).tobytes()
        error = client.outcome(client.train(message.SerializeToString()))["error"]
        assert ("cells, and" in error) or ("18 targets after each token" in error), error
    many = messages.ForwardBackwardRequest.FromString(body_of(model, len(shapes) + 1, "cross_entropy", {"weights": 1}))
    for number in range(50):
        many.data[0].loss_fn_inputs[f"x{number}"].CopyFrom(many.data[0].loss_fn_inputs["weights"])
    assert "has 52 loss_fn_inputs" in client.outcome(client.train(many.SerializeToString()))["error"]
    assert held_by(ranks)[0] - before < 300


class Kept:
    """Asks over one connection, which a server that has no descriptor left keeps."""

    def __init__(self, server: str) -> None:
        self.connection = http.client.HTTPConnection(server.removeprefix("http://"), timeout=60.0)

    def ask(self, route: str, body: Mapping) -> tuple[int, dict]:
        self.connection.request("POST", f"/api/v1/{route}", json.dumps(body), {"X-API-Key": "tml-test"})
        answer = self.connection.getresponse()
        return answer.status, json.loads(answer.read())

    def outcome(self, route: str, body: Mapping) -> tuple[int, str]:
        """Return the status and the error of a request and of its promise."""
        status, found = self.ask(route, body)
        while status in (200, 408) and "error" not in found and "metrics" not in found and "path" not in found:
            promise = found["request_id"]
            status, found = self.ask("retrieve_future", {"request_id": promise})
        return status, str(found.get("error", found.get("detail", "")))


@pytest.mark.parametrize("limit", [resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE], ids=["descriptors", "disk"])
def test_a_host_without_descriptors_or_disk_fails_requests_and_not_the_server(server: str, ranks, limit: int) -> None:
    honest, kept = Honest(server, "tml-honest"), Kept(server)
    pid = ranks.forks[0].pid
    client = Client(server)
    session = client.session()
    model, second = client.model(session), {"session_id": session, "model_seq_id": 1, "base_model": "model"}
    kept.ask("get_info", {"model_id": model})
    before = resource.prlimit(pid, limit)
    least = max(map(int, os.listdir(f"/proc/{pid}/fd"))) + 1 if limit == resource.RLIMIT_NOFILE else 1
    resource.prlimit(pid, limit, (least, before[1]))
    try:
        kept.ask("create_model", second)
        status, words = kept.outcome("save_weights", {"model_id": model, "seq_id": 1, "path": "a"})
    finally:
        resource.prlimit(pid, limit, before)
    assert words and status in (200, 503), (status, words)
    again = json.loads(client.result(client.ask("create_model", second)))["model_id"]  # made now, if it was not
    assert client.outcome(client.step(again, 1))["metrics"]["ghost_steps:sum"] == 1.0
    seq = 2 if status == 200 else 1
    assert client.outcome(client.ask("save_weights", {"model_id": model, "seq_id": seq, "path": "b"}))["path"]
    assert honest.round() == honest.want


def test_a_request_that_ran_and_cannot_be_booked_fails_alone(server: str, ranks) -> None:
    honest, client = Honest(server, "tml-honest"), Client(server)
    model = client.model(client.session())
    client.outcome(client.ask("save_weights", {"model_id": model, "seq_id": 1, "path": "a"}))
    (root,) = pathlib.Path(ranks.printed[0]).parent.glob(f"run/checkpoints/{model.replace(':', '_')}")
    (root / "auto").rename(root / "moved")
    (root / "auto").write_text("no folder")
    failed = client.outcome(client.ask("save_weights", {"model_id": model, "seq_id": 2, "path": "b"}))
    assert "could not record this request" in failed["error"] and failed["category"] == "server"
    (root / "auto").unlink()
    assert client.outcome(client.ask("save_weights", {"model_id": model, "seq_id": 3, "path": "c"}))["path"]
    assert honest.round() == honest.want


def fuzz(server: str, ranks, examples: int, number: int) -> None:
    with beside(server):
        before, fuzzer = held_by(ranks), Fuzzer(server)

        @seed(number)
        @settings(max_examples=examples, database=None)
        @given(fuzzer.requests)
        def run(drawn) -> None:
            fuzzer.send(*drawn)

        run()
        for promise in fuzzer.promises:
            with contextlib.suppress(Refused):  # kept no longer
                fuzzer.client.result(promise)
    after = held_by(ranks)
    assert "\x1b" not in ranks.said()
    assert {200, 400, 404} <= set(fuzzer.statuses)
    assert after[0] - before[0] < MOST_MB and after[1] - before[1] < MOST_DESCRIPTORS, (before, after)
    assert Client(server).send("healthz", b"", method="GET") == b'{"status":"ok"}'


def test_a_fuzz_of_every_route_and_field_changes_nothing_for_others(server, ranks) -> None:
    fuzz(server, ranks, 120, 0)


@pytest.mark.long(seconds=120)
@pytest.mark.parametrize("number", range(1, 4))
def test_a_long_fuzz_of_every_route_and_field(server, ranks, number: int) -> None:
    fuzz(server, ranks, 1500, number)
