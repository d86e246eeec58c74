"""The HTTP front: routes of Tinker's API, on rank 0 alone, in a thread of its own.

Every error has a name and a status that the SDK does not retry for ever: 4xx for a request that cannot be served, 429
where the client should wait, and for an operation that has failed an answer with ``error`` and ``category``. 5xx is for
faults of the server itself.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from megatron_rl.config.serve import ServeConfig
from megatron_rl.rollout.http_server import BodyLimit, is_known, json_object
from megatron_rl.serve import records
from megatron_rl.serve.books import Books
from megatron_rl.serve.intake import Intake
from megatron_rl.serve.naming import line_of
from megatron_rl.serve.operations import Operation, Operations
from megatron_rl.serve.store import ACCEPTED
from megatron_rl.serve.values import Fault, RequestError
from megatron_rl.serve.versions import check_sdk

log = logging.getLogger(__name__)
ROOT = "/api/v1"
# fields of a JSON body that must be there, and their types
FIELDS: dict[str, dict[str, type]] = {
    "create_session": {"sdk_version": str},
    "session_heartbeat": {"session_id": str},
    "create_model": {"session_id": str, "model_seq_id": int, "base_model": str},
    "get_info": {"model_id": str},
    "optim_step": {"model_id": str, "seq_id": int},
    "save_weights": {"model_id": str, "seq_id": int},
    "save_weights_for_sampler": {"model_id": str, "seq_id": int},
    "load_weights": {"path": str, "optimizer": bool},
    "create_sampling_session": {"session_id": str, "sampling_session_seq_id": int},
    "asample": {"prompt": dict, "sampling_params": dict},
    "retrieve_future": {"request_id": str},
    "weights_info": {"tinker_path": str},
    "client/config": {"sdk_version": str},
}


class Front:
    """Answers HTTP requests.

    keys: the keys that clients may present; none takes any, and keeps the clients of different keys apart all the same.
    """

    def __init__(
        self, settings: ServeConfig, books: Books, intake: Intake, operations: Operations, keys: tuple[str, ...]
    ) -> None:
        self.settings, self.books, self.intake, self.operations, self.keys = settings, books, intake, operations, keys
        self.app = FastAPI(title="megatron_rl", docs_url=None, redoc_url=None, openapi_url=None)
        self.app.add_middleware(BodyLimit, most=int(settings.max_body_mb * 2**20), key="serve.max_body_mb")
        self.app.add_exception_handler(RequestError, _refused)
        self.app.add_exception_handler(404, _unknown_route)
        post: dict[str, Callable[[str, dict], object]] = {
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_model": lambda owner, body: self._promise(intake.create_model(owner, body)),
            "get_info": self._get_info,
            "optim_step": lambda owner, body: self._promise(intake.optim_step(owner, body)),
            "save_weights": lambda owner, body: self._promise(intake.save_weights(owner, body)),
            "save_weights_for_sampler": lambda owner, body: self._promise(intake.save_weights_for_sampler(owner, body)),
            "load_weights": lambda owner, body: self._promise(intake.load_weights(owner, body)),
            "create_sampling_session": self._create_sampling_session,
            "asample": lambda owner, body: self._promise(intake.sample(owner, body)),
            "weights_info": lambda owner, body: records.weights_info(books, owner, body["tinker_path"]),
            "client/config": self._client_config,
            "client/dynamic_config": lambda owner, body: {},
            "telemetry": lambda owner, body: {"status": "accepted"},
            "cancel_future": lambda owner, body: {},
        }
        for name, handle in post.items():
            self.app.add_api_route(f"{ROOT}/{name}", self._json_route(name, handle), methods=["POST"])
        self.app.add_api_route(f"{ROOT}/forward_backward", self._forward_backward, methods=["POST"])
        self.app.add_api_route(f"{ROOT}/retrieve_future", self._retrieve, methods=["POST"])
        self._add_records()

    def _add_records(self) -> None:
        """Add the routes that only read what is written down."""
        books, served = self.books, self.intake.served
        get: dict[str, Callable[..., object]] = {
            "healthz": lambda owner: {"status": "ok"},
            "get_server_capabilities": lambda owner: records.capabilities(served),
            "training_runs": lambda owner: records.training_runs(books, owner),
            "training_runs/{model}": lambda owner, model: records.training_run(books, owner, model),
            "training_runs/{model}/checkpoints": lambda owner, model: records.checkpoints(books, owner, model),
            "checkpoints": lambda owner: records.checkpoints(books, owner, None),
            "sessions/{session}": lambda owner, session: records.session(books, owner, session),
            "samplers/{sampler}": lambda owner, sampler: records.sampler(books, owner, sampler),
        }
        for path, handle in get.items():
            self.app.add_api_route(f"{ROOT}/{path}", self._reading_route(handle), methods=["GET"])
        removing = self._reading_route(
            lambda owner, model, checkpoint: records.remove(books, owner, f"tinker://{model}/{checkpoint}")
        )
        path = f"{ROOT}/training_runs/{{model}}/checkpoints/{{checkpoint:path}}"
        self.app.add_api_route(path, removing, methods=["DELETE"])
        finishing = self._reading_route(lambda owner, session: books.finish_session(session, owner) or {})
        self.app.add_api_route(f"{ROOT}/sessions/{{session}}/finish", finishing, methods=["POST"])

    # ---- what every route does --------------------------------------------------------------------------------------

    def _owner(self, request: Request) -> str:
        """Return who asks, as a digest of the key. Raises RequestError for a key that is not one of the server's."""
        key = request.headers.get("x-api-key", "")
        if not is_known(key, self.keys):
            raise RequestError("the header X-API-Key holds no key of this server", status=401)
        return hashlib.sha256(key.encode()).hexdigest()[:16]

    def _json_route(self, name: str, handle: Callable[[str, dict], object]) -> Callable[[Request], Awaitable[Response]]:
        async def route(request: Request) -> Response:
            owner = self._owner(request)
            body = checked_body(await request.body(), FIELDS.get(name, {}))
            return JSONResponse(await run_in_threadpool(handle, owner, body))

        return route

    def _reading_route(self, handle: Callable[..., object]) -> Callable[[Request], Awaitable[Response]]:
        async def route(request: Request) -> Response:
            owner = self._owner(request)
            return JSONResponse(await run_in_threadpool(handle, owner, **request.path_params))

        return route

    def _promise(self, operation: Operation) -> dict[str, object]:
        promise: dict[str, object] = {"request_id": operation.id}
        if operation.kind == "sample":
            promise["sample_sequence_ids"] = [f"{operation.id}:{i}" for i in range(operation.weight)]
        else:
            promise["model_id"] = operation.line
        return promise

    # ---- routes -----------------------------------------------------------------------------------------------------

    def _client_config(self, owner: str, body: dict) -> dict[str, object]:
        check_sdk(body["sdk_version"])
        return {"pjwt_auth_enabled": False, "proto_compress_fwdbwd": False, "parallel_fwdbwd_chunks": True}

    def _create_session(self, owner: str, body: dict) -> dict[str, object]:
        check_sdk(body["sdk_version"])
        facts = {name: body.get(name) for name in ("sdk_version", "tags", "user_metadata", "display_name")}
        return {"session_id": self.books.open_session(owner, facts), "type": "create_session"}

    def _heartbeat(self, owner: str, body: dict) -> dict[str, object]:
        self.books.session(body["session_id"], owner)
        return {"type": "session_heartbeat"}

    def _get_info(self, owner: str, body: dict) -> dict[str, object]:
        return records.model_info(self.intake.served, self.books.model(body["model_id"], owner))

    def _create_sampling_session(self, owner: str, body: dict) -> dict[str, object]:
        name = self.intake.create_sampling_session(owner, body)
        return {"sampling_session_id": name, "type": "create_sampling_session"}

    async def _forward_backward(self, request: Request) -> Response:
        owner, body = self._owner(request), await request.body()
        operation = await run_in_threadpool(self.intake.forward_backward, owner, body)
        return JSONResponse(self._promise(operation))

    async def _retrieve(self, request: Request) -> Response:
        owner = self._owner(request)
        body = checked_body(await request.body(), FIELDS["retrieve_future"])
        operation = self.operations.find(body["request_id"])
        if operation is None:
            return await run_in_threadpool(self._retrieve_lost, owner, body["request_id"])
        if operation.owner != owner:
            raise RequestError(f"request_id={body['request_id'][:200]!r} is another client's", status=404)
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
        """Answer for an operation that is not in memory: of before a restart, or whose answer is kept no longer."""
        line, seq = line_of(id)
        if (row := self.books.store.operation(id)) is None:
            self.books.sampler(line, owner)  # sampled again by the client: nothing depends on which draws it gets
            raise RequestError(f"sampling request {seq} of {line} is not held any more; send it again", status=410)
        if row.owner != owner:
            raise RequestError(f"request_id={id[:200]!r} is another client's", status=404)
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


def checked_body(content: bytes, fields: Mapping[str, type]) -> dict:
    """Return a JSON object that has the fields, each of its type. Raises RequestError."""
    body = json_object(content, RequestError)
    for name, kind in fields.items():
        if type(body.get(name)) is not kind:
            raise RequestError(f"{name} must be of type {kind.__name__}, and it is {body.get(name)!r:.100}")
    return body
