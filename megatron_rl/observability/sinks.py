"""The places that metrics and completions go to beside the run's own files: TensorBoard, Weights & Biases, MLflow,
an OpenTelemetry collector.

A run that goes on from a checkpoint continues the same W&B and MLflow run, whose ids tracking.json
in its folder keeps. Steps that it takes again are not sent again: they repeat to the bit.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Protocol

from megatron_rl.config import MetricsConfig
from megatron_rl.distributed.atomic_file import replace_text
from megatron_rl.errors import ConfigError
from megatron_rl.json_text import read_object
from megatron_rl.observability.completions import Completion

IDS_FILE = "tracking.json"


class Sink(Protocol):
    """A place that a run's metrics go to. Steps rise."""

    def measured(self, stage: str, started_s: float, seconds: float) -> None:
        """Take an interval of the step's timer (StepTimer.heard); those of a step come before its ``write``."""

    def write(self, step: int, scalars: Mapping[str, float], row: Mapping[str, object]) -> None:
        """Send one step. ``row``: as in metrics.jsonl."""

    def show(self, step: int, source: str, completions: Sequence[Completion]) -> None:
        """Send the completions of one source."""

    def close(self, files: Sequence[pathlib.Path], *, failed: bool) -> None:
        """Send the rest and end. ``files``: the run's own, those that exist; ``failed``: the run raised an error."""


def open_sinks(
    run_dir: pathlib.Path, settings: MetricsConfig, config: Mapping[str, object], *, last_step: int | None
) -> list[Sink]:
    """Open the configured sinks.

    config: the resolved configuration, as plain values.
    last_step: the last step in the checkpoint from which the run resumes, −1 for none; None where
        it does not resume.

    Raises ConfigError for a sink that cannot be imported or does not start.
    """
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
    """Open the sink of spans, whose module imports the packages of the extra `otel`."""
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
