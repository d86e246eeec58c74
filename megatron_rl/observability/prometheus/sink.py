"""The sink for Prometheus: it keeps values from the rows of metrics.jsonl, and its HTTP server answers with them."""

from __future__ import annotations

import logging
import pathlib
import time
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry

from megatron_rl.config import MetricsConfig
from megatron_rl.distributed.http_access import keys_in
from megatron_rl.observability.completions import Completion
from megatron_rl.observability.prometheus.collector import RunCollector, registry_of
from megatron_rl.observability.prometheus.live import ReadLive
from megatron_rl.observability.prometheus.server import MetricsServer
from megatron_rl.observability.prometheus.values import Names, RunValues

log = logging.getLogger(__name__)


def server_of(settings: MetricsConfig, registry: CollectorRegistry) -> MetricsServer:
    """Return the configured server, bound to its port.

    Raises ConfigError if it cannot be bound, or if the access keys cannot be read.
    """
    keys = keys_in(settings.prometheus_key_env, setting="metrics.prometheus_key_env")
    return MetricsServer(registry, settings.prometheus_address, settings.prometheus_port, keys)


class PrometheusSink:
    """Serves a run's metrics over HTTP until ``close``.

    config: the resolved configuration as plain values, with ``total_steps``.
    earlier: the rows of metrics.jsonl up to a resumed run's checkpoint, with which the counters
        begin.

    Raises ConfigError if the environment variable for access keys holds no key, and for an address
    or a port that cannot be listened on.
    """

    def __init__(
        self,
        run_dir: pathlib.Path,
        settings: MetricsConfig,
        config: Mapping[str, object],
        earlier: Iterable[Mapping[str, object]],
    ) -> None:
        self._values = RunValues(Names.of(config), config["total_steps"])
        for row in earlier:
            self._values.add(row)
        self._collector = RunCollector(self._values, run_dir.resolve().name)
        self._server = server_of(settings, registry_of(self._collector))
        self._server.start()
        self.url = self._server.url
        asks = settings.prometheus_key_env is not None
        log.info("metrics for Prometheus: %s%s", self.url, ", to clients with a key" if asks else "")

    def measured(self, stage: str, started_s: float, seconds: float) -> None:
        """Count the duration of a checkpoint or an export, which no row of metrics holds; ignore other stages."""
        self._values.add_interval(stage, seconds)

    def write(self, step: int, scalars: Mapping[str, float], row: Mapping[str, object]) -> None:
        """Add the values of a step's metrics; where the row has a text such as "nan", ``scalars`` has the float."""
        self._values.add({**row, **scalars}, at=time.time())

    def show(self, step: int, source: str, completions: Sequence[Completion]) -> None:
        """Do nothing: Prometheus gets numbers alone, not completions."""

    def follow(self, live: ReadLive) -> None:
        """Call ``live`` for the run's current values at each request from now on."""
        self._collector.live = live

    def close(self, files: Sequence[pathlib.Path], *, failed: bool) -> None:
        """Stop the server and free its port."""
        self._server.close()
