"""The endpoint's HTTP routes: OpenAI's routes under /sessions/ID/v1, and the route of the session's reward."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from megatron_rl.config import EndpointConfig
from megatron_rl.errors import shortened
from megatron_rl.rollout.endpoint.bodies import chat_request, completion_request, reward_in
from megatron_rl.rollout.endpoint.rendering import Rendering, answer, chunks
from megatron_rl.rollout.endpoint.requests import CompletionRequest, Refused
from megatron_rl.rollout.endpoint.session import Pending, Session, Tally
from megatron_rl.rollout.http_doors import Bounds, Doors
from megatron_rl.rollout.http_server import json_object

HOST = "127.0.0.1"
BESIDE = 4  # bodies of the largest size that may be held beside one body for each agent
CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}  # OpenAI's names of errors
MOST_BYTES = 12  # of one character in JSON: a surrogate pair of two escapes, six bytes each


class SessionRoutes:
    """Answers agents' HTTP requests. Slow work, such as parsing and tokenizing a body, runs in a pool of threads.

    temperature: ``rollout.temperature``.
    vocab_size: the model's vocabulary size.
    keys: the keys that clients may present. Empty: any key, or none.
    submit: a callable that hands a request to the thread of ``AgentEngine.generate``.
    """

    def __init__(
        self,
        settings: EndpointConfig,
        rendering: Rendering,
        tally: Tally,
        *,
        temperature: float,
        vocab_size: int,
        keys: tuple[str, ...],
        submit: Callable[[Pending], None],
    ) -> None:
        self._rendering, self._tally = rendering, tally
        self._submit = submit
        self.sessions: dict[str, Session] = {}
        self.app = FastAPI(title="megatron_rl", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
        most = int(settings.max_body_mb * 2**20)
        bounds = Bounds(
            host=HOST,
            keys=keys,
            key_of=lambda headers: headers.get("authorization", "").removeprefix("Bearer "),
            key_words="Authorization",
            most_bytes=most,
            setting="rollout.endpoint.max_body_mb",
            most_held=(settings.num_agents + BESIDE) * most,
            refusal=lambda status, words: _error(status, words, CODES.get(status, "invalid_request_error")),
        )
        self.app.add_middleware(Doors, bounds=bounds)
        self.app.add_exception_handler(Refused, _refused)
        for status in (404, 405):
            self.app.add_exception_handler(status, _unknown_route)
        prefix = "/sessions/{key}"
        completion = functools.partial(completion_request, vocab_size=vocab_size)
        checks = {"chat/completions": chat_request, "completions": completion}
        for path, check in checks.items():
            check = functools.partial(check, temperature=temperature)
            self.app.add_api_route(f"{prefix}/v1/{path}", self._completing(check), methods=["POST"])
        self.app.add_api_route(f"{prefix}/v1/models", self._models, methods=["GET"])
        self.app.add_api_route(f"{prefix}/reward", self._reward, methods=["POST"])

    def _session(self, request: Request) -> Session:
        """Return the session whose id is in a request's path. Raises Refused for an unknown id."""
        key = request.path_params["key"]
        if (session := self.sessions.get(key)) is None:
            self._tally.note("unknown sessions")
            raise Refused(
                f"session {key[:80]!r} is not known; use the base_url that the agent is called with", status=404
            )
        return session

    def _completing(self, check: Callable[[dict], CompletionRequest]) -> Callable[[Request], Awaitable[Response]]:
        async def route(request: Request) -> Response:
            session = self._session(request)
            content = await request.body()
            session.check_length(len(content) // MOST_BYTES, self._rendering)

            def take() -> Pending:
                return session.ask(check(json_object(content, Refused)), self._rendering, self._tally)

            async with session.turnstile:
                pending = await run_in_threadpool(take)
            self._submit(pending)
            return await run_in_threadpool(self._answered, pending, await asyncio.wrap_future(pending.done))

        return route

    def _answered(self, pending: Pending, result: tuple) -> Response:
        turn, reply, number = result
        request = pending.request
        names = self._rendering.names(turn.ids) if request.logprobs else None
        name = f"{'chatcmpl' if request.is_chat else 'cmpl'}-{pending.session.key}-{number}"
        body = answer(request, turn, reply, name, int(time.time()), names)
        if request.stream:
            return StreamingResponse(iter(chunks(request, body)), media_type="text/event-stream")
        return JSONResponse(body)

    async def _models(self, request: Request) -> Response:
        self._session(request)
        return JSONResponse(
            {"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "megatron_rl"}]}
        )

    async def _reward(self, request: Request) -> Response:
        session = self._session(request)
        content = await request.body()
        reward = await run_in_threadpool(lambda: reward_in(json_object(content, Refused)))
        session.take_reward(reward, self._tally)
        return JSONResponse({"status": "accepted"})


def _error(status: int, message: str, code: str) -> JSONResponse:
    body = {"error": {"message": message, "type": code, "param": None, "code": code}}
    # The header tells OpenAI's client not to retry: each retry would count as a request of the session.
    return JSONResponse(body, status_code=status, headers={"x-should-retry": "false"})


async def _refused(_: Request, error: Refused) -> Response:
    return _error(error.status, str(error), error.code)


async def _unknown_route(request: Request, error: HTTPException) -> Response:
    text = f"{request.method} {shortened(request.scope['path'], 200)} is not served here; docs/agents.md lists what is"
    return _error(error.status_code, text, "not_found")
