"""The display of a run's progress: a live bar on a terminal, plain lines in a log, and a final table."""

from __future__ import annotations

import math
import pathlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as LiveBar
from rich.table import Table

from megatron_rl.observability.metrics import Row
from megatron_rl.observability.stall_warning import StallCounts, stall_counts
from megatron_rl.observability.summary import RunSummary, duration, is_supervised, summarize
from megatron_rl.types import StepKind

LINE_EVERY_S = 5.0
RECENT_STEPS = 20  # the ETA follows the pace of so many steps: responses grow and the skip's share changes during a run
HELD_OUT = ("sft/eval_loss", "preference/eval_loss")
# Metrics shown by their last value: a rollout's reward is only in its first mini-batch's row.
SHOWN = (
    *("reward/mean", "skip/zero_advantage_ratio", "time/step_s"),
    *("train/loss", "preference/accuracy", "train/lr", "perf/tokens_per_second"),
)


class ProgressBar:
    """Shows the progress of a run over its optimizer steps, supervised ones and RL's.

    total_steps: the number of steps that the run is to take.
    enabled: if False, nothing is printed.
    untrained_warning_steps: the final table warns if at least so many steps at the run's end (in a
        shorter run all its steps) trained nothing; None for no warning.
    done_steps: the number of steps that a resumed run took before its checkpoint.
    done_ghosts: how many of these trained nothing: ghosts, in which no sample had a gradient, and
        steps of a critic's warm-up.
    console: where to print, stdout by default. A terminal gets a live bar, anything else plain
        lines at most every 5 s.
    clock: a function that returns monotonic seconds.
    """

    def __init__(
        self,
        total_steps: int,
        enabled: bool,
        untrained_warning_steps: int | None = None,
        *,
        done_steps: int = 0,
        done_ghosts: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._untrained_warning_steps = untrained_warning_steps
        self._total_steps, self._enabled, self._clock = total_steps, enabled, clock
        self._console = console or Console()
        self._started_s = self._last_line_s = clock()
        self._recent_s = deque([self._started_s], maxlen=RECENT_STEPS + 1)
        self._num_steps = self._done_steps = done_steps
        self._num_ghosts = done_ghosts
        self._phase: object = None
        self._latest: dict[str, float] = {}
        self._bar: LiveBar | None = None
        if enabled and self._console.is_terminal:
            self._bar = LiveBar(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TextColumn("{task.fields[facts]}"),
                console=self._console,
                transient=False,
            )
            self._task = self._bar.add_task("start", total=total_steps, completed=done_steps, facts="")
            self._bar.start()

    def update(self, row: Mapping[str, object]) -> None:
        """Show one finished step.

        row: the step's row of metrics, as MetricsWriter.write returns it.
        """
        if not self._enabled:
            return
        now_s = self._clock()
        self._enter(row["phase"])
        self._num_steps += 1
        self._total_steps = max(self._total_steps, self._num_steps)  # train.epochs may take more steps than foreseen
        self._num_ghosts += row["step_kind"] not in (StepKind.REAL, StepKind.REAL.value)
        self._recent_s.append(now_s)
        self._latest |= {key: row[key] for key in SHOWN if key in row}
        for key in (*(f"{name}_before" for name in HELD_OUT), *HELD_OUT):
            if key in row:
                self._latest["held out"] = row[key]
        first = self._num_steps == self._done_steps + 1
        if self._bar is not None:
            self._bar.update(
                self._task,
                completed=self._num_steps,
                total=self._total_steps,
                description=str(row["phase"]),
                facts=" · ".join(self._facts(row)),
            )
        elif first or self._num_steps == self._total_steps or now_s - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = now_s
            line = " | ".join(
                [f"{row['phase']} step {row['step']} ({self._num_steps}/{self._total_steps})", *self._facts(row)]
            )
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _enter(self, phase: object) -> None:
        """Forget the shown values and the speed of the previous phase if ``phase`` is a new one."""
        if self._phase not in (None, phase):
            self._latest = {}
            self._recent_s = deque([self._recent_s[-1]], maxlen=RECENT_STEPS + 1)
        self._phase = phase

    def note(self, text: str) -> None:
        """Print one line, above the live bar if there is one. Any thread may call it."""
        if self._enabled:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _facts(self, row: Mapping[str, object]) -> list[str]:
        facts = supervised_facts(self._latest) if is_supervised(row) else rl_facts(self._latest)
        if self._num_ghosts or not is_supervised(row):
            facts.append(f"ghosts {self._num_ghosts}")
        if "time/step_s" in self._latest:
            facts.append(f"{self._latest['time/step_s']:.3g} s/step")
        pace_s = (self._recent_s[-1] - self._recent_s[0]) / max(1, len(self._recent_s) - 1)
        facts.append(f"ETA {duration(pace_s * (self._total_steps - self._num_steps))}")
        return facts

    def close(self) -> None:
        """Remove the live bar, so that it does not mix with a traceback; a second call does nothing."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def finish(self, rows: Sequence[Row], report_path: str | pathlib.Path | None) -> None:
        """Print the final table of the run and the path of its report.

        rows: all rows of the run's metrics.jsonl.
        report_path: the report's file; None if there is none.
        """
        self.close()
        if not self._enabled:
            return
        counts = stall_counts(rows)
        stall = counts if counts.is_worth_saying(self._untrained_warning_steps) else None
        table = summary_table(summarize(rows), self._clock() - self._started_s, stall, went_on=self._done_steps > 0)
        self._console.print(table)
        if report_path is not None:
            self._console.print(f"report: {report_path}", markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def rl_facts(latest: Mapping[str, float]) -> list[str]:
    """Return the texts that a progress line of an RL step shows, such as "reward 0.512".

    latest: the last value of each metric.
    """
    facts = []
    if "reward/mean" in latest:
        facts.append(f"reward {latest['reward/mean']:.3f}")
    if "skip/zero_advantage_ratio" in latest:
        facts.append(f"zero-adv {100 * latest['skip/zero_advantage_ratio']:.0f} %")
    return facts


def supervised_facts(latest: Mapping[str, float]) -> list[str]:
    """Return the texts that a progress line of a supervised step shows, such as "loss 1.2".

    latest: the last value of each metric.
    """
    facts = []
    if "train/loss" in latest:
        facts.append(f"loss {latest['train/loss']:.4g}")
    if "held out" in latest:
        facts.append(f"held out {latest['held out']:.4g}")
    if "preference/accuracy" in latest:
        facts.append(f"pairs right {100 * latest['preference/accuracy']:.0f} %")
    if latest.get("skip/zero_advantage_ratio"):  # responses of pairs beyond the hinge loss's margin
        facts.append(f"no signal {100 * latest['skip/zero_advantage_ratio']:.0f} %")
    if "train/lr" in latest:
        facts.append(f"lr {latest['train/lr']:.3g}")
    if "perf/tokens_per_second" in latest:
        facts.append(f"{latest['perf/tokens_per_second']:,.0f} tokens/s")
    return facts


def summary_table(
    summary: RunSummary, elapsed_s: float, stall: StallCounts | None = None, *, went_on: bool = False
) -> Table:
    """Return the final table, with one line for each headline figure that the run has.

    elapsed_s: the seconds since this process began.
    stall: counts of the last steps that trained nothing, for a warning; None for no warning.
    went_on: whether the run resumed from a checkpoint; ``elapsed_s`` is then not the whole run's
        time.
    """
    table = Table(title="The run", title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")  # on a narrow screen a figure takes two lines; nothing is cut off
    first_last = f"first {summary.window} → last {summary.window} steps"
    # What was trained: rewards, losses, evaluations.
    if summary.reward is not None:
        table.add_row("reward", f"{summary.reward[0]:.3f} → {summary.reward[1]:.3f}  ({first_last})")
    if summary.reverse_kl is not None:
        table.add_row("reverse KL", f"{summary.reverse_kl[0]:.3f} → {summary.reverse_kl[1]:.3f}  ({first_last})")
    if summary.loss is not None:
        table.add_row("loss", f"{summary.loss[0]:.3f} → {summary.loss[1]:.3f}  ({first_last})")
    if summary.accuracy is not None:
        start, end = (100 * value for value in summary.accuracy)
        table.add_row("pairs right", f"{start:.0f} % → {end:.0f} %  ({first_last})")
    evaluations = {**summary.held_out, **{f"eval {name}": points for name, points in summary.evaluations.items()}}
    for name, ((first_step, first), (last_step, last)) in evaluations.items():
        when = f"steps {first_step} → {last_step}" if last_step > first_step else f"step {last_step}"
        errors = summary.evaluation_errors.get(name.removeprefix("eval "), {})
        before, after = (
            f"{value:.3f}" + (f" ± {errors[step]:.3f}" if step in errors else "")
            for step, value in ((first_step, first), (last_step, last))
        )
        change = f"{before} → {after}" if last_step > first_step else after
        table.add_row(name, f"{change}  ({when})")
    if summary.reward_errors:
        share = f"{100 * summary.reward_error_share:.1f} % in the last {summary.window} steps"
        table.add_row("[red]reward errors[/red]", f"[red]{summary.reward_errors:,} samples  ({share})[/red]")
    # How it ran: lengths, the skip, speed, steps.
    if summary.truncated_share is not None:
        table.add_row("truncated responses", f"{100 * summary.truncated_share:.1f} %  (last {summary.window} steps)")
    if summary.zero_advantage_ratio is not None:
        start, end = (100 * value for value in summary.zero_advantage_ratio)
        table.add_row("zero-advantage ratio", f"{start:.1f} % → {end:.1f} %  ({first_last})")
    if summary.executed_ratio is not None:
        share = f"{100 * summary.executed_ratio:.1f} %"
        table.add_row("tokens executed", f"{summary.tokens_executed:,} of {summary.tokens_dense:,} dense  ({share})")
    if summary.step_s is not None and math.isfinite(summary.step_s):
        table.add_row("median step time", duration(summary.step_s))
    if summary.tokens_per_second is not None:
        table.add_row("tokens a second", f"{summary.tokens_per_second:,.0f}  (median)")
    table.add_row("optimizer steps", summary.steps)
    if stall is not None:
        table.add_row("[red]WARNING[/red]", f"[red]{stall}[/red]")
    table.add_row("time of this start" if went_on else "total time", duration(elapsed_s))
    return table
