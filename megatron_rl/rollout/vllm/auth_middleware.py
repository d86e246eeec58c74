"""The API key check of a vLLM server: every route but /health needs the key. vLLM's own check covers fewer routes.

vLLM 0.32.0 (entrypoints/serve/middleware/authenticate.py) checks the key only under /v1, /v2,
/inference and /cohere. Other routes are open to anyone who reaches the port. Some of them only show
data (/tokenize, /metrics, /version). Others replace the weights, reset caches, put the engine to
sleep or call worker methods (/update_weights, /collective_rpc, /sleep ...).

The server loads this module's class by ``--middleware``. Without a key in ``VLLM_API_KEY`` the
class lets every request through. That is safe only on a loopback port of a host without other
users.

The key is sent unencrypted over HTTP. Between hosts, use a TLS proxy or a private network.
"""

from __future__ import annotations

import hmac
import os

from megatron_rl.rollout.vllm.server_command import API_KEY

OPEN_PATHS = ("/health",)
REFUSAL = b'{"error": "Unauthorized: this server wants its API key as a bearer token"}'


class Guard:
    """Wraps a server's ASGI application, and refuses requests without the API key (HTTP 401, WebSocket 1008).

    It imports nothing from vLLM.
    """

    def __init__(self, app) -> None:
        self.app = app
        self.expected = os.environ[API_KEY].encode() if os.environ.get(API_KEY) else None

    async def __call__(self, scope, receive, send) -> None:
        if self.expected is None or scope["type"] not in ("http", "websocket") or self._may_pass(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})

    def _may_pass(self, scope) -> bool:
        if scope["path"] in OPEN_PATHS:
            return True
        authorization = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, key = authorization.partition(b" ")
        return kind.lower() == b"bearer" and hmac.compare_digest(key.strip(), self.expected)
