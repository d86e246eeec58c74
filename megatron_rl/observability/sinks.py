"""The places that metrics and completions go to beside the run's own files: TensorBoard, Weights & Biases, MLflow,
an OpenTelemetry collector.

A run that goes on from a checkpoint continues the same W&B and MLflow run, whose ids tracking.json in its folder keeps.
Steps that it takes again are not sent again: they repeat to the bit.
"""

from __future__ import annotations

import concurrent.futures
import json
import logging
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from megatron_rl.config import MetricsConfig
from megatron_rl.distributed.atomic_file import replace_text
from megatron_rl.errors import ConfigError
from megatron_rl.json_text import read_object
from megatron_rl.observability.completions import TRAIN, Completion, as_text, visible

log = logging.getLogger(__name__)

IDS_FILE = "tracking.json"
MLFLOW_CLOSE_S = 60.0  # for what is still on its way to MLflow when the run ends
_MLFLOW_PARAMS_PER_CALL = 100  # MLflow's limit
_MLFLOW_PARAM_CHARS = 500  # the least of its releases' limits


class Sink(Protocol):
    """A place that a run's metrics go to. Steps rise."""

    def write(self, step: int, scalars: Mapping[str, float], row: Mapping[str, object]) -> None:
        """Send one step. ``row``: as in metrics.jsonl."""

    def show(self, step: int, source: str, completions: Sequence[Completion]) -> None:
        """Send the completions of one source."""

    def close(self, files: Sequence[pathlib.Path], *, failed: bool) -> None:
        """Send the rest and end. ``files``: the run's own, those that exist; ``failed``: the run raised an error."""


@runtime_checkable
class TimedSink(Sink, Protocol):
    """A place that the intervals of the step's timer go to as well."""

    def measured(self, stage: str, started_s: float, seconds: float) -> None:
        """Take an interval (StepTimer.heard); those of a step come before its ``write``."""


def set_aside(path: pathlib.Path) -> None:
    """Rename an earlier run's ``path`` to the first free ``path.1``, ``path.2``, ..., and log a warning."""
    number = 1
    while (kept := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(kept)
    log.warning("%s is from an earlier run: kept as %s", path.name, kept.name)


def open_sinks(
    run_dir: pathlib.Path, settings: MetricsConfig, config: Mapping[str, object], *, last_step: int | None
) -> list[Sink]:
    """Open the configured sinks.

    config: the resolved configuration, as plain values.
    last_step: the last step in the checkpoint from which the run resumes, −1 for none; None where it does not resume.

    Raises ConfigError for a sink that cannot be imported or does not start.
    """
    ids_path = run_dir / IDS_FILE
    ids = read_object(ids_path) if last_step is not None and ids_path.exists() else {}
    sinks: list[Sink] = []
    if settings.wandb_project:
        sinks.append(wandb := WandbSink(run_dir, settings.wandb_project, config, ids.get("wandb")))
        ids["wandb"] = wandb.run_id
    if settings.mlflow_experiment:
        sinks.append(mlflow := MlflowSink(run_dir, settings.mlflow_experiment, config, ids.get("mlflow")))
        ids["mlflow"] = mlflow.run_id
    if settings.wandb_project or settings.mlflow_experiment:
        replace_text(ids_path, json.dumps(ids, indent=1) + "\n")
    if settings.otel:
        sinks.append(_open_spans(run_dir, settings.otel_endpoint))
    if settings.tensorboard:
        sinks.append(TensorBoardSink(run_dir, config, last_step))
    return sinks


def _open_spans(run_dir: pathlib.Path, endpoint: str | None) -> TimedSink:
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
        raise ConfigError(
            f"metrics.otel=true: OpenTelemetry does not start: {_one_line(error)}; correct metrics.otel_endpoint or "
            "the variables OTEL_*, or turn it off"
        ) from error


class TensorBoardSink:
    """Writes event files under ``tensorboard/`` in the run's folder; an earlier run's folder is renamed.

    last_step: later points in the event files are hidden; None where the run does not resume.
    """

    def __init__(self, run_dir: pathlib.Path, config: Mapping[str, object], last_step: int | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "metrics.tensorboard=true and tensorboard cannot be imported; pip install tensorboard, or turn it off"
            ) from error
        folder = run_dir / "tensorboard"
        if last_step is None and folder.exists():
            set_aside(folder)
        self._writer = SummaryWriter(log_dir=str(folder), purge_step=None if last_step is None else last_step + 1)
        if config:
            text = visible(json.dumps(config, indent=1, ensure_ascii=False))
            self._writer.add_text("config", _as_code(text), max(0, last_step or 0))

    def write(self, step: int, scalars: Mapping[str, float], row: Mapping[str, object]) -> None:
        for key, value in scalars.items():
            self._writer.add_scalar(key, value, step)

    def show(self, step: int, source: str, completions: Sequence[Completion]) -> None:
        text = "\n\n".join(as_text(completion) for completion in completions)
        self._writer.add_text(f"completions/{source}", _as_code(text), step)

    def close(self, files: Sequence[pathlib.Path], *, failed: bool) -> None:
        self._writer.close()


def _as_code(text: str) -> str:
    """Return Markdown that shows text as it is: an indented block, which no text inside can end."""
    return "\n".join(f"    {line}" for line in text.split("\n"))


class WandbSink:
    """Sends metrics, tables of completions and the resolved configuration to one Weights & Biases run.

    run_id: of the run to continue; None: a new one. Login, entity and WANDB_MODE=offline are W&B's own settings.
    """

    def __init__(self, run_dir: pathlib.Path, project: str, config: Mapping[str, object], run_id: str | None) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"metrics.wandb_project={project!r} and wandb cannot be imported; pip install wandb, or set it to null"
            ) from error
        try:
            self._run = wandb.init(
                project=project,
                dir=str(run_dir),
                name=run_dir.resolve().name,
                id=run_id,
                resume="allow" if run_id else None,
                config=dict(config),
                allow_val_change=True,
            )
        except wandb.Error as error:
            again = f", delete {IDS_FILE} to begin another W&B run" if run_id else ""
            raise ConfigError(
                f"metrics.wandb_project={project!r}: W&B does not start: {_one_line(error)}; log in (wandb login), set "
                f"WANDB_MODE=offline{again}, or set it to null"
            ) from error
        self._table, self._teardown = wandb.Table, wandb.teardown
        self.run_id: str = self._run.id
        self._first_step: int = self._run.step  # of the steps that W&B has not got

    def write(self, step: int, scalars: Mapping[str, float], row: Mapping[str, object]) -> None:
        if step >= self._first_step:
            self._run.log({**scalars, "phase": row["phase"], "step_kind": row["step_kind"]}, step=step)

    def show(self, step: int, source: str, completions: Sequence[Completion]) -> None:
        if step < self._first_step:
            return
        texts = ("prompt", "response", "answer")
        columns = ["sample", *texts, "reward", "advantage", "finish_reason", "response_tokens", *completions[0].rewards]
        rows = [
            [
                c.sample,
                *(visible(getattr(c, name) or "") for name in texts),
                *(c.reward, c.advantage, c.finish_reason, c.response_tokens),
                *c.rewards.values(),
            ]
            for c in completions
        ]
        table = self._table(columns=columns, data=rows, allow_mixed_types=True)
        self._run.log({f"completions/{source}": table}, step=step)

    def close(self, files: Sequence[pathlib.Path], *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
        self._teardown()  # waits for W&B's process, which writes its file a moment after finish() has returned


class MlflowSink:
    """Sends metrics, the resolved configuration and, at the end, the run's files to one MLflow run.

    run_id: of the run to continue; None: a new one. The server is MLflow's own setting (MLFLOW_TRACKING_URI).

    A thread sends what the loop hands it. What MLflow does not take is said once in the log, and the run goes on:
    metrics.jsonl has it all.
    """

    def __init__(
        self, run_dir: pathlib.Path, experiment: str, config: Mapping[str, object], run_id: str | None
    ) -> None:
        try:
            import mlflow
            from mlflow.entities import Metric, Param
        except ImportError as error:
            raise ConfigError(
                f"metrics.mlflow_experiment={experiment!r} and mlflow cannot be imported; pip install mlflow, or set "
                "it to null"
            ) from error
        self._metric, self._first_step, self._warned = Metric, 0, False
        try:
            self._client = mlflow.MlflowClient()
            found = self._client.get_experiment_by_name(experiment)
            number = found.experiment_id if found else self._client.create_experiment(experiment)
            if run_id is None:
                self.run_id: str = self._client.create_run(number, run_name=run_dir.resolve().name).info.run_id
                params = [Param(key, text[:_MLFLOW_PARAM_CHARS]) for key, text in _flat(config)]
                for first in range(0, len(params), _MLFLOW_PARAMS_PER_CALL):
                    self._client.log_batch(self.run_id, params=params[first : first + _MLFLOW_PARAMS_PER_CALL])
            else:
                self.run_id = run_id
                self._client.update_run(run_id, status="RUNNING")
                sent = self._client.get_metric_history(run_id, "train/applied")  # every row has it
                self._first_step = 1 + max((metric.step for metric in sent), default=-1)
        except mlflow.MlflowException as error:
            again = f", delete {IDS_FILE} to begin another MLflow run" if run_id else ""
            raise ConfigError(
                f"metrics.mlflow_experiment={experiment!r}: MLflow does not start: {_one_line(error)}; set "
                f"MLFLOW_TRACKING_URI to a server that runs{again}, or set it to null"
            ) from error
        self._sender = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="mlflow")
        self._sent: list[concurrent.futures.Future] = []

    def write(self, step: int, scalars: Mapping[str, float], row: Mapping[str, object]) -> None:
        if step < self._first_step:
            return
        now_ms = int(time.time() * 1000)
        # a key holds letters, digits and _-. :/ alone
        metrics = [self._metric(key.replace("@", "_at_"), value, now_ms, step) for key, value in scalars.items()]
        self._send(self._client.log_batch, self.run_id, metrics)

    def show(self, step: int, source: str, completions: Sequence[Completion]) -> None:
        if step >= self._first_step and source != TRAIN:  # completions.jsonl follows when the run ends
            text = "\n\n".join(as_text(completion) for completion in completions) + "\n"
            self._send(self._client.log_text, self.run_id, text, f"completions/{source}/step_{step:08d}.txt")

    def close(self, files: Sequence[pathlib.Path], *, failed: bool) -> None:
        for path in files:
            self._send(self._client.log_artifact, self.run_id, str(path))
        self._send(self._client.set_terminated, self.run_id, "FAILED" if failed else "FINISHED")
        waiting = concurrent.futures.wait(self._sent, MLFLOW_CLOSE_S).not_done
        self._sender.shutdown(wait=False, cancel_futures=True)
        self._note_failures()
        if waiting:
            log.warning("MLflow did not take the last %d calls within %g s: not sent", len(waiting), MLFLOW_CLOSE_S)

    def _send(self, call, *arguments: object) -> None:
        self._note_failures()
        self._sent.append(self._sender.submit(call, *arguments))

    def _note_failures(self) -> None:
        ended = [future for future in self._sent if future.done()]
        self._sent = [future for future in self._sent if not future.done()]
        errors = [error for future in ended if not future.cancelled() and (error := future.exception())]
        if errors and not self._warned:
            self._warned = True
            log.warning("MLflow did not take a call, and the run goes on without it: %.300s", errors[0])


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]


def _flat(config: Mapping[str, object], prefix: str = "") -> list[tuple[str, str]]:
    """Return (section.key, value as text) of every setting."""
    pairs = []
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            pairs += _flat(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)))
    return pairs
