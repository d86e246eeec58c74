"""A teacher model on vLLM servers: its log-probs of given tokens, requested as ``prompt_logprobs``.

The facts are from vLLM 0.32.0 (entrypoints/openai/completion). /v1/completions takes a prompt of
token ids and ``prompt_logprobs=0``. The answer has one entry for each prompt token: null for the
first, then the token's own id and log-prob. In the server's default logprobs mode, log-probs are at
temperature 1 even if the request has another temperature.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from megatron_rl.config import TeacherConfig
from megatron_rl.errors import EngineError
from megatron_rl.rollout.engines.replica import ReplicaLost, RequestRefused
from megatron_rl.rollout.vllm.http import Server
from megatron_rl.rollout.vllm.server_replica import api_key_of
from megatron_rl.types import Sample

KEY_SETTING = "teacher.api_key_env"
ATTEMPTS = 2  # attempts at a sample's request, each at the next server in turn


class TeacherServers:
    """Requests the teacher's log-probs from vLLM servers, several requests at once. Its methods are not collectives."""

    def __init__(self, settings: TeacherConfig) -> None:
        """Read the servers' addresses and key. Raises ConfigError for an invalid address or key."""
        key = api_key_of(settings.api_key_env)
        self._servers = [Server(url, api_key=key, key_setting=KEY_SETTING) for url in settings.servers]
        self._settings = settings
        self._models: dict[str, str] = {}
        self._turn = itertools.count()

    def logprobs(self, samples: Sequence[Sample], deadline_s: float) -> list[np.ndarray]:
        """Return the teacher's log-probs of each sample's response tokens: one float32 [response tokens] per sample.

        deadline_s: seconds for all samples together.

        Raises EngineError if all requests for a sample fail, or at the deadline.
        """
        if not samples:
            return []
        ends_at = time.monotonic() + deadline_s
        with ThreadPoolExecutor(self._settings.requests_at_once, thread_name_prefix="teacher") as threads:
            coming = [threads.submit(self._of_sample, sample, ends_at) for sample in samples]
            try:
                return [future.result() for future in coming]
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _of_sample(self, sample: Sample, ends_at: float) -> np.ndarray:
        errors = []
        for _ in range(ATTEMPTS):
            server = self._servers[next(self._turn) % len(self._servers)]
            timeout_s = min(self._settings.request_s, ends_at - time.monotonic())
            if timeout_s <= 0:
                errors.append("run.deadline_s is over")
                break
            try:
                return self._ask(server, sample, timeout_s)
            except (ReplicaLost, RequestRefused) as error:
                errors.append(str(error))
        raise EngineError(f"no teacher scored sample {sample.sample_id}: {'; '.join(errors)}")

    def _ask(self, server: Server, sample: Sample, timeout_s: float) -> np.ndarray:
        ids = sample.token_ids.tolist()
        body = {"model": self._model_of(server, timeout_s), "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        answer = server.call("POST", "/v1/completions", body, timeout_s=timeout_s)
        try:
            entries = answer["choices"][0]["prompt_logprobs"]
            logprobs = [
                float(entries[place][str(ids[place])]["logprob"]) for place in range(sample.prompt_tokens, len(ids))
            ]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise RequestRefused(
                f"{server.url}: an answer without the log-prob of each of {len(ids)} prompt tokens "
                f"({type(error).__name__}: {error}); is it a vLLM server of the policy's tokenizer?"
            ) from error
        return np.array(logprobs, dtype=np.float32)

    def _model_of(self, server: Server, timeout_s: float) -> str:
        """Return the name of the first model that a server lists at /v1/models."""
        if server.url not in self._models:
            answer = server.call("GET", "/v1/models", timeout_s=timeout_s)
            try:
                self._models[server.url] = str(answer["data"][0]["id"])
            except (KeyError, IndexError, TypeError) as error:
                raise RequestRefused(f"{server.url}: /v1/models names no model; is it a vLLM server?") from error
        return self._models[server.url]
