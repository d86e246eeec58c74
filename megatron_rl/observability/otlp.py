"""The exporter that posts a run's spans to an OpenTelemetry collector, by OTLP over HTTP, as protobuf.

The exporter of ``opentelemetry-exporter-otlp-proto-http`` draws its waits between retries from
Python's global random state (1.45, ``_compute_backoff``, at every batch). A run saves and restores
that state in its checkpoints. So this exporter draws no random number: it never retries. It reads
the same environment variables.
"""

from __future__ import annotations

import gzip
import http.client
import logging
import os
import ssl
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Mapping, Sequence

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.util.re import parse_env_headers

log = logging.getLogger(__name__)

_DEFAULT_ENDPOINT = "http://localhost:4318"
_PATH = "/v1/traces"
_COMPRESSIONS: Mapping[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}


def traces_url(endpoint: str | None) -> str:
    """Return the URL that spans are posted to.

    endpoint: the collector's address, to which /v1/traces is added. If None, the result is the
        variable OTEL_EXPORTER_OTLP_TRACES_ENDPOINT. If that is not set, /v1/traces is added to
        OTEL_EXPORTER_OTLP_ENDPOINT, or else to http://localhost:4318.
    """
    if endpoint is None and (whole := os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "").strip()):
        return whole
    base = endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip() or _DEFAULT_ENDPOINT
    return base.rstrip("/") + _PATH


def _setting(name: str) -> str:
    """Return the environment variable OTEL_EXPORTER_OTLP_TRACES_<name>, else OTEL_EXPORTER_OTLP_<name>, else ""."""
    variables = (f"OTEL_EXPORTER_OTLP_TRACES_{name}", f"OTEL_EXPORTER_OTLP_{name}")
    return next((os.environ[key].strip() for key in variables if os.environ.get(key, "").strip()), "")


class OtlpExporter(SpanExporter):
    """Posts batches of spans, each once, and counts the spans that the collector accepted.

    endpoint: as in ``traces_url``.

    It applies the variables OTEL_EXPORTER_OTLP_HEADERS, _TIMEOUT (seconds, default 10),
    _COMPRESSION (gzip, deflate or none), _CERTIFICATE, _CLIENT_CERTIFICATE and _CLIENT_KEY.
    Variables that begin with OTEL_EXPORTER_OTLP_TRACES_ take precedence.

    A failed post raises no error, and the first one is logged as a warning. Raises ValueError for a
    variable that cannot be read, OSError for a certificate that cannot be read.
    """

    def __init__(self, endpoint: str | None) -> None:
        self._url = traces_url(endpoint)
        parts = urllib.parse.urlsplit(self._url)
        # without user, password and query
        host = self._url.partition("?")[0].rpartition("@")[2].removeprefix(f"{parts.scheme}://")
        self.shown = f"{parts.scheme}://{host}"
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the collector's address {self.shown!r} is not http://host:port or https://host:port")
        compression = _setting("COMPRESSION").lower() or "none"
        if compression not in ("none", *_COMPRESSIONS):
            raise ValueError(f"OTEL_EXPORTER_OTLP_COMPRESSION={compression!r} is not gzip, deflate or none")
        self._compress = _COMPRESSIONS.get(compression)
        self._headers = {**parse_env_headers(_setting("HEADERS"), liberal=True)}
        self._headers["content-type"] = "application/x-protobuf"
        if self._compress is not None:
            self._headers["content-encoding"] = compression
        self._timeout_s = float(_setting("TIMEOUT") or 10.0)
        context = None
        if parts.scheme == "https":
            context = ssl.create_default_context(cafile=_setting("CERTIFICATE") or None)
            if certificate := _setting("CLIENT_CERTIFICATE"):
                context.load_cert_chain(certificate, _setting("CLIENT_KEY") or None)
        self._opener = urllib.request.build_opener(*([urllib.request.HTTPSHandler(context=context)] if context else []))
        self._warned, self.num_taken = False, 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Post one batch within the timeout; return SUCCESS or FAILURE."""
        body = encode_spans(spans).SerializeToString()
        request = urllib.request.Request(
            self._url, data=self._compress(body) if self._compress else body, headers=self._headers, method="POST"
        )
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                answer.read()
        except (OSError, http.client.HTTPException, ValueError) as error:  # URLError, HTTPError and timeouts too
            self._warn_once(error)
            return SpanExportResult.FAILURE
        self.num_taken += len(spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Do nothing: no connection stays open."""

    def _warn_once(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s did not take spans, and the run goes on without them: %.300s", self.shown, error)
