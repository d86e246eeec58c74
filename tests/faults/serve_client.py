"""A client of the server that sends what it likes: bare HTTP, without the SDK's retries and checks."""

import json
import pathlib
import re
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence

import numpy as np

from megatron_rl.serve import messages
from tests.patience import patient, until

START_S = 120.0
ASK_S = 60.0
ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}


def address_of(printed: pathlib.Path) -> str:
    """Wait until the server's first rank says where it serves; return that."""
    found = []

    def says() -> bool:
        found[:] = re.findall(r"serving .* at (http://[\d.:]+)", printed.read_text())
        return bool(found)

    assert until(says, START_S), printed.read_text()
    return found[-1]


def training_body(model: str, seq: int, texts: Sequence[Sequence[int]], *, weight: float = 1.0) -> bytes:
    """Return a request that trains every token of the texts but their first by cross-entropy."""
    message = messages.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn="cross_entropy")
    for tokens in texts:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(tokens[:-1], dtype=np.int32).tobytes()
        put(datum, "target_tokens", np.array(tokens[1:], dtype=np.int64))
        put(datum, "weights", np.full(len(tokens) - 1, weight, dtype=np.float32))
    return message.SerializeToString()


def put(datum, name: str, values: np.ndarray) -> None:
    tensor = datum.loss_fn_inputs[name]
    tensor.dense, tensor.dtype = values.tobytes(), messages.INT64 if values.dtype == np.int64 else messages.FLOAT32
    tensor.shape.extend(values.shape)


class Refused(Exception):
    """An HTTP status that is no success, and its body."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"{status}: {detail}")
        self.status, self.detail = status, detail


class Client:
    """Sends requests under one key."""

    def __init__(self, address: str, key: str = "tml-test") -> None:
        self.address, self.key = address, key

    def send(self, route: str, body: bytes | Mapping, *, method: str = "POST", kind: str = "application/json") -> bytes:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"X-API-Key": self.key, "Content-Type": kind}
        request = urllib.request.Request(f"{self.address}/api/v1/{route}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=patient(ASK_S)) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            raise Refused(error.code, error.read().decode()) from None

    def ask(self, route: str, body: Mapping) -> dict:
        return json.loads(self.send(route, body))

    def session(self) -> str:
        return self.ask("create_session", {"sdk_version": "0.38.0", "tags": []})["session_id"]

    def model(self, session: str, number: int = 0, base: str = "model", **lora: object) -> str:
        body = {"session_id": session, "model_seq_id": number, "base_model": base, "lora_config": lora or None}
        return json.loads(self.result(self.ask("create_model", body)))["model_id"]

    def train(self, body: bytes) -> dict:
        return json.loads(self.send("forward_backward", body, kind="application/x-protobuf"))

    def step(self, model: str, seq: int) -> dict:
        return self.ask("optim_step", {"model_id": model, "seq_id": seq, "adam_params": ADAM})

    def result(self, promise: Mapping) -> bytes:
        """Ask until there is an answer; return its bytes."""
        while True:
            try:
                return self.send("retrieve_future", {"request_id": promise["request_id"]})
            except Refused as refused:
                if refused.status != 408:
                    raise

    def outcome(self, promise: Mapping) -> dict:
        return json.loads(self.result(promise))

    def logprobs(self, promise: Mapping) -> np.ndarray:
        """Return the log-probs of a training request's answer, all in one array."""
        output = messages.ForwardBackwardOutput.FromString(self.result(promise))
        fields = [record.fields["logprobs"].data for record in output.loss_fn_outputs]
        return np.frombuffer(b"".join(fields), dtype=np.float32)

    def sample(self, sampler: str, seq: int, prompt: Sequence[int], *, samples: int = 1, **params: object) -> dict:
        chunks = {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]}
        body = {
            "sampling_session_id": sampler, "seq_id": seq, "num_samples": samples, "prompt": chunks,
            "sampling_params": {"max_tokens": 4, **params},
        }
        return self.ask("asample", body)
