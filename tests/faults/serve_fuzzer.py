"""Clients of a server under attack: honest ones, whose numbers must not change, and one that sends anything at all."""

import contextlib
import itertools
import json
import threading
from collections.abc import Iterator

import numpy as np
from hypothesis import strategies as st

from megatron_rl.serve import bodies, messages
from megatron_rl.serve.routes import NUMBERED
from tests.faults.serve_client import Client, Refused, put, training_body
from tests.odd_bodies import bodies as bodies_of
from tests.odd_bodies import of_schema
from tests.patience import patient

TEXTS = [[3, 4, 5, 6], [7, 8, 9], [3, 5, 7, 9, 11]]
KINDS: dict[str, type[bodies.Body]] = {
    "create_session": bodies.CreateSession, "session_heartbeat": bodies.SessionHeartbeat,
    "create_model": bodies.CreateModel, "get_info": bodies.OfModel, "optim_step": bodies.OptimStep,
    "save_weights": bodies.SaveWeights, "save_weights_for_sampler": bodies.SaveWeightsForSampler,
    "load_weights": bodies.LoadWeights, "create_sampling_session": bodies.CreateSamplingSession,
    "asample": bodies.Sample, "retrieve_future": bodies.RetrieveFuture, "weights_info": bodies.WeightsInfo,
    "client/config": bodies.ClientConfig, "telemetry": bodies.Anything,
}
READ = ("training_runs", "training_runs/{}", "training_runs/{}/checkpoints", "checkpoints", "sessions/{}", "samplers/x")
NEXT = b'"the next number"'  # stands for a number in a body that was drawn


class Honest:
    """Trains and samples as any client does, again and again from one checkpoint; every round has the same numbers."""

    def __init__(self, server: str, key: str) -> None:
        self.client, self.numbers, self.rounds = Client(server, key), itertools.count(1), []
        session = self.client.session()
        self.model = self.client.model(session)
        saved = {"model_id": self.model, "seq_id": next(self.numbers), "path": "start"}
        self.path = self.client.outcome(self.client.ask("save_weights", saved))["path"]
        base = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "model"}
        self.sampler = self.client.ask("create_sampling_session", base)["sampling_session_id"]
        self.want = self.round()

    def round(self) -> tuple[bytes, bytes, bytes]:
        """Return the log-probs before and after a step from the start, and the tokens of a sample."""
        client, model = self.client, self.model
        load = {"model_id": model, "seq_id": next(self.numbers), "path": self.path, "optimizer": False}
        assert client.outcome(client.ask("load_weights", load))["type"] == "load_weights"
        first = client.result(client.train(training_body(model, next(self.numbers), TEXTS)))
        step = client.outcome(client.step(model, next(self.numbers)))
        assert step["metrics"]["ghost_steps:sum"] == 0.0, step
        then = client.result(client.train(training_body(model, next(self.numbers), TEXTS)))
        drawn = client.result(client.sample(self.sampler, len(self.rounds), [3, 4], seed=7))
        self.rounds.append((first, then, messages.SampleResponse.FromString(drawn).sequences[0].tokens))
        return self.rounds[-1]


@contextlib.contextmanager
def beside(server: str) -> Iterator[list[Honest]]:
    """Have two honest clients work within the block; every round of theirs must equal the first."""
    clients, over, faults = [Honest(server, f"tml-honest-{i}") for i in range(2)], threading.Event(), []

    def work(client: Honest) -> None:
        try:
            while not over.is_set():
                client.round()
        except BaseException as error:  # noqa: BLE001 (raised below)
            faults.append(error)

    threads = [threading.Thread(target=work, args=[client]) for client in clients]
    for thread in threads:
        thread.start()
    try:
        yield clients
    finally:
        over.set()
        for thread in threads:
            thread.join(patient(60.0))
    assert not faults, faults
    for client in clients:
        assert len(client.rounds) >= 2
        assert all(answers == client.want for answers in client.rounds)


@st.composite
def training(draw, model: str) -> tuple[messages.ForwardBackwardRequest, float, bytes]:
    """Draw a training request with tensors of any name, type, shape and kind, and what is put in a place of its bytes.

    A number of 0 stands for the next one.
    """
    message = messages.ForwardBackwardRequest(
        model_id=draw(st.sampled_from([model, model, model, "", "x", "s-0:train:0"])),
        seq_id=draw(st.sampled_from([0] * 9 + [-1, 2**31 - 1])),
        loss_fn=draw(st.sampled_from(["cross_entropy", "importance_sampling", "ppo", "dro", "gspo", "\x1b", ""])),
        forward_only=draw(st.booleans()),
    )
    odd = st.sampled_from([0.8, 1.2, -1.0, 1e308, -1e39, float("nan"), float("inf")])
    named = st.sampled_from(["clip_low_threshold", "clip_high_threshold", "beta", "a\x1b\n"])
    for name, value in draw(st.dictionaries(named, odd, max_size=2)).items():
        message.loss_fn_config[name] = value
    for _ in range(draw(st.integers(0, 2))):
        datum = message.data.add()
        count, token = draw(st.integers(1, 3)), draw(st.sampled_from([3, 99, -1]))
        datum.model_input.add().encoded_text.tokens = np.full(count, token, np.int32).tobytes()
        for name in draw(st.sets(st.sampled_from(["target_tokens", "weights", "advantages", "logprobs", "a\x1b\n"]))):
            tensor = datum.loss_fn_inputs[name]
            kind = np.int64 if name == "target_tokens" else np.float32
            value = draw(st.sampled_from([3, 99] if kind is np.int64 else [1.0, 0.0, -9999.0, 3e38, float("nan")]))
            put(datum, name, np.full(count, value, kind))
            if draw(st.integers(0, 3)) == 0:
                del tensor.shape[:]
                tensor.shape.extend(draw(st.lists(st.sampled_from([-1, 0, 1, 3, 2**26, 2**32, 2**62]), max_size=3)))
                tensor.dtype = draw(st.integers(0, 3))
                if draw(st.booleans()):
                    some = st.sampled_from([b"", b"\0" * 8, b"\0" * 16, b"\xff" * 8])
                    tensor.sparse_csr.values, tensor.sparse_csr.crow_indices = draw(some), draw(some)
                    tensor.sparse_csr.col_indices = draw(some)
    return message, draw(st.floats(0, 1)), draw(st.sampled_from([b""] * 4 + [b"\xff", b"\0\0", b"\x0a\x7f"]))


class Fuzzer:
    """Sends what Hypothesis draws under one key; ``promises``: what it was promised."""

    def __init__(self, server: str) -> None:
        self.client = Client(server, "tml-fuzz")
        self.session = self.client.session()
        self.model = self.client.model(self.session)
        self.numbers, self.statuses, self.promises = itertools.count(2), [], []
        path = self.client.outcome(self.client.ask("save_weights", {"model_id": self.model, "seq_id": 1, "path": "a"}))
        base = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": "model"}
        self.sampler = self.client.ask("create_sampling_session", base)["sampling_session_id"]
        names: dict[str, list[object]] = {
            "session_id": [self.session], "model_id": [self.model], "sampling_session_id": [self.sampler],
            "path": [path["path"], "b", None], "model_path": [path["path"], None], "tinker_path": [path["path"]],
            "base_model": ["model"], "sdk_version": ["0.38.0"], "request_id": [f"{self.model}:1", "s:train:0:0"],
            "model_seq_id": [0, 1, 2], "sampling_session_seq_id": [0, 1, 2], "type": ["adamw", "encoded_text"],
            "tokens": [[3, 4], [3], [99], [-1], [10**30]], "num_samples": [1, 2], "overwrite": [True],
            "ttl_seconds": [1, 10, None], "learning_rate": [1e-3], "prompt_alt_tokens_k": [None],
        }
        values = {name: st.sampled_from(known) for name, known in names.items()}
        values["seq_id"] = st.just(json.loads(NEXT))
        drawn = {route: bodies_of(of_schema(kind.model_json_schema(), values)) for route, kind in KINDS.items()}
        drawn["forward_backward"] = training(self.model)
        paths = st.sampled_from([self.model, self.session, self.sampler, "x", "%00", "%ff", "..", "%0a%1b"])
        read = st.tuples(st.sampled_from(READ), paths).map(lambda x: x[0].format(x[1]))
        self.requests = st.one_of(
            *(st.tuples(st.just(route), body, st.just("POST")) for route, body in drawn.items()),
            st.tuples(read, st.just(b""), st.just("GET")),
            st.tuples(read.map(lambda x: f"{x}/weights/b"), st.just(b""), st.just("DELETE")),
        )

    def send(self, route: str, body: object, method: str) -> None:
        """Send a request that was drawn, under the next number."""
        if route == "forward_backward":
            message, place, odd = body
            message.seq_id = message.seq_id or next(self.numbers)
            body = message.SerializeToString()
            if odd:
                cut = int(place * len(body))
                body = body[:cut] + odd + body[cut + 1 :]
        elif NEXT in body:
            body = body.replace(NEXT, str(next(self.numbers)).encode())
        try:
            answer = self.client.send(route, body, method=method)
        except Refused as refused:
            self.statuses.append(refused.status)
            assert refused.status < 500, (route, body, refused)
            assert refused.status in (408, 405) or json.loads(refused.detail)["detail"], (route, body, refused)
            return
        self.statuses.append(200)
        promise = json.loads(answer) if answer[:1] == b"{" else {}
        if "request_id" in promise and route in (*NUMBERED, "forward_backward", "asample"):
            self.promises.append(promise)
