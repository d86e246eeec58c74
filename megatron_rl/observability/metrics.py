"""The metrics of an optimizer step: computed from its sums, written to metrics.jsonl, and read back.

A step's sums are first reduced over all ranks, and only then divided here. So no metric is a mean
of means.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import numbers
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, NoReturn, TextIO

import numpy as np

from megatron_rl.config import MetricsConfig
from megatron_rl.distributed.atomic_file import set_aside
from megatron_rl.errors import RunError
from megatron_rl.json_text import open_regular
from megatron_rl.observability import completions
from megatron_rl.observability.completions import Completion
from megatron_rl.planning.tokens import read_tokens, tokens_of
from megatron_rl.types import BatchFacts, StepKind, StepPlan, StepResult

if TYPE_CHECKING:  # only a run that sends its metrics elsewhere needs it
    from megatron_rl.observability.prometheus.live import ReadLive
    from megatron_rl.observability.sinks import Sink

log = logging.getLogger(__name__)

Row = dict[str, object]

METRICS_FILE = "metrics.jsonl"
ROW_KEYS = ("step", "step_kind", "phase")
MAXIMA = frozenset({"logprob_gap_max"})  # reduced by max; every other sum is reduced by addition
_PER_TOKEN = {
    "entropy": "train/entropy",
    "kl": "train/kl",
    "clipped": "train/clip_ratio",
    "ratio": "train/ratio",
    "logprob_gap_abs": "train/logprob_gap_mean",
    "logprob_gap_k3": "train/logprob_gap_k3",
}
GAPS = ("logprob_gap_abs", "logprob_gap_k3", "logprob_gap_max")  # of a pass, or of a step without a pass before it
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def add_sums(*parts: Mapping[str, float]) -> dict[str, float]:
    """Return {name: sum over the given ranks or micro-batches}; for a name in MAXIMA, the largest value instead."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in total:
                total[name] = value
            else:
                total[name] = max(total[name], value) if name in MAXIMA else total[name] + value
    return total


def divide(sums: Mapping[str, float]) -> dict[str, float]:
    """Return a step's ``train/*`` metrics: its reduced sums divided by its number of loss tokens.

    ``loss`` is not divided: its tokens are already weighted. The other metrics are means per token,
    in nats or as a fraction, except the maximum ``logprob_gap_max``. A sum that is absent gives no
    metric. If ``tokens`` is 0, only the loss is returned. Raises ValueError if there are sums to
    divide and no ``tokens``.

    Example: ``divide({"loss": 0.32, "tokens": 1000, "clipped": 50})`` is ``{"train/loss": 0.32,
    "train/clip_ratio": 0.05}``.
    """
    metrics = {"train/loss": float(sums["loss"])} if "loss" in sums else {}
    measured = [name for name in (*_PER_TOKEN, *MAXIMA) if name in sums]
    if measured and "tokens" not in sums:
        raise ValueError(
            f"the step's sums hold {measured[0]} and no tokens, so there is nothing to divide by; add sums['tokens']"
        )
    if not measured or sums["tokens"] == 0:
        return metrics
    for name in measured:
        if name in MAXIMA:
            metrics[f"train/{name}"] = float(sums[name])
        else:
            metrics[_PER_TOKEN[name]] = float(sums[name]) / float(sums["tokens"])
    return metrics


def step_metrics(result: StepResult) -> dict[str, float]:
    """Return the ``train/*`` metrics of one optimizer step.

    Most are means per loss token: ``divide`` makes them from the step's sums. Others are the
    gradient norm, the learning rate, and ``train/applied``, which is 0 if the step moved no weight.
    """
    replayed = result.sums.get("replayed", 0.0)
    return {
        **divide({name: value for name, value in result.sums.items() if name not in GAPS}),
        **({"train/rerouted_token_share": result.sums["rerouted"] / replayed} if replayed else {}),
        "train/grad_norm": float(result.grad_norm),
        "train/lr": float(result.learning_rate),
        "train/applied": float(result.applied),
    }


def skip_metrics(
    mini_batch: StepPlan, facts: BatchFacts, signal_S: np.ndarray, *, share_prompts: bool = False
) -> dict[str, float]:
    """Return what dropping samples saved in one optimizer step, as ``skip/*`` and ``tokens/*`` metrics.

    A sample has no signal if its advantage counts as 0. Such samples are dropped, unless a setting
    keeps them.

    signal_S: [S] bool, True for each sample of the batch that has signal.
    share_prompts: whether a micro-batch runs a prompt once for all of its samples.

    A sample's tokens here are its prompt and its response before the last loss token, without pads.

    - ``skip/samples_dropped``: the samples that do not run, those of ``skip/samples_merged`` among them.
    - ``skip/samples_merged``: the samples with signal that do not run, since an equal one counts for
      them (algorithm/repeats.py).
    - ``skip/tokens_dense``: the tokens of all samples of the mini-batch.
    - ``skip/tokens_executed``: the tokens that run, those of fillers (samples of weight 0) included.
    - ``skip/speedup_ideal``: ``skip/tokens_dense`` divided by the tokens of the samples not dropped;
      left out for a step in which the policy runs no backward pass.
    - ``skip/zero_advantage_ratio``: the fraction of the mini-batch's samples that have no signal,
      whether dropped or kept.
    - ``tokens/trailing``: the response tokens from the last loss token on, over the samples that run.
    - ``tokens/shared``: the number of prompt tokens that ``share_prompts`` saved.
    """
    if signal_S.shape != (facts.num_samples,):
        raise ValueError(
            f"signal_S has shape {signal_S.shape} and the batch {facts.num_samples} samples; pass one boolean per "
            "sample"
        )
    tokens_S = facts.prompt_tokens + read_tokens(facts)
    members = mini_batch.members
    run = tokens_of(facts, share_prompts=share_prompts)
    executed = int(run.sums(mini_batch.order, mini_batch.microbatch_offsets)[0].sum())
    tokens_dense = int(tokens_S[members].sum())
    tokens_dropped = int(tokens_S[mini_batch.dropped].sum())
    metrics = {
        "skip/samples_dropped": len(mini_batch.dropped),
        "skip/samples_merged": int(signal_S[mini_batch.dropped].sum()) if mini_batch.kind is StepKind.REAL else 0,
        "skip/tokens_dropped": tokens_dropped,
        "skip/microbatches_dropped": int(mini_batch.microbatches_dropped),
        "skip/silent_ranks": mini_batch.silent_ranks,
        "skip/filler_microbatches": mini_batch.num_fillers,
        "skip/tokens_executed": executed,
        "skip/tokens_dense": tokens_dense,
    }
    metrics["tokens/trailing"] = int((facts.total_tokens - tokens_S)[mini_batch.order].sum())
    if share_prompts:
        metrics["tokens/shared"] = int(tokens_S[mini_batch.order].sum()) - executed
    if len(members):
        metrics["skip/zero_advantage_ratio"] = float(np.count_nonzero(~signal_S.astype(bool)[members]) / len(members))
    if mini_batch.kind is StepKind.REAL and tokens_dense > tokens_dropped:
        metrics["skip/speedup_ideal"] = tokens_dense / (tokens_dense - tokens_dropped)
    return metrics


def _plain(key: str, value: object) -> object:
    """Return a metrics row's value as strict JSON can hold it; a non-finite float becomes "nan", "inf" or "-inf".

    Raises TypeError for a value that is neither a number nor a text.
    """
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return value
    if isinstance(value, (bool, np.bool_)):
        return int(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else str(float(value))
    raise TypeError(
        f"metric {key}={value!r} is a {type(value).__name__}; pass a number or a string, and leave out what has no "
        "value"
    )


class MetricsWriter:
    """Writes one row per optimizer step to ``<run_dir>/metrics.jsonl``, and sampled completions to a file beside it.

    Both also go to the configured sinks, such as TensorBoard. On ranks with ``is_main`` False
    nothing is opened or written.

    resumed: the result of ``state`` in a checkpoint, if the run resumes from one; the files are
        then appended to. None for a new run, for which existing files are renamed.
    config: the resolved configuration as plain values, for sinks that show it.

    Raises ConfigError if a configured sink cannot be imported or does not start.
    """

    def __init__(
        self,
        run_dir: str | pathlib.Path,
        metrics_config: MetricsConfig,
        total_steps: int,
        is_main: bool,
        resumed: Mapping[str, int | None] | None = None,
        *,
        config: Mapping[str, object] | None = None,
    ) -> None:
        self._is_main, self._settings = is_main, metrics_config
        self._num_ghost_steps: int = resumed["ghost_steps"] if resumed else 0
        self._last_step: int | None = resumed["last_step"] if resumed else None
        self._file: TextIO | None = None
        self._sinks: list[Sink] = []
        self._run_dir = run_dir = pathlib.Path(run_dir)
        if not is_main:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        last_step = None if resumed is None else -1 if self._last_step is None else self._last_step
        values = {**(config or {}), "total_steps": total_steps}
        self._sinks = _open_sinks(run_dir, metrics_config, values, last_step)
        try:
            for name in (METRICS_FILE, completions.FILE_NAME, completions.ROLLOUTS_FOLDER):
                if (run_dir / name).exists() and not resumed:
                    set_aside(run_dir / name)
            self._file = (run_dir / METRICS_FILE).open("a" if resumed else "x", encoding="utf-8")
        except OSError:
            self.close(failed=True)
            raise

    def state(self) -> dict[str, int | None]:
        """Return the counters that a resumed run's writer needs, JSON-able and equal on every rank."""
        return {"ghost_steps": self._num_ghost_steps, "last_step": self._last_step}

    def write(self, row: Mapping[str, object], sampled: Sequence[Completion] = ()) -> Row:
        """Append one step; return the row as written.

        ``skip/ghost_steps`` is added to the row: the number of steps so far whose ``step_kind`` was not
        ``StepKind.REAL``.

        row: ``step`` (int, rising), ``step_kind`` (StepKind or its name), ``phase`` (text), and
            metrics by their names.
        sampled: completions that were sampled since the previous row.

        Raises ValueError for a missing key or a step that does not rise, TypeError for a value that
        is neither a number nor a text.
        """
        missing = [key for key in ROW_KEYS if key not in row]
        if missing:
            raise ValueError(f"a metrics row lacks {', '.join(missing)}; every row has {', '.join(ROW_KEYS)}")
        plain = {key: _plain(key, value) for key, value in row.items()}
        if self._last_step is not None and plain["step"] <= self._last_step:
            raise ValueError(
                f"metrics row with step={plain['step']} after step={self._last_step}; count steps once, over all phases"
            )
        self._last_step = plain["step"]
        self._num_ghost_steps += plain["step_kind"] != StepKind.REAL.value
        plain["skip/ghost_steps"] = self._num_ghost_steps
        if self._is_main:
            self._emit(plain)
            self._emit_completions([replace(completion, step=plain["step"]) for completion in sampled])
        return _revive(plain)

    def measured(self, stage: str, started_s: float, seconds: float) -> None:
        """Pass one interval of the step's timer to every sink; ``Sink.measured`` describes the arguments."""
        for sink in self._sinks:
            sink.measured(stage, started_s, seconds)

    def follow(self, live: ReadLive) -> None:
        """Pass ``live``, a function that returns the run's current values, to every sink (Sink.follow)."""
        for sink in self._sinks:
            sink.follow(live)

    def _emit(self, plain: Row) -> None:
        if self._file is None:
            raise ValueError(f"metrics row with step={plain['step']} after close(); write before the writer is closed")
        try:
            self._file.write(json.dumps(plain, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            self._fail(METRICS_FILE, error)
        scalars = {key: value for key, value in _revive(plain).items() if "/" in key and not isinstance(value, str)}
        for sink in self._sinks:
            sink.write(plain["step"], scalars, plain)

    def _emit_completions(self, sampled: Sequence[Completion]) -> None:
        if not sampled:
            return
        lines = "".join(json.dumps(completions.to_row(each), allow_nan=False) + "\n" for each in sampled)
        try:
            with (self._run_dir / completions.FILE_NAME).open("a", encoding="utf-8") as file:
                file.write(lines)
        except OSError as error:
            self._fail(completions.FILE_NAME, error)
        for source in dict.fromkeys(each.source for each in sampled):
            members = [each for each in sampled if each.source == source]
            for sink in self._sinks:
                sink.show(members[0].step, source, members)
            completions.print_some(members, every_rollouts=self._settings.print_completions_every_rollouts)

    def _fail(self, name: str, error: OSError) -> NoReturn:
        """Close metrics.jsonl and raise RunError: the file ``name`` of the run's folder cannot be written.

        If metrics.jsonl stayed open, closing it later would try again to write what was not written.
        """
        with contextlib.suppress(OSError):
            self._file.close()
        self._file = None
        raise RunError(
            f"{self._run_dir / name} cannot be written: {error.strerror}; make room there and start the same command "
            "again"
        ) from error

    def close(self, *, failed: bool = False) -> None:
        """Close the file and every sink; a second call does nothing.

        failed: whether the run ended with an error, which sinks report.
        """
        sinks, self._sinks = self._sinks, []
        names = ("config.yaml", METRICS_FILE, completions.FILE_NAME, "report.html")
        if self._file is not None:
            self._file.close()
            self._file = None
        for sink in sinks:
            sink.close([self._run_dir / name for name in names if (self._run_dir / name).exists()], failed=failed)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)


def _open_sinks(
    run_dir: pathlib.Path, settings: MetricsConfig, values: Mapping[str, object], last_step: int | None
) -> list[Sink]:
    named = settings.wandb_project or settings.mlflow_experiment or settings.prometheus_port is not None
    if not (settings.tensorboard or settings.otel or named):
        return []
    from megatron_rl.observability.sinks import open_sinks

    path = run_dir / METRICS_FILE

    def read_earlier() -> list[Row]:
        return read_metrics(path) if last_step is not None and path.exists() else []

    return open_sinks(run_dir, settings, values, last_step=last_step, read_earlier=read_earlier)


def _revive(plain: Mapping[str, object]) -> Row:
    return {k: _NON_FINITE[v] if "/" in k and isinstance(v, str) and v in _NON_FINITE else v for k, v in plain.items()}


def _parse_line(line: str) -> Row:
    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not JSON; write it as the string {json.dumps(constant.lower())}")

    row = json.loads(line, parse_constant=refuse)
    if not isinstance(row, dict):
        raise ValueError(f"a row is an object, and this is a {type(row).__name__}")
    missing = [key for key in ROW_KEYS if key not in row]
    if missing:
        raise ValueError(f"the row lacks {', '.join(missing)}")
    if not isinstance(row["step"], int):
        raise ValueError(f"step={row['step']!r} is not a whole number")
    revived = _revive(row)
    for key, value in revived.items():
        if "/" in key and not isinstance(value, (int, float)):
            raise ValueError(f"{key}={value!r} is not a number")
    return revived


def read_metrics(path: str | pathlib.Path) -> list[Row]:
    """Return the rows of a metrics.jsonl; metrics that are not finite are floats again.

    A malformed last line, which an interrupted write leaves, is left out with a warning in the log.

    Raises ValueError ``<file>:<line>: ...`` for any other malformed line.
    """
    path = pathlib.Path(path)
    with open_regular(path) as file:
        lines = file.read().decode("utf-8", "replace").split("\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = _parse_line(line)
            if rows and row["step"] <= rows[-1]["step"]:
                raise ValueError(
                    f"step={row['step']} after step={rows[-1]['step']}; a file holds the rising steps of one run"
                )
            rows.append(row)
        except ValueError as error:
            if number == len(lines):
                log.warning("%s:%d is cut off and was left out; the run was interrupted while writing it", path, number)
                break
            raise ValueError(f"{path}:{number}: {error}; correct or delete the line") from error
    return rows
