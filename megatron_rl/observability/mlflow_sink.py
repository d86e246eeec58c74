"""The sink that sends a run's metrics, evaluation completions, configuration and files to MLflow."""

from __future__ import annotations

import concurrent.futures
import json
import logging
import pathlib
import time
from collections.abc import Mapping, Sequence

from megatron_rl.errors import ConfigError
from megatron_rl.observability.completions import TRAIN, Completion, as_text
from megatron_rl.observability.prometheus.live import ReadLive

log = logging.getLogger(__name__)
MLFLOW_CLOSE_S = 60.0  # for calls that are not yet sent to MLflow when the run ends
_MLFLOW_PARAMS_PER_CALL = 100  # MLflow's limit
_MLFLOW_PARAM_CHARS = 500  # the smallest limit among its releases


class MlflowSink:
    """Sends metrics, the resolved configuration and, at the end, the run's files to one MLflow run.

    experiment: the name of the MLflow experiment, which is created if needed.
    run_id: the MLflow run to continue; None for a new one. MLflow itself reads the server's address
        (MLFLOW_TRACKING_URI).

    A thread calls the server. If calls fail, only the first failure is logged, as a warning. The run
    goes on, since metrics.jsonl has every metric.
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
            known = self._client.get_experiment_by_name(experiment)
            number = known.experiment_id if known else self._client.create_experiment(experiment)
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
            reason = " ".join(str(error).split())[:400]
            again = ", delete tracking.json to begin another MLflow run" if run_id else ""
            raise ConfigError(
                f"metrics.mlflow_experiment={experiment!r}: MLflow does not start: {reason}; set "
                f"MLFLOW_TRACKING_URI to a server that runs{again}, or set it to null"
            ) from error
        self._sender = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="mlflow")
        self._sent: list[concurrent.futures.Future] = []

    def measured(self, stage: str, started_s: float, seconds: float) -> None:
        """Do nothing: ``write`` gets the seconds of a step's stages, as the metrics ``time/*``."""

    def write(self, step: int, scalars: Mapping[str, float], row: Mapping[str, object]) -> None:
        if step < self._first_step:
            return
        now_ms = int(time.time() * 1000)
        # a key may hold only letters, digits and _-. :/
        metrics = [self._metric(key.replace("@", "_at_"), value, now_ms, step) for key, value in scalars.items()]
        self._send(self._client.log_batch, self.run_id, metrics)

    def show(self, step: int, source: str, completions: Sequence[Completion]) -> None:
        if step >= self._first_step and source != TRAIN:  # completions.jsonl follows when the run ends
            text = "\n\n".join(as_text(completion) for completion in completions) + "\n"
            self._send(self._client.log_text, self.run_id, text, f"completions/{source}/step_{step:08d}.txt")

    def follow(self, live: ReadLive) -> None:
        """Do nothing: this sink sends no values between steps."""

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


def _flat(config: Mapping[str, object], prefix: str = "") -> list[tuple[str, str]]:
    """Return (``section.key``, value as text) of every setting of a nested configuration."""
    pairs = []
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            pairs += _flat(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)))
    return pairs
