"""The HTTP routes of Tinker's API, served by a thread of rank 0.

Every error has a message, and a status that the SDK does not retry for ever. The status is 4xx for
a request that cannot be served, 429 if the client should wait, and 5xx for faults of the server. A
client that asks for a failed operation's result gets a JSON object with ``error`` and ``category``.
"""

from __future__ import annotations

import hashlib
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from megatron_rl.config.serve import ServeConfig
from megatron_rl.errors import quoted
from megatron_rl.rollout.http_connections import QUIET
from megatron_rl.rollout.http_doors import Bounds, Doors
from megatron_rl.serve import bodies, queries
from megatron_rl.serve.handlers import RequestHandlers
from megatron_rl.serve.naming import line_of
from megatron_rl.serve.operation import Operation
from megatron_rl.serve.operations import Operations
from megatron_rl.serve.registry import Registry
from megatron_rl.serve.store import ACCEPTED
from megatron_rl.serve.values import Fault, RequestError

log = logging.getLogger(__name__)
log.addFilter(QUIET)
ROOT = "/api/v1"
LARGE = 128 * 2**10  # bytes; of larger bodies only FEW are read at a time, since their values take far more memory
FEW = 2
UNANSWERED = 4  # bodies of the largest size that are held at a time
# Operations whose number counts as used even if the rest of their body is faulty.
NUMBERED = ("optim_step", "save_weights", "save_weights_for_sampler", "load_weights")


class Routes:
    """Answers HTTP requests.

    keys: the keys that clients may present. If it is empty, clients may present any key or none.
        Even then, clients with different keys are different owners of models and checkpoints.
    """

    def __init__(
        self,
        settings: ServeConfig,
        registry: Registry,
        handlers: RequestHandlers,
        operations: Operations,
        keys: tuple[str, ...],
    ) -> None:
        self.settings, self.registry = settings, registry
        self.handlers, self.operations = handlers, operations
        self._most_json = bodies.most_bytes(handlers.served.longest)
        self._few = anyio.CapacityLimiter(FEW)
        self.app = FastAPI(title="megatron_rl", docs_url=None, redoc_url=None, openapi_url=None)
        # Requests pass the checks of ``Doors`` first.
        most = int(settings.max_body_mb * 2**20)
        bounds = Bounds(
            host=settings.host,
            keys=keys,
            key_of=_key,
            key_words="X-API-Key",
            most_bytes=most,
            setting="serve.max_body_mb",
            most_held=UNANSWERED * most,
            refusal=lambda status, words: JSONResponse({"detail": words, "category": "user"}, status_code=status),
        )
        self.app.add_middleware(Doors, bounds=bounds)
        self.app.add_exception_handler(RequestError, _refused)
        self.app.add_exception_handler(404, _unknown_route)
        for fault in (OSError, sqlite3.Error):
            self.app.add_exception_handler(fault, _unwritten)
        # Each route with a JSON body has a schema and a handler.
        post: dict[str, tuple[type[bodies.Body], Callable[[str, Any], object]]] = {
            "create_session": (bodies.CreateSession, self._create_session),
            "session_heartbeat": (bodies.SessionHeartbeat, self._heartbeat),
            "create_model": (bodies.CreateModel, handlers.create_model),
            "get_info": (bodies.OfModel, self._get_info),
            "optim_step": (bodies.OptimStep, handlers.optim_step),
            "save_weights": (bodies.SaveWeights, handlers.save_weights),
            "save_weights_for_sampler": (bodies.SaveWeightsForSampler, handlers.save_weights_for_sampler),
            "load_weights": (bodies.LoadWeights, handlers.load_weights),
            "create_sampling_session": (bodies.CreateSamplingSession, self._create_sampling_session),
            "asample": (bodies.Sample, handlers.sample),
            "weights_info": (bodies.WeightsInfo, lambda owner, x: queries.weights_info(registry, owner, x.tinker_path)),
            "client/config": (bodies.ClientConfig, self._client_config),
            "client/dynamic_config": (bodies.Anything, lambda owner, body: {}),
            "telemetry": (bodies.Anything, lambda owner, body: {"status": "accepted"}),
            "cancel_future": (bodies.Anything, lambda owner, body: {}),
        }
        for name, (kind, handle) in post.items():
            self.app.add_api_route(f"{ROOT}/{name}", self._json_route(name, kind, handle), methods=["POST"])
        self.app.add_api_route(f"{ROOT}/forward_backward", self._forward_backward, methods=["POST"])
        self.app.add_api_route(f"{ROOT}/retrieve_future", self._retrieve, methods=["POST"])
        self._add_queries()

    def _add_queries(self) -> None:
        """Add the routes that need only the records on disk: queries, the removal of a checkpoint, a session's end."""
        registry, served = self.registry, self.handlers.served
        get: dict[str, Callable[..., object]] = {
            "healthz": lambda owner: {"status": "ok"},
            "get_server_capabilities": lambda owner: queries.capabilities(served),
            "training_runs": lambda owner: queries.training_runs(registry, owner),
            "training_runs/{model}": lambda owner, model: queries.training_run(registry, owner, model),
            "training_runs/{model}/checkpoints": lambda owner, model: queries.checkpoints(registry, owner, model),
            "checkpoints": lambda owner: queries.checkpoints(registry, owner, None),
            "sessions/{session}": lambda owner, session: queries.session(registry, owner, session),
            "samplers/{sampler}": lambda owner, sampler: queries.sampler(registry, owner, sampler),
        }
        for path, handle in get.items():
            self.app.add_api_route(f"{ROOT}/{path}", self._reading_route(handle), methods=["GET"])
        removing = self._reading_route(
            lambda owner, model, checkpoint: queries.remove(registry, owner, f"tinker://{model}/{checkpoint}")
        )
        path = f"{ROOT}/training_runs/{{model}}/checkpoints/{{checkpoint:path}}"
        self.app.add_api_route(path, removing, methods=["DELETE"])
        finishing = self._reading_route(lambda owner, session: registry.finish_session(session, owner) or {})
        self.app.add_api_route(f"{ROOT}/sessions/{{session}}/finish", finishing, methods=["POST"])

    # ---- what every route does --------------------------------------------------------------------------------------

    def _owner(self, request: Request) -> str:
        """Return the request's client as a digest of its key. The middleware ``Doors`` has already checked the key."""
        return hashlib.sha256(_key(request.headers).encode()).hexdigest()[:16]

    async def _in_thread(self, handle: Callable, owner: str, content: bytes) -> object:
        """Return ``handle(owner, content)``, computed in a thread.

        Of the bodies that are larger than LARGE bytes, only FEW are handled at the same time.
        """
        limiter = self._few if len(content) > LARGE else None
        return await anyio.to_thread.run_sync(handle, owner, content, limiter=limiter)

    def _json_route(
        self, name: str, kind: type[bodies.Body], handle: Callable[[str, Any], object]
    ) -> Callable[[Request], Awaitable[Response]]:
        def answer(owner: str, content: bytes) -> object:
            try:
                result = handle(owner, bodies.read(kind, content, most=self._most_json))
            except RequestError as error:
                named = _numbered(content) if name in NUMBERED and error.status == 400 else None
                if named is None:
                    raise
                result = self.handlers.fail(owner, named, name, error, content)
            return self._promise(result) if isinstance(result, Operation) else result

        async def route(request: Request) -> Response:
            return JSONResponse(await self._in_thread(answer, self._owner(request), await request.body()))

        return route

    def _reading_route(self, handle: Callable[..., object]) -> Callable[[Request], Awaitable[Response]]:
        async def route(request: Request) -> Response:
            return JSONResponse(await run_in_threadpool(handle, self._owner(request), **request.path_params))

        return route

    def _promise(self, operation: Operation) -> dict[str, object]:
        promise: dict[str, object] = {"request_id": operation.id}
        if operation.kind == "sample":
            promise["sample_sequence_ids"] = [f"{operation.id}:{i}" for i in range(operation.weight)]
        else:
            promise["model_id"] = operation.line
        return promise

    # ---- routes -----------------------------------------------------------------------------------------------------

    def _client_config(self, owner: str, body: bodies.ClientConfig) -> dict[str, object]:
        bodies.check_sdk(body.sdk_version)
        return {"pjwt_auth_enabled": False, "proto_compress_fwdbwd": False, "parallel_fwdbwd_chunks": True}

    def _create_session(self, owner: str, body: bodies.CreateSession) -> dict[str, object]:
        bodies.check_sdk(body.sdk_version)
        return {"session_id": self.registry.open_session(owner, body.model_dump()), "type": "create_session"}

    def _heartbeat(self, owner: str, body: bodies.SessionHeartbeat) -> dict[str, object]:
        self.registry.session(body.session_id, owner)
        return {"type": "session_heartbeat"}

    def _get_info(self, owner: str, body: bodies.OfModel) -> dict[str, object]:
        return queries.model_info(self.handlers.served, self.registry.model(body.model_id, owner))

    def _create_sampling_session(self, owner: str, body: bodies.CreateSamplingSession) -> dict[str, object]:
        name = self.handlers.create_sampling_session(owner, body)
        return {"sampling_session_id": name, "type": "create_sampling_session"}

    async def _forward_backward(self, request: Request) -> Response:
        owner, body = self._owner(request), await request.body()
        return JSONResponse(self._promise(await self._in_thread(self.handlers.forward_backward, owner, body)))

    async def _retrieve(self, request: Request) -> Response:
        owner = self._owner(request)
        id = bodies.read(bodies.RetrieveFuture, await request.body(), most=bodies.MOST_QUESTION).request_id
        operation = self.operations.find(id)
        if operation is None:
            return await run_in_threadpool(self._retrieve_lost, owner, id)
        if operation.owner != owner:
            raise RequestError(f"request_id={quoted(id, 200)} is another client's", status=404)
        if not await self.operations.wait(operation, self.settings.poll_s):
            pending = {"type": "try_again", "request_id": operation.id, "queue_state": "active"}
            return JSONResponse(pending, status_code=408)
        self.operations.tell(operation)
        if operation.error is not None:
            message, fault = operation.error
            return JSONResponse({"error": message, "category": fault.value})
        content, kind = operation.content
        return Response(content, media_type=kind)

    def _retrieve_lost(self, owner: str, id: str) -> Response:
        """Return the response to a client that asks for the answer of operation ``id``, which is not in memory.

        The server was restarted since, or has dropped the answer. So the response is an error, unless
        the operation was a model's creation that has ended.
        """
        line, seq = line_of(id)
        if (row := self.registry.store.operation(id)) is None:
            self.registry.sampler(line, owner)  # the client may sample again, since nothing depends on the draws
            raise RequestError(f"sampling request {seq} of {line} is not held any more; send it again", status=410)
        if row.owner != owner:
            raise RequestError(f"request_id={quoted(id, 200)} is another client's", status=404)
        if row.kind == "create_model" and row.state != ACCEPTED:
            return JSONResponse({"model_id": line, "type": "create_model"})
        lost = self.operations.failure_of(line)
        self.operations.tell_line(line)
        what = "was lost before it ended" if row.state == ACCEPTED else "had ended, and its answer is not kept any more"
        message = f"{row.kind} {seq} of {line} {what}" + (f": {lost[0]}" if lost else "")
        return JSONResponse({"error": message, "category": Fault.SERVER.value})


async def _unknown_route(request: Request, _: Exception) -> Response:
    text = f"{request.method} {request.url.path} is not served here; docs/tinker.md lists what is"
    return JSONResponse({"detail": text}, status_code=404)


async def _refused(_: Request, error: RequestError) -> Response:
    return JSONResponse({"detail": str(error), "category": error.fault.value}, status_code=error.status)


async def _unwritten(request: Request, error: Exception) -> Response:
    """Return the answer to a request that failed for lack of disk space or descriptors: the client shall try again."""
    log.error("%s: %s: %s", request.url.path, type(error).__name__, error)
    text = f"the server cannot write down the request ({type(error).__name__}: {error}); try again"
    return JSONResponse({"detail": text, "category": Fault.SERVER.value}, status_code=503)


def _key(headers: Mapping[str, str]) -> str:
    return headers.get("x-api-key", "")


def _numbered(content: bytes) -> bodies.Numbered | None:
    """Return the model and the operation's number in a request's body; None if one of them is faulty."""
    try:
        return bodies.read(bodies.Numbered, content, most=len(content))
    except RequestError:
        return None
