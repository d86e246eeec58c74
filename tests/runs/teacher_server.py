"""A stand-in for a vLLM server that holds a teacher: /v1/models, and /v1/completions with ``prompt_logprobs``."""

from __future__ import annotations

import contextlib
import http.server
import json
import pathlib
import threading
from collections.abc import Iterator

import torch


def answer(model, body: dict) -> dict:
    """Return the answer of vLLM 0.32.0 to a request, as far as a teacher reads it."""
    ids = body["prompt"]
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    entries = [None] + [
        {str(token): {"logprob": logprobs[place, token].item(), "rank": 1, "decoded_token": "?"}}
        for place, token in enumerate(ids[1:])
    ]
    return {"choices": [{"index": 0, "text": "", "prompt_logprobs": entries}]}


@contextlib.contextmanager
def teacher_server(path: pathlib.Path, *, fails: int = 0, cuts: bool = False) -> Iterator[tuple[str, list[dict]]]:
    """Serve a Hugging Face directory; yield the address and the requests so far.

    fails: so many first completions are answered 500. cuts: every answer lacks its last log-prob.
    """
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
