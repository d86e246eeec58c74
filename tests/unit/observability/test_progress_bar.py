"""The progress bar is sparse in a log, live on a terminal; a run that trains nothing says so in log and final table."""

import io
import logging

import pytest
from rich.console import Console

from megatron_rl.observability.progress_bar import ProgressBar, summary_table
from megatron_rl.observability.stall_warning import StallWarning, stall_counts
from megatron_rl.observability.summary import summarize

# Steps by their first letters: Real, Ghost, Held, Zero gradient, Not finite.
KINDS = {"R": ("REAL", 0.5), "G": ("GHOST", 0.0), "H": ("HELD", 0.0), "Z": ("REAL", 0.0), "N": ("REAL", float("nan"))}
# In a row at the end; named where there are three, or where they are all of a run.
IN_A_ROW = {"": 0, "RRR": 0, "GGGR": 0, "RGG": 2, "RGZN": 3, "RGHGHG": 3, "GG": 2, "HH": 0, "HHG": 1}


def row(step: int) -> dict[str, object]:
    kind, norm = ("GHOST", 0.0) if step == 3 else ("REAL", 0.5)
    found = {"step": step, "step_kind": kind, "phase": "rl", "reward/mean": step / 100, "train/grad_norm": norm}
    found |= {"skip/zero_advantage_ratio": 0.25, "skip/tokens_executed": 75, "skip/tokens_dense": 100}
    return found | {"time/step_s": 2.0}


def run(terminal: bool, enabled: bool = True, num_steps: int = 20) -> str:
    """Run ``num_steps`` steps of 2 s; return what was printed."""
    out, now_s = io.StringIO(), [0.0]
    console = Console(file=out, force_terminal=terminal, width=120, color_system=None)
    with ProgressBar(num_steps, enabled, console=console, clock=lambda: now_s[0]) as progress:
        for step in range(num_steps):
            now_s[0] += 2.0
            progress.update(row(step))
        progress.finish([row(step) for step in range(num_steps)], "runs/x/report.html")
    return out.getvalue()


PACE = {"train/lr": 1e-05, "perf/tokens_per_second": 12345.6, "time/step_s": 2.0}
SUPERVISED = {  # the phase and the values of a step, and what the line says of them
    "sft": ({"train/loss": 1.25, "sft/eval_loss_before": 2.5}, "loss 1.25 | held out 2.5"),
    "preference": ({"train/loss": 0.5, "preference/accuracy": 0.75, "preference/eval_loss": 0.625,
                    "preference/eval_loss_before": 0.75}, "loss 0.5 | held out 0.625 | pairs right 75 %"),
    "warmup": ({"train/loss": 3.0}, "loss 3"),
}


def lines_of(rows: list[dict[str, object]], **settings: object) -> list[str]:
    """Return the lines of steps of 6 s each."""
    out, now_s = io.StringIO(), [0.0]
    console = Console(file=out, width=200, color_system=None)
    with ProgressBar(10, True, console=console, clock=lambda: now_s[0], **settings) as progress:
        for row in rows:
            now_s[0] += 6.0
            progress.update(row)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("phase", SUPERVISED)
def test_a_line_of_a_supervised_step_has_its_loss_rate_and_tokens_a_second(phase: str) -> None:
    values, said = SUPERVISED[phase]
    (line,) = lines_of([{"step": 1, "step_kind": "REAL", "phase": phase, **values, **PACE}])
    assert line == f"{phase} step 1 (1/10) | {said} | lr 1e-05 | 12,346 tokens/s | 2 s/step | ETA 54 s"
    silent = {"step": 1, "step_kind": "GHOST", "phase": phase, "skip/zero_advantage_ratio": 1.0, **values, **PACE}
    assert "| no signal 100 % | lr 1e-05 | 12,346 tokens/s | ghosts 1 |" in lines_of([silent])[0]


def test_a_resumed_bar_goes_on_from_where_it_was_at_its_own_pace_and_rl_forgets_the_start() -> None:
    supervised = {"step_kind": "REAL", "phase": "warmup", "train/loss": 3.0, "sft/eval_loss": 2.0}
    supervised |= {"time/step_s": 9.0}
    rl = {"step_kind": "REAL", "phase": "rl", "reward/mean": 0.5, "train/loss": 0.01, "train/lr": 1.0}
    rows = [supervised | {"step": 8}, rl | {"step": 9}, rl | {"step": 10}, rl | {"step": 11}]
    assert lines_of(rows, done_steps=7, done_ghosts=2) == [
        "warmup step 8 (8/10) | loss 3 | held out 2 | ghosts 2 | 9 s/step | ETA 12 s",
        "rl step 9 (9/10) | reward 0.500 | ghosts 2 | ETA 6 s",
        "rl step 10 (10/10) | reward 0.500 | ghosts 2 | ETA 0 s",
        "rl step 11 (11/11) | reward 0.500 | ghosts 2 | ETA 0 s",  # train.epochs took more than was foreseen
    ]


def test_the_table_of_a_supervised_run_has_its_loss_and_names_it() -> None:
    rows = [{"step": n, "step_kind": "REAL", "phase": "sft", "train/loss": 3.0 - n / 10, **PACE} for n in range(20)]
    out = io.StringIO()
    Console(file=out, width=120).print(summary_table(summarize(rows), 1.0, went_on=True))
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    for said in ("loss 2.550 → 1.550 (first 10 → last 10 steps)", "tokens a second 12,346 (median)",
                 "optimizer steps 20 SFT", "time of this start 1 s"):
        assert said in lines, said
    values = {"phase": "preference", "preference/accuracy": 0.5, "skip/zero_advantage_ratio": 0.0}
    summary = summarize([row | values for row in rows])
    assert (summary.accuracy, summary.zero_advantage_ratio, summary.steps) == ((0.5, 0.5), None, "20 preference")


def test_the_final_table_has_evaluation_and_truncation():
    """An evaluation's first value may be that of before the first step; a single one stands alone."""
    rows = [row(step) | {"rollout/truncated_share": 0.5 if step < 10 else 0.125} for step in range(20)]
    rows = [x | {"distillation/reverse_kl": 2.0 - i / 10} for i, x in enumerate(rows)]
    rows = [x | {"reward/errors": 3.0, "reward/error_share": 0.25} if i % 2 else x for i, x in enumerate(rows)]
    before = {"mean@4_before": 0.25, "pass@4_before": 0.5, "mean@4_se_before": 0.01}
    rows[0] |= {"step": 1} | {f"eval/test/{name}": value for name, value in before.items()}
    rows[10] |= {"eval/test/mean@4": 0.375, "eval/test/mean@4_se": 0.02}
    rows[19] |= {"eval/test/mean@4": 0.75, "eval/test/mean@4_se": 0.03, "eval/other/mean@1": 0.5}
    out = io.StringIO()
    Console(file=out, width=120).print(summary_table(summarize(rows), 1.0))
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert "eval test mean@4 0.250 ± 0.010 → 0.750 ± 0.030 (steps 0 → 19)" in lines
    assert "eval other mean@1 0.500 (step 19)" in lines
    assert "reward errors 30 samples (25.0 % in the last 10 steps)" in lines
    assert "truncated responses 12.5 % (last 10 steps)" in lines
    assert "reverse KL 1.550 → 0.550 (first 10 → last 10 steps)" in lines


def test_a_log_has_a_line_at_most_every_five_seconds_and_ends_with_the_runs_table():
    lines = [line for line in run(terminal=False).splitlines() if line.startswith("rl step")]
    assert [int(line.split()[2]) for line in lines] == [*range(0, 20, 3), 19]  # the first, every third (6 s), the last
    assert lines[2] == "rl step 6 (7/20) | reward 0.060 | zero-adv 25 % | ghosts 1 | 2 s/step | ETA 26 s"
    out = run(terminal=False)
    figures = ("0.045 → 0.145", "25.0 % → 25.0 %", "1,500 of 2,000 dense  (75.0 %)", "19 REAL, 1 GHOST", "40 s")
    for said in (*figures, "report: runs/x/report.html"):
        assert said in out, said
    assert "\x1b" not in out, "a log has no terminal codes"


def test_a_terminal_has_a_live_bar_disabled_is_silent_and_a_run_without_steps_has_a_table():
    out = run(terminal=True)
    assert "20/20" in out and "ghosts 1" in out and "ETA 0 s" in out
    assert run(terminal=True, enabled=False) == "" == run(terminal=False, enabled=False)
    assert "0 REAL, 0 GHOST" in run(terminal=False, num_steps=0)


def rows_of(steps: str) -> list[dict[str, object]]:
    row = {"phase": "rl"}
    return [row | {"step": i, "step_kind": KINDS[x][0], "train/grad_norm": KINDS[x][1]} for i, x in enumerate(steps)]


@pytest.mark.parametrize("steps", IN_A_ROW)
def test_steps_that_trained_nothing_equal_a_count_by_hand(steps: str) -> None:
    counts = stall_counts(rows_of(steps))
    assert counts.in_a_row == IN_A_ROW[steps] and not counts.is_worth_saying(None)
    assert counts.is_worth_saying(3) == (steps in ("RGZN", "RGHGHG", "GG", "HHG"))


def warnings_of(steps: str, warning_steps: int | None, caplog: pytest.LogCaptureFixture) -> list[str]:
    watch = StallWarning(warning_steps)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for row in rows_of(steps):
            watch.observe(row)
        watch.end()
    return [record.getMessage() for record in caplog.records]


def test_the_log_warns_at_every_doubling_and_anew_after_a_step_that_trains(caplog: pytest.LogCaptureFixture) -> None:
    said = warnings_of("R" + "G" * 3 + "N" * 10, 3, caplog)
    assert len(said) == 3
    for warning, count in zip(said, (3, 6, 12), strict=True):
        assert warning.startswith(f"WARNING: the last {count} optimizer steps trained nothing (3 ghosts")
        assert "skip/zero_advantage_ratio" in warning and "docs/skip.md" in warning
    assert "3 with a gradient that is not finite" in said[1]
    assert len(warnings_of("GGG" + "R" + "GG" + "R" + "GGG", 3, caplog)) == 2
    assert warnings_of("GGRGGRGG", 3, caplog) == [] and warnings_of("G" * 100, None, caplog) == []


def test_a_run_shorter_than_the_setting_that_trained_nothing_warns_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    (said,) = warnings_of("GGZ", 20, caplog)
    assert said.startswith("WARNING: all 3 optimizer steps trained nothing (2 ghosts, 1 with a gradient of zero)")
    assert len(warnings_of("GGG", 3, caplog)) == 1  # not once more at the end


def test_a_run_that_goes_on_counts_the_steps_before(caplog: pytest.LogCaptureFixture) -> None:
    """After a resumption the last steps are counted over both parts, and no part is taken for a whole run."""
    watch = StallWarning(3)
    with caplog.at_level(logging.WARNING):
        watch.resume(rows_of("R" * 50 + "GG"))
        watch.end()
        assert not caplog.records
        watch.observe(rows_of("G")[0])
    assert caplog.records[0].getMessage().startswith("WARNING: the last 3 optimizer steps trained nothing (3 ghosts)")


def test_the_final_table_names_the_steps() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=120, color_system=None)
    with ProgressBar(30, True, console=console, untrained_warning_steps=3) as progress:
        progress.finish(rows_of("RGGGG"), None)
    (line,) = [line for line in out.getvalue().splitlines() if "WARNING" in line]
    assert "the last 4 optimizer steps trained nothing (4 ghosts)" in line
