"""The replica (engines/replica.py) of a ``vllm serve``: tokens by /inference/v1/generate, weights by vLLM's RL routes.

This file relies on facts that were read in the source of vLLM 0.32.0 and seen in its runs:

- ``/inference/v1/generate`` takes the fields of SamplingParams. The server's generation_config does
  not replace a field that is sent (entrypoints/scale_out/token_in_token_out/serving.py).
- A token of ``stop_token_ids`` ends a sample and is its last token, for any value of ``ignore_eos``
  (v1/core/sched/utils.py, check_stop).
- A log-prob that is −inf, NaN or missing is sent as −9999.
- If a client hangs up, its requests end.
- /pause?mode=keep answers once no step is under way. Later requests wait for /resume
  (v1/engine/core.py, pause_scheduler).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import numpy as np

from megatron_rl.rollout.engines.engine import NO_WEIGHTS
from megatron_rl.rollout.engines.replica import (
    OLDEST_VLLM,
    Completion,
    GenerateRequest,
    ReplicaFacts,
    ReplicaLost,
    RequestRefused,
)
from megatron_rl.rollout.vllm.http import Exchange, MissingRoute, NotListening, Server, ServerFailed
from megatron_rl.rollout.vllm.routed_experts import of_choice
from megatron_rl.rollout.vllm.sampling_params import parse_version, sampling_parameters
from megatron_rl.rollout.vllm.server_command import LOGPROBS_MODE, WORKER_EXTENSION, example
from megatron_rl.rollout.vllm.server_health import ANSWER_S, ServerHealth

log = logging.getLogger(__name__)
POLL_S = 0.5
RESUME_S = 30.0  # seconds for all attempts to resume a server after a failed update in flight
# The label of a server's weights from a pause to the update's end. It is no number, so samples with it are refused.
UPDATING_LABEL = "updating"
UNLABEL = ("/update_weight_version", {"new_version": UPDATING_LABEL})
NO_LOGPROB = -9999.0  # vLLM's number for a log-prob that is −inf, NaN or missing
KEY_SETTING = "rollout.api_key_env"


def api_key_of(variable: str | None) -> str | None:
    """Return the API key that an environment variable holds; None if the variable is not named, not set, or empty."""
    return (os.environ.get(variable) or None) if variable else None


class ServerReplica:
    """Drives one vLLM server over HTTP. It is a ``Replica``. Each request under way has a thread and a connection."""

    ours = False

    def __init__(self, url: str, *, api_key_env: str | None = None, model: str = "MODEL") -> None:
        """Store the server's address and key, without connecting. Raises ConfigError for an invalid address or key.

        api_key_env: the name of the environment variable that holds the key; None: no key is sent.
        model: the model's name in messages that show how to start a server.
        """
        self.server = Server(url, api_key=api_key_of(api_key_env), key_setting=KEY_SETTING)
        self.name = self.server.url
        self.weight_version = NO_WEIGHTS
        self.model = model
        self._held_before_restart = NO_WEIGHTS
        self._under_way: dict[str, Exchange] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._numbers = itertools.count()
        self.health = ServerHealth(self.server, owes=lambda: bool(self._under_way), cut=self._cut_all)

    def start(self) -> None:
        """Start to watch the server's health while requests are under way. The server itself is started elsewhere."""
        self.health.start()

    @property
    def progressed_at(self) -> float:
        return self.health.progressed_at

    def wait_ready(self, timeout_s: float) -> ReplicaFacts:
        """Ask the server until it serves, and return its facts. Failures are ignored while it starts or restarts.

        Raises ReplicaLost if the time is up. Raises RequestRefused if the server answers but cannot
        serve this trainer.
        """
        ends_at = time.monotonic() + timeout_s
        while True:
            try:
                self._check_health(min(ANSWER_S, max(0.05, ends_at - time.monotonic())))
                facts = self._facts()
                self.weight_version = self._weights_after_restart()
                return facts
            except ReplicaLost as error:
                if time.monotonic() + POLL_S < ends_at:
                    time.sleep(POLL_S)
                    continue
                hint = ""
                if isinstance(error, NotListening):
                    hint = f". Start a server: {example(self.model, self.server.host, self.server.port)}"
                raise ReplicaLost(f"{self.name} was not ready in {timeout_s:.1f} s: {error}{hint}") from error

    def _check_health(self, timeout_s: float) -> None:
        try:
            self.server.call("GET", "/health", timeout_s=timeout_s)
        except MissingRoute as error:
            raise RequestRefused(
                f"{self.name} answers, and has no /health: another program listens there, not vLLM ({error})"
            ) from error

    def _weights_after_restart(self) -> int:
        if self._held_before_restart == NO_WEIGHTS:
            return self.weight_version
        # If the label is the expected version, it is still the same process: a restarted one answers "default".
        # Its weights were complete when the version was noted.
        version = parse_version(str(self._get("/weight_info", "weight_version")))
        expected, self._held_before_restart = self._held_before_restart, NO_WEIGHTS
        return expected if version == expected else NO_WEIGHTS

    def _facts(self) -> ReplicaFacts:
        version = str(self._get("/version", "version"))
        numbers = re.match(r"(\d+)\.(\d+)", version)
        if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST_VLLM:
            raise RequestRefused(
                f"{self.name} runs vLLM {version}; {'.'.join(map(str, OLDEST_VLLM))} or newer is needed, update it "
                "there"
            )
        models = self._get("/v1/models", "data")
        description = self._describe()
        mode = description["logprobs_mode"]
        if mode != LOGPROBS_MODE:
            raise RequestRefused(
                f"{self.name} gives log-probs in the mode {mode!r}, which are not those at the sampling temperature; "
                f"start it with --logprobs-mode {LOGPROBS_MODE}"
            )
        limits = [description["max_model_tokens"], *(x["max_model_len"] for x in models if x.get("max_model_len"))]
        return ReplicaFacts(
            vllm_version=version,
            vocab_size=int(description["vocab_size"]),
            max_model_tokens=int(min(limits)),
            logprobs_mode=mode,
            dtype=description.get("dtype"),
            routed_experts=bool(description.get("routed_experts")),
        )

    def _get(self, path: str, field: str):
        answer = self.server.call("GET", path, timeout_s=ANSWER_S)
        if not isinstance(answer, dict) or field not in answer:
            raise ReplicaLost(f"{self.name}: GET {path} answered without {field!r}: {answer!r:.200}")
        return answer[field]

    def _describe(self) -> dict:
        """Return what the server's workers say of their engine: the dict of ``Receiver.describe``.

        It holds ``vocab_size``, ``max_model_tokens`` and ``logprobs_mode``. Raises RequestRefused
        if the workers' answers differ, or if the workers cannot take weights.
        """
        try:
            descriptions = self._ask_workers("describe", ANSWER_S)
        except (ReplicaLost, RequestRefused) as error:
            if "describe" in str(error).partition(", ")[2]:  # the server's error: its workers have no such method
                raise RequestRefused(
                    f"{self.name}: its workers cannot take weights ({error}); start it with {self._flag()}"
                ) from error
            raise
        wanted = {"vocab_size", "max_model_tokens", "logprobs_mode"}
        if not descriptions or any(not isinstance(x, dict) or not wanted <= x.keys() for x in descriptions):
            raise RequestRefused(
                f"{self.name}: its workers describe themselves as {descriptions!r:.200}; start it with {self._flag()}"
            )
        if any(x != descriptions[0] for x in descriptions):
            raise RequestRefused(
                f"{self.name}: its workers disagree on what they are: {descriptions!r:.400}; restart it"
            )
        return descriptions[0]

    def _flag(self) -> str:
        return f"--worker-extension-cls {WORKER_EXTENSION}"

    def check_tokenizer(self, encode: Callable[[str], list[int]], texts: Sequence[str]) -> None:
        """Raise RequestRefused if the server's tokenizer and ``encode`` give a text different ids.

        No special tokens are added. A server without a tokenizer passes the check.
        """
        for text in texts:
            try:
                answer = self.server.call(
                    "POST", "/tokenize", {"prompt": text, "add_special_tokens": False}, timeout_s=ANSWER_S
                )
            except MissingRoute:
                return
            except (ReplicaLost, RequestRefused) as error:
                if "tokenizer" in str(error).lower():  # 400 or 501: the server runs with skip_tokenizer_init
                    return
                raise
            theirs = answer.get("tokens") if isinstance(answer, dict) else None
            if theirs is None:
                raise ReplicaLost(f"{self.name}: POST /tokenize answered without 'tokens': {answer!r:.200}")
            ours = list(encode(text))
            if theirs != ours:
                raise RequestRefused(
                    f"{self.name} has another tokenizer than the trainer: {text!r} is {theirs} there and {ours} here; "
                    "serve the model folder that model.hf_path names, with its own tokenizer"
                )

    def submit(self, request: GenerateRequest) -> Future[list[Completion]]:
        future: Future[list[Completion]] = Future()
        exchange = Exchange()
        with self._lock:
            if self._closed:
                raise ReplicaLost(f"{self.name} was closed here")
            assert request.request_id not in self._under_way, f"request {request.request_id} is under way already"
            self._under_way[request.request_id] = exchange
        # A daemon thread, so that a request that hangs does not keep the process from ending.
        threading.Thread(
            target=self._generate, args=(request, exchange, future), daemon=True, name=f"generate-{request.request_id}"
        ).start()
        return future

    def _generate(self, request: GenerateRequest, exchange: Exchange, future: Future) -> None:
        body = {
            "request_id": request.request_id,
            "token_ids": list(request.token_ids),
            "sampling_params": sampling_parameters(request),
            "stream": False,
        }
        failure: Exception | None = None
        try:
            answer = self.server.call("POST", "/inference/v1/generate", body, timeout_s=None, exchange=exchange)
            completions = self._completions(request, answer)
        except Exception as error:  # noqa: BLE001 (the future raises it, whatever it is)
            failure = self._explained(error)
        with self._lock:
            if self._under_way.get(request.request_id) is exchange:
                del self._under_way[request.request_id]
        if failure is None:
            future.set_result(completions)
        else:
            future.set_exception(failure)

    def _completions(self, request: GenerateRequest, answer: object) -> list[Completion]:
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            prompt = _prompt_logprobs(request, answer) if request.prompt_logprobs else None
            completions = [_completion(choice, prompt) for choice in choices]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ReplicaLost(
                f"{self.name}: the answer to request {request.request_id} cannot be read, {error!r}: {answer!r:.300}"
            ) from error
        indices = [choice["index"] for choice in choices]
        if indices != list(range(len(choices))):
            raise ReplicaLost(f"{self.name}: the answer to request {request.request_id} numbers its samples {indices}")
        return completions

    def abort(self, request_id: str) -> None:
        with self._lock:
            exchange = self._under_way.pop(request_id, None)
        if exchange is not None:
            exchange.cut()

    def control(self, method: str, arguments: Mapping[str, object], timeout_s: float) -> object:
        match method:
            case "init_weight_transfer":
                with contextlib.suppress(MissingRoute):
                    self._post("/resume", None, timeout_s)  # a trainer that was killed during an update left it paused
                return self._post("/init_weight_transfer_engine", {"init_info": dict(arguments)}, timeout_s)
            case "start_weight_update":
                return self._post("/start_weight_update", None, timeout_s)
            case "update_weights":
                return self._post("/update_weights", {"update_info": dict(arguments)}, timeout_s)
            case "finish_weight_update":
                return self._post(
                    "/finish_weight_update", {"weight_version": str(arguments["weight_version"])}, timeout_s
                )
            case "reset_prefix_cache":
                return self._reset_prefix_cache(bool(arguments.get("running")), timeout_s)
            case "weights_received" | "abandon_weight_update":
                return self._ask_workers(method, timeout_s)
            case "pause":
                self._post("/pause?mode=keep&clear_cache=false", None, timeout_s)
                return self._post(*UNLABEL, timeout_s)
            case "resume":
                return self._post("/resume", None, timeout_s)
            case "sleep":
                return self._post(f"/sleep?level={int(arguments['level'])}", None, timeout_s)
            case "wake":
                tags = urllib.parse.urlencode([("tags", tag) for tag in arguments.get("tags") or ()])
                return self._post(f"/wake_up?{tags}" if tags else "/wake_up", None, timeout_s)
            case other:
                raise ValueError(f"an engine has no control message {other!r}")

    def _post(self, path: str, body: object, timeout_s: float) -> object:
        name, exchange = f"control {next(self._numbers)}", Exchange()
        with self._lock:
            self._under_way[name] = exchange
        try:
            return self.server.call("POST", path, body, timeout_s=timeout_s, exchange=exchange)
        except ReplicaLost as error:
            raise self._explained(error) from error
        finally:
            with self._lock:
                self._under_way.pop(name, None)

    def _explained(self, error: Exception) -> Exception:
        """Return a request's error. If the health check ended the request, the reason (the engine died) is added."""
        if self.health.sick and isinstance(error, ReplicaLost) and not isinstance(error, NotListening | ServerFailed):
            return ReplicaLost(f"{error}, since {self.health.sick}")
        return error

    def _ask_workers(self, method: str, timeout_s: float) -> list:
        answer = self._post("/collective_rpc", {"method": method, "timeout": timeout_s}, timeout_s)
        if not isinstance(answer, dict) or not isinstance(answer.get("results"), list):
            raise ReplicaLost(f"{self.name}: POST /collective_rpc {method} answered without 'results': {answer!r:.200}")
        return answer["results"]

    def give_up(self, cause: str) -> None:
        """End all requests under way, so that nothing is sampled with half-updated weights; then resume the server.

        If the server does not end its requests, the connections are cut. Failures are logged, not
        raised.
        """
        log.warning("%s abandons its running requests: %s", self.name, cause)
        try:
            self._post("/pause?mode=abort&clear_cache=false", None, ANSWER_S)
        except (ReplicaLost, RequestRefused) as error:
            log.warning("%s could not end its requests: %s", self.name, error)
            self._cut_all()
        ends_at = time.monotonic() + RESUME_S
        while True:
            try:
                self._post(*UNLABEL, ANSWER_S)
                self._post("/resume", None, ANSWER_S)
                return
            except NotListening:  # the server is gone, and a new one is not paused
                return
            except (ReplicaLost, RequestRefused) as error:
                if time.monotonic() > ends_at:
                    log.warning(
                        "%s may still be paused: %s. POST %s/resume, or start it anew",
                        self.name,
                        error,
                        self.server.url,
                    )
                    return
            time.sleep(POLL_S)

    def _reset_prefix_cache(self, running: bool, timeout_s: float) -> None:
        """Reset the prefix cache. Retry if that fails: an aborted request's blocks are freed only a step or two later.

        running: whether the keys and values of running requests are dropped too, and computed
            again.

        Raises ReplicaLost if the time is up.
        """
        ends_at = time.monotonic() + timeout_s
        path = "/reset_prefix_cache?reset_running_requests=true" if running else "/reset_prefix_cache"
        while True:
            answer = self._post(path, None, max(0.05, ends_at - time.monotonic()))
            if isinstance(answer, dict) and answer.get("success") is True:
                return
            if time.monotonic() + POLL_S >= ends_at:
                raise ReplicaLost(
                    f"{self.name} did not reset its prefix cache in {timeout_s:g} s ({answer!r:.200}): requests hold "
                    "its blocks"
                )
            time.sleep(POLL_S / 5)

    def restart(self) -> None:
        """Abort this process's requests to the server, and forget the server's weight version.

        The server itself is restarted by its supervisor. ``wait_ready`` waits for it.
        """
        self._held_before_restart, self.weight_version = self.weight_version, NO_WEIGHTS
        self.health.sick = ""
        self._cut_all()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self.health.close()
        self._cut_all()
        self.weight_version = NO_WEIGHTS

    def _cut_all(self) -> None:
        with self._lock:
            exchanges = list(self._under_way.values())
            self._under_way.clear()
        for exchange in exchanges:
            exchange.cut()


def _prompt_logprobs(request: GenerateRequest, answer: Mapping) -> np.ndarray:
    """Return the log-prob of each prompt token, float32 [prompt tokens], NaN for the first token."""
    places = zip(request.token_ids, answer["prompt_logprobs"], strict=True)
    found = [place[str(token)]["logprob"] if place else np.nan for token, place in places]
    return np.array(found, dtype=np.float32)


def _completion(choice: Mapping, prompt: np.ndarray | None) -> Completion:
    """Return the completion in one choice of vLLM's GenerateTokensResponse.

    prompt: float32 [prompt tokens], the log-probs of the prompt's tokens; None if not requested.
    """
    token_ids = np.array(choice["token_ids"], dtype=np.int64)
    content = (choice["logprobs"] or {"content": []})["content"]
    logprobs = np.array([entry["logprob"] for entry in content], dtype=np.float32)
    logprob_token_ids = [entry["token_id"] for entry in content]
    if len(logprob_token_ids) == len(token_ids) and logprob_token_ids != token_ids.tolist():
        raise ValueError("its log-probs are of other tokens than its tokens")
    versions = tuple((parse_version(x["version"]), x["end"] - x["start"]) for x in choice.get("weight_versions") or ())
    return Completion(
        token_ids=token_ids,
        logprobs=np.where(logprobs <= NO_LOGPROB, np.float32(-np.inf), logprobs),
        finish_reason=choice["finish_reason"],
        weight_versions=versions,
        prompt_logprobs=prompt,
        routed_experts=of_choice(choice),
    )
