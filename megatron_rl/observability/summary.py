"""The headline figures of a run, computed from its rows of metrics, and the names of its phases."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_rl.observability.metrics import Row
from megatron_rl.types import StepKind

WARMUP, SFT, PREFERENCE, RL = "warmup", "sft", "preference", "rl"
SUPERVISED = frozenset({WARMUP, SFT, PREFERENCE})
TITLES = {WARMUP: "supervised start", SFT: "SFT", PREFERENCE: "preference", RL: "RL"}
COUNTED = {"skip/tokens_executed", "skip/tokens_dense"}
HELD_OUT = {  # the table's words for metrics of held-out rows
    "held-out supervised loss": "sft/eval_loss",
    "held-out pairs, loss": "preference/eval_loss",
    "held-out pairs, accuracy": "preference/eval_accuracy",
}


def is_supervised(row: Row) -> bool:
    return row["phase"] in SUPERVISED


def title(phase: str) -> str:
    """Return the name of a phase as a page or table shows it; an unknown phase is returned unchanged."""
    return TITLES.get(phase, phase)


def split_start(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return two lists of rows: the supervised steps before RL, and all other steps.

    In a run of supervised steps alone, the first list is empty.

    Example: three rows of the phases ``warmup``, ``warmup``, ``rl`` give two rows and one; two rows of
    ``sft`` give none and two.
    """
    own = [row for row in rows if not is_supervised(row)]
    return ([row for row in rows if is_supervised(row)], own) if own else ([], list(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Holds a run's headline figures; None for a metric that the run lacks.

    The figures are taken over the run's main steps: the steps after a supervised start, or all
    steps of a run that is only supervised.

    window: the number of steps in a mean over the first or last steps: 10, or half of the main steps
        if these are fewer than 20.
    supervised_phase: the phase of a run that is only supervised; None for other runs.
    num_real, num_ghost: the number of main steps of the kind REAL, in which a sample has a gradient,
        and the number of all others.
    num_warmup: the number of supervised steps before RL.
    reward, reverse_kl, zero_advantage_ratio: (mean over the first ``window`` steps, mean over the
        last).
    loss, accuracy: the same two means, of a supervised run's loss and of the share of preference
        pairs that it ranks right.
    tokens_per_second: the median over a supervised run's steps.
    tokens_executed, tokens_dense: the tokens that ran, and those of a run that drops no sample,
        summed over the steps that report both.
    step_s: the median seconds of a step.
    total_s: the seconds of all steps, a supervised start included.
    evaluations: {"<set> mean@k": ((step, value) of the first evaluation, the same of the last)}.
    evaluation_errors: {"<set> mean@k": {step: standard error}}.
    truncated_share: the share of samples that were cut off at the limit of tokens, as a mean over the
        last ``window`` steps.
    reward_errors: the number of samples whose reward failed, over all rollouts.
    reward_error_share: the share of scored samples whose reward failed, as a mean over the last
        ``window`` steps.
    held_out: {name in HELD_OUT: ((step, value) of the first evaluation, the same of the last)}, of
        losses and accuracies on held-out rows of the data.
    """

    window: int
    supervised_phase: str | None
    num_real: int
    num_ghost: int
    num_warmup: int
    reward: tuple[float, float] | None
    reverse_kl: tuple[float, float] | None
    loss: tuple[float, float] | None
    accuracy: tuple[float, float] | None
    tokens_per_second: float | None
    zero_advantage_ratio: tuple[float, float] | None
    tokens_executed: int | None
    tokens_dense: int | None
    step_s: float | None
    total_s: float | None
    evaluations: Mapping[str, tuple[tuple[int, float], tuple[int, float]]] = field(default_factory=dict)
    evaluation_errors: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    truncated_share: float | None = None
    reward_errors: int = 0
    reward_error_share: float | None = None
    held_out: Mapping[str, tuple[tuple[int, float], tuple[int, float]]] = field(default_factory=dict)

    @property
    def steps(self) -> str:
        """Return the numbers of steps by kind as text: ``798 REAL, 2 GHOST, 140 warm-up``, or ``80 SFT``."""
        if self.supervised_phase is not None:
            ghosts = f", {self.num_ghost} GHOST" if self.num_ghost else ""
            return f"{self.num_real} {title(self.supervised_phase)}{ghosts}"
        warmup = f", {self.num_warmup} warm-up" if self.num_warmup else ""
        return f"{self.num_real} REAL, {self.num_ghost} GHOST{warmup}"

    @property
    def executed_ratio(self) -> float | None:
        """Return the number of tokens that ran, divided by that of a run that drops no sample; None if not known."""
        return self.tokens_executed / self.tokens_dense if self.tokens_dense else None


def _finite(rows: Sequence[Row], key: str) -> list[float]:
    return [row[key] for row in rows if key in row and math.isfinite(row[key])]


def eval_points(rows: Sequence[Row]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return {evaluation set: {metric (mean@k, pass@k): [(step, value)]}}, in the order of steps.

    A metric ``..._before`` was measured before its row's step, so it counts for the previous step.
    """
    points_of: dict[str, dict[tuple[str, int], list[tuple[int, float]]]] = {}
    for row in rows:
        for key, value in row.items():
            if match := re.fullmatch(r"eval/(.+)/(mean|pass)@(\d+)(_before)?", key):
                name, kind, k, before = match.groups()
                points = points_of.setdefault(name, {}).setdefault((kind, int(k)), [])
                points.append((row["step"] - (before is not None), value))
    return {
        name: {f"{kind}@{k}": sorted(points) for (kind, k), points in sorted(metrics.items())}
        for name, metrics in sorted(points_of.items())
    }


def eval_errors(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Return {"<set> mean@k": {step: standard error}}, with steps counted as in ``eval_points``."""
    errors_of: dict[str, dict[int, float]] = {}
    for row in rows:
        for key, value in row.items():
            if match := re.fullmatch(r"eval/(.+)/(mean@\d+)_se(_before)?", key):
                name, metric, before = match.groups()
                errors_of.setdefault(f"{name} {metric}", {})[row["step"] - (before is not None)] = value
    return errors_of


def held_out_points(rows: Sequence[Row], metric: str) -> list[tuple[int, float]]:
    """Return (step, value) of each evaluation of held-out rows.

    A metric ``..._before`` was measured before its row's step, so it counts for the previous step.
    """
    return [
        (row["step"] - before, row[key])
        for row in rows
        for before, key in ((1, f"{metric}_before"), (0, metric))
        if key in row
    ]


def summarize(rows: Sequence[Row]) -> RunSummary:
    """Return the headline figures of a run, given all rows of its metrics.jsonl."""
    start, trained = split_start(rows)
    supervised = bool(trained) and is_supervised(trained[0])
    window = min(10, max(1, len(trained) // 2))

    def ends(key: str) -> tuple[float, float] | None:
        values = _finite(trained, key)
        return (statistics.fmean(values[:window]), statistics.fmean(values[-window:])) if values else None

    # Among supervised steps, only pairs beyond the hinge loss's margin have no signal: a share of 0 tells nothing.
    has_silent = not supervised or any(_finite(trained, "skip/zero_advantage_ratio"))
    counted = [row for row in trained if row.keys() >= COUNTED]
    step_times, all_times = _finite(trained, "time/step_s"), _finite(rows, "time/step_s")
    rates = _finite(trained, "perf/tokens_per_second")
    num_ghost = sum(row["step_kind"] != StepKind.REAL.value for row in trained)
    return RunSummary(
        window=window,
        supervised_phase=trained[-1]["phase"] if supervised else None,
        num_real=len(trained) - num_ghost,
        num_ghost=num_ghost,
        num_warmup=len(start),
        reward=ends("reward/mean"),
        reverse_kl=ends("distillation/reverse_kl"),
        loss=ends("train/loss") if supervised else None,
        accuracy=ends("preference/accuracy"),
        tokens_per_second=statistics.median(rates) if rates else None,
        zero_advantage_ratio=ends("skip/zero_advantage_ratio") if has_silent else None,
        tokens_executed=sum(row["skip/tokens_executed"] for row in counted) if counted else None,
        tokens_dense=sum(row["skip/tokens_dense"] for row in counted) if counted else None,
        step_s=statistics.median(step_times) if step_times else None,
        total_s=math.fsum(all_times) if all_times else None,
        evaluations={
            f"{name} {metric}": (points[0], points[-1])
            for name, metrics in eval_points(rows).items()
            for metric, points in metrics.items()
            if metric.startswith("mean@")
        },
        evaluation_errors=eval_errors(rows),
        held_out={
            name: (points[0], points[-1])
            for name, metric in HELD_OUT.items()
            if (points := held_out_points(rows, metric))
        },
        reward_errors=int(sum(_finite(trained, "reward/errors"))),
        reward_error_share=share[1] if (share := ends("reward/error_share")) else None,
        truncated_share=truncated[1] if (truncated := ends("rollout/truncated_share")) else None,
    )


def duration(seconds: float) -> str:
    """Return seconds as short text: ``4.2 s``, ``3 min 05 s`` or ``2 h 07 min``."""
    if seconds < 60:
        return f"{seconds:.3g} s" if seconds < 59.5 else "1 min 00 s"
    whole = round(seconds)
    return (
        f"{whole // 60} min {whole % 60:02d} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    )
