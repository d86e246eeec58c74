"""Runs of on-policy distillation, from the command line to the metrics: a teacher here and one behind a server."""

import contextlib
import http.server
import json
import math
import pathlib
import threading
from collections.abc import Iterator

import pytest
import torch

from megatron_rl.cli import EXIT_FAILED
from tests.runs.command import SAVED, assert_same_run, rows_of, same_tensors, weights_of, write_teacher

GIVEN = ("advantage.estimator=distillation", "loss.policy=importance_sampling", "reward.functions=[]",
         "rollout.samples_per_prompt=2", "train.samples_per_mini_batch=8", "optimizer.lr=1e-3",
         "optimizer.schedule=constant", "metrics.log_completions=0")


def answer(model, body: dict) -> dict:
    """Return the answer of vLLM 0.32.0 to a request, as far as a teacher reads it."""
    ids = body["prompt"]
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    entries = [None] + [{str(token): {"logprob": logprobs[place, token].item(), "rank": 1, "decoded_token": "?"}}
                        for place, token in enumerate(ids[1:])]
    return {"choices": [{"index": 0, "text": "", "prompt_logprobs": entries}]}


@contextlib.contextmanager
def teacher_server(path: pathlib.Path, *, fails: int = 0, cuts: bool = False) -> Iterator[tuple[str, list[dict]]]:
    """Yield a server's address and requests. It answers ``fails`` completions 500, or ``cuts`` the last log-prob."""
    from transformers import AutoModelForCausalLM

    model, seen, lock = AutoModelForCausalLM.from_pretrained(path).eval(), [], threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "the-teacher"}]} if self.path == "/v1/models" else {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                seen.append(body)
                number = len(seen)
            if number <= fails:
                return self._send(500, {"error": "no memory left"})
            found = answer(model, body)
            if cuts:
                found["choices"][0]["prompt_logprobs"].pop()
            return self._send(200, found)

        def _send(self, status: int, content: dict) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def teacher(arithmetic, tmp_path_factory) -> pathlib.Path:
    return write_teacher(arithmetic / "model", tmp_path_factory.mktemp("teacher"))


def test_a_teacher_of_equal_weights_gives_no_signal(made, arithmetic) -> None:
    """The policy's own weights as teacher: every gap is exactly 0, every step a ghost; nothing is learned."""
    rows = rows_of(made(1, *GIVEN, f"teacher.hf_path={arithmetic / 'model'}"))
    assert [row["step_kind"] for row in rows] == ["GHOST"] * len(rows) and len(rows) == 4
    assert all(row["distillation/reverse_kl"] == 0 for row in rows if "distillation/reverse_kl" in row)
    assert all(row["skip/zero_advantage_ratio"] == 1 for row in rows)


def test_a_server_trains_the_run_that_weights_here_train(made, tmp_path, teacher) -> None:
    """One teacher held by the ranks, over two pipeline stages, and by a server: equal gaps, rewards none."""
    here = rows_of(made(2, *GIVEN, f"teacher.hf_path={teacher}", "parallel.pipeline=2"))
    with teacher_server(teacher, fails=1) as (url, seen):  # the first request's answer is an error, and is asked again
        made.into(tmp_path, 2, *GIVEN, f"teacher.servers=[{url}]", "teacher.request_s=20")
    assert all(body["model"] == "the-teacher" and body["prompt_logprobs"] == 0 for body in seen)
    served = rows_of(tmp_path)
    assert len(seen) == 2 * 16 + 1 and len(here) == len(served) == 4
    for one, two in zip(here, served, strict=True):
        assert "reward/mean" not in one and one["step_kind"] == "REAL"
        for name in ("distillation/reverse_kl", "train/loss", "train/grad_norm"):
            assert (name in one) == (name in two)
            if name in one:
                assert math.isfinite(one[name]) and one[name] == pytest.approx(two[name], rel=1e-3)
    assert here[0]["distillation/reverse_kl"] > 0.01 and "time/teacher_s" in here[0]


def test_a_run_that_goes_on_from_a_checkpoint_equals_the_whole_one(made, teacher) -> None:
    whole = made(1, *GIVEN, *SAVED, f"teacher.hf_path={teacher}")
    assert_same_run(whole, made.again(whole, 1))


def test_a_reward_beside_a_teacher_is_measured_and_not_trained(made, teacher) -> None:
    given = (*GIVEN, *SAVED, f"teacher.hf_path={teacher}")
    plain, scored = made(1, *given), made(1, *given, "reward.functions=[tests.reward_functions:parity]")
    assert same_tensors(weights_of(plain), weights_of(scored)) and "reward/mean" in rows_of(scored)[0]


def test_servers_that_do_not_answer_end_the_run_by_name(made, tmp_path, teacher) -> None:
    with teacher_server(teacher, cuts=True) as (url, _):
        given = (*GIVEN, f"teacher.servers=[{url}]", "teacher.request_s=20")
        said, _ = made.into(tmp_path / "cut", 2, *given, code=EXIT_FAILED)
    assert "no teacher scored sample" in said and "is it a vLLM server of the policy's tokenizer?" in said
    (said,) = made.into(tmp_path / "gone", 1, *given, code=EXIT_FAILED)
    assert "connection refused" in said
