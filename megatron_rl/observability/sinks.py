"""The sinks, which receive a run's metrics and completions beside the run's own files.

They are TensorBoard, Weights & Biases, MLflow, an OpenTelemetry collector, and Prometheus. A
resumed run continues the same W&B and MLflow runs, whose ids are kept in tracking.json in the run's
folder. If a resumed run repeats steps, they are not sent again, since they are equal to the bit.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from megatron_rl.config import MetricsConfig
from megatron_rl.distributed.atomic_file import replace_text
from megatron_rl.errors import ConfigError
from megatron_rl.json_text import read_object
from megatron_rl.observability.completions import Completion
from megatron_rl.observability.prometheus.live import ReadLive

if TYPE_CHECKING:  # the extra `prometheus`, which only a run that serves its metrics needs
    from megatron_rl.observability.prometheus.sink import PrometheusSink

IDS_FILE = "tracking.json"


class Sink(Protocol):
    """Receives a run's metrics, completions and stage times. Steps arrive in rising order."""

    def measured(self, stage: str, started_s: float, seconds: float) -> None:
        """Receive one interval of the step's timer; all intervals of a step come before ``write`` for the step.

        stage: the name of the timed part of the step, such as "update".
        started_s: the interval's start by ``time.perf_counter``.
        seconds: the interval's length.
        """

    def write(self, step: int, scalars: Mapping[str, float], row: Mapping[str, object]) -> None:
        """Receive the metrics of one step.

        scalars: its metrics as floats.
        row: the row as it is in metrics.jsonl.
        """

    def show(self, step: int, source: str, completions: Sequence[Completion]) -> None:
        """Receive completions of one source ("train" or an evaluation); ``write`` for ``step`` comes before.

        They were sampled after the previous step's row.
        """

    def follow(self, live: ReadLive) -> None:
        """Receive a function that returns the run's current values, for a sink that answers requests between steps.

        A later call replaces the function.
        """

    def close(self, files: Sequence[pathlib.Path], *, failed: bool) -> None:
        """Send what is left and stop.

        files: the run's files that exist.
        failed: whether the run ended with an error.
        """


def open_sinks(
    run_dir: pathlib.Path,
    settings: MetricsConfig,
    config: Mapping[str, object],
    *,
    last_step: int | None,
    read_earlier: Callable[[], Iterable[Mapping[str, object]]] = tuple,
) -> list[Sink]:
    """Return the configured sinks, started.

    config: the resolved configuration, as plain values.
    last_step: the last step in the checkpoint from which the run resumes, −1 if it has none; None
        if the run does not resume.
    read_earlier: a function that returns the rows of metrics.jsonl up to that step.

    Raises ConfigError for a sink that cannot be imported or does not start.
    """
    with contextlib.ExitStack() as opened:
        exporter = None
        if settings.prometheus_port is not None:  # first, so that a taken port starts no run elsewhere
            exporter = _open_exporter(run_dir, settings, config, read_earlier())
            opened.callback(exporter.close, (), failed=True)
        sinks = _open_services(run_dir, settings, config, last_step)
        opened.pop_all()
    return sinks if exporter is None else [*sinks, exporter]  # closed last, so that the run's end can be scraped too


def _open_services(
    run_dir: pathlib.Path, settings: MetricsConfig, config: Mapping[str, object], last_step: int | None
) -> list[Sink]:
    """Return the configured sinks other than Prometheus's; ``open_sinks`` describes arguments and errors."""
    ids_path = run_dir / IDS_FILE
    ids = read_object(ids_path) if last_step is not None and ids_path.exists() else {}
    sinks: list[Sink] = []
    if settings.wandb_project:
        from megatron_rl.observability.wandb_sink import WandbSink

        sinks.append(wandb := WandbSink(run_dir, settings.wandb_project, config, ids.get("wandb")))
        ids["wandb"] = wandb.run_id
    if settings.mlflow_experiment:
        from megatron_rl.observability.mlflow_sink import MlflowSink

        sinks.append(mlflow := MlflowSink(run_dir, settings.mlflow_experiment, config, ids.get("mlflow")))
        ids["mlflow"] = mlflow.run_id
    if settings.wandb_project or settings.mlflow_experiment:
        replace_text(ids_path, json.dumps(ids, indent=1) + "\n")
    if settings.otel:
        sinks.append(_open_spans(run_dir, settings.otel_endpoint))
    if settings.tensorboard:
        from megatron_rl.observability.tensorboard_sink import TensorBoardSink

        sinks.append(TensorBoardSink(run_dir, config, last_step))
    return sinks


def _open_spans(run_dir: pathlib.Path, endpoint: str | None) -> Sink:
    """Return the sink of spans for OpenTelemetry; its module needs the extra `otel`.

    Raises ConfigError if the extra is missing or a setting is wrong.
    """
    try:
        from megatron_rl.observability.spans import SpanSink
    except ImportError as error:
        raise ConfigError(
            'metrics.otel=true and opentelemetry cannot be imported; pip install "megatron_rl[otel]", or turn it off'
        ) from error
    try:
        return SpanSink(run_dir.resolve().name, endpoint)
    except (ValueError, OSError) as error:
        reason = " ".join(str(error).split())[:400]
        raise ConfigError(
            f"metrics.otel=true: OpenTelemetry does not start: {reason}; correct metrics.otel_endpoint or "
            "the variables OTEL_*, or turn it off"
        ) from error


def _open_exporter(
    run_dir: pathlib.Path,
    settings: MetricsConfig,
    config: Mapping[str, object],
    earlier: Iterable[Mapping[str, object]],
) -> PrometheusSink:
    """Return the sink that Prometheus reads; its modules need the extra `prometheus`.

    earlier: the rows of metrics.jsonl up to a resumed run's checkpoint.
    """
    require_prometheus(settings.prometheus_port)
    from megatron_rl.observability.prometheus.sink import PrometheusSink

    return PrometheusSink(run_dir, settings, config, earlier)


def require_prometheus(port: int) -> None:
    """Raise ConfigError if the package prometheus_client is not installed.

    port: the configured port, for the message.
    """
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError(
            f"metrics.prometheus_port={port} and prometheus_client cannot be imported; pip install "
            '"megatron_rl[prometheus]", or set it to null'
        )
