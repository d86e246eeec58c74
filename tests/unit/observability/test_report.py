"""Checks observability/report.py and svg.py: a page is well-formed and names every series that its run has or lacks."""

import json
import math
import os
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import numpy as np
import pytest

from megatron_rl.config import MetricsConfig
from megatron_rl.observability.completions import Completion, cut
from megatron_rl.observability.metrics import MetricsWriter
from megatron_rl.observability.report import main, write_report
from megatron_rl.observability.svg import (
    LEFT,
    RIGHT,
    Frame,
    Series,
    line_plot,
    linear_axis,
    running_mean,
    short,
    ticks_between,
)

TITLES = ("Reward", "Zero-advantage ratio", "Tokens: executed and dense", "Step time", "Gradient norm", "Entropy")
TITLES += ("Evaluation: test",)
VOID = {"meta", "br", "hr", "img", "link", "input"}
HOSTILE = "\x1b[2J</dd></pre><script>alert(1)</script>\x00\u202eabc\u2066<img src=x onerror=y>&amp;\ud800"


class Balanced(HTMLParser):
    """Fails on a tag that is closed out of order or never."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        """Leave the open tags as they are: ``<path/>`` opens nothing."""

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()


def write_run(run_dir, num_steps=60, num_warmup=10, **changes) -> None:
    random = np.random.default_rng(0)
    with MetricsWriter(run_dir, MetricsConfig(), num_steps, True) as writer:
        for step in range(num_steps):
            warmup, ghost = step < num_warmup, step >= num_warmup and step % 7 == 0
            row = {"step": step, "step_kind": "GHOST" if ghost else "REAL", "phase": "warmup" if warmup else "rl"}
            row |= {"train/grad_norm": 0.0 if ghost else random.gamma(2.0), "time/update_s": 0.5, "time/step_s": 0.75}
            if warmup:
                row["train/loss"] = 3.0 - step / 10
            else:
                row |= {"reward/mean": step / num_steps, "time/rollout_s": 1.0, "time/step_s": 1.75}
                row |= {"skip/tokens_executed": 0 if ghost else 500, "skip/tokens_dense": 1000}
                row |= {"skip/zero_advantage_ratio": 0.5, "train/entropy": 1.0}
            if step % 20 == 19:
                row["eval/test/mean@1"] = step / num_steps
            writer.write({key: value for key, value in (row | changes).items() if value != "leave out"})


def report(run_dir, config_yaml="run:\n  name: x\n") -> str:
    write_report(run_dir / "metrics.jsonl", config_yaml, run_dir / "report.html")
    page = (run_dir / "report.html").read_text(encoding="utf-8")
    parser = Balanced()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    for svg in svgs(page):
        ElementTree.fromstring(svg)
        assert not re.search(r"\b(nan|inf)\b", re.sub(r"<title>.*?</title>", "", svg, flags=re.S)), "no pixel is at nan"
    return page


def svgs(page: str) -> list[str]:
    return re.findall(r"<svg.*?</svg>", page, flags=re.S)


def svg_of(page: str, title: str) -> str:
    return next(svg for svg in svgs(page) if f'aria-label="{title}"' in svg)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> str:
    """Return the page of a run that has every series."""
    folder = tmp_path_factory.mktemp("whole")
    write_run(folder)
    page = report(folder)
    assert not [path for path in folder.iterdir() if path.suffix == ".tmp"]
    return page


def test_page_has_every_plot_ghost_and_unclaimed_time_and_fetches_nothing(whole):
    for title in TITLES:
        assert f"<b>{title}</b>" in whole
        assert svg_of(whole, title).count("optimizer step") == 1
    assert "Not in this run's metrics" not in whole and "Spread of rewards" not in whole
    assert not re.search(r"https?://|<script|<link|@import|url\(|src=", whole)
    # the seven ghost steps (14, 21, ... 56) have a mark in every plot, and the tile counts them
    for title in TITLES:
        assert ElementTree.fromstring(svg_of(whole, title)).find("path[@class='ghost']").get("d").count("M") == 7
    assert re.search(r'Ghost steps</div><div class="value">7</div>', whole)
    tips = svg_of(whole, "Gradient norm")
    assert "step 13\n" in tips and "step 14\n" not in tips
    assert "step 30\nrollout: 1 s\nupdate: 0.5 s\nother: 0.25 s\nwhole step: 1.75 s" in svg_of(whole, "Step time")


def ends(svg: str) -> tuple[float, float]:
    """Return where the raw line of a chart begins and ends, 0 at the left edge of the chart and 1 at the right one."""
    xs = [float(x) for x in re.findall(r"[ML]([\d.]+) ", re.search(r'class="raw c1" d="(.*?)"', svg).group(1))]
    return (xs[0] - LEFT) / (RIGHT - LEFT), (xs[-1] - LEFT) / (RIGHT - LEFT)


def test_a_supervised_start_takes_no_place_in_the_charts_of_rl(tmp_path):
    """Of 200 steps before and 20 of RL each part fills its own charts; its evaluation is where RL's line begins."""
    write_run(tmp_path, num_steps=220, num_warmup=200)
    page = report(tmp_path)
    own, _, start = page.partition("<h2>Supervised start <span")
    assert "imitation, steps 0 – 199</span>" in start[:60]
    for part, title, steps in ((own, "Reward", 21), (own, "Gradient norm", 21), (start, "Loss", 200)):
        first, last = ends(svg_of(part, title))  # RL's axis begins a step early, with the evaluation at 199
        early = steps == 21
        assert (first, last) == pytest.approx(((0.5 + early) / steps, 1 - 0.5 / steps), abs=1e-3)
    assert "step 199\nmean@1: 0.9045" in svg_of(own, "Evaluation: test") and "Evaluation: test" in start
    assert "<td>supervised start</td><td>0 – 199</td><td>200</td><td>0</td><td>2.550 → -16.450</td><td>–</td>" in start
    assert "of 20 optimizer steps, after 200 of warm-up" in own


@pytest.mark.parametrize(("phase", "name"), [("sft", "SFT"), ("preference", "preference")])
def test_a_supervised_run_opens_with_its_loss_and_the_held_out_one_beside_it(tmp_path, phase, name):
    rows = [{"step": n, "step_kind": "REAL", "phase": phase, "train/loss": 2.0 - n / 20} for n in range(1, 21)]
    rows = [row | {"train/grad_norm": 1.0, "time/step_s": 0.5, "perf/tokens_per_second": 1234.0} for row in rows]
    rows[0][f"{phase}/eval_loss_before"] = 2.5
    rows[9][f"{phase}/eval_loss"] = rows[19][f"{phase}/eval_loss"] = 1.25
    if phase == "preference":
        rows = [row | {"preference/accuracy": 0.75, "preference/chosen_reward": 0.25} for row in rows]
        rows = [row | {"preference/rejected_reward": -0.5} for row in rows]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = report(tmp_path)
    assert re.findall("<figcaption><b>([^<]*)", page)[0] == "Loss"
    tips = svg_of(page, "Loss")
    assert ends(tips) == pytest.approx((1.5 / 21, 1 - 0.5 / 21), abs=1e-3)  # behind a step 0, for the held-out loss
    assert "step 0\nheld out: 2.5 nats<" in tips and "step 10\ntrained: 1.5 nats\nheld out: 1.25 nats<" in tips
    assert '<div class="value"><span>1.725 → </span>1.225</div>' in page and ">1.23k</div>" in page
    assert f"<td>{name}</td><td>1 – 20</td>" in page and f'20</div><div class="note">{name}</div>' in page
    assert not re.search("warm-up|Ghost|so not drawn|Zero-advantage", page)
    assert ("step 5\nchosen: 0.25\nrejected: -0.5" in page) == (phase == "preference")


def test_missing_series_are_named_not_drawn_and_values_that_are_not_finite_counted(tmp_path):
    write_run(tmp_path, **{"train/entropy": "leave out", "reward/mean": math.nan})
    page = report(tmp_path)
    assert "<b>Entropy</b>" not in page and "<b>Reward</b>" not in page and "so not drawn: Reward, Entropy." in page
    write_run(tmp_path, num_steps=40)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    lines[20] = re.sub(r'"train/grad_norm": [\d.]+', '"train/grad_norm": "inf"', lines[20])
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert "1 non-finite values are not drawn" in report(tmp_path)


def test_rewards_have_a_band(tmp_path):
    spread = {f"reward/{name}": number / 4 for number, name in enumerate(("min", "p25", "median", "p75", "max"))}
    write_run(tmp_path, **spread, **{"reward/std": 0.5, "rollout/truncated_share": 0.25})
    page = report(tmp_path)
    assert "step 30\nmin: 0\nmax: 1\np25: 0.25\np75: 0.75\nmedian: 0.5" in svg_of(page, "Spread of rewards")
    assert len(re.findall('class="tint', svg_of(page, "Spread of rewards"))) == 2
    assert "<b>Standard deviation of rewards</b>" in page and "<b>Truncated responses</b>" in page
    assert '<div class="name">Truncated responses</div><div class="value">25.0 %</div>' in page


def completion(step: int, source: str, **changes: object) -> Completion:
    facts = {"finish_reason": "stop", "response_tokens": 2, "weight_version": 3, "answer": None, "reward": 1.0}
    facts |= {"sample": f"{step}@0#1", "prompt": "3+4=", "response": "7", "rewards": {"math": 1.0}}
    return Completion(source=source, **(facts | changes))


def test_first_and_last_completions_are_shown(tmp_path):
    """Of training and of each evaluation the first and the last recorded are on the page, at most eight each."""
    write_run(tmp_path, num_steps=3)
    state = {"ghost_steps": 0, "last_step": 2}
    with MetricsWriter(tmp_path, MetricsConfig(print_completions_every_rollouts=0), 9, True, state) as writer:
        for step in range(3, 7):
            sampled = [completion(step, "train", rollout=step, response=f"r{step}.{i}") for i in range(9)]
            sampled += [completion(step, "eval/x", response=f"e{step}")] if step < 5 else []
            writer.write({"step": step, "step_kind": "REAL", "phase": "rl"}, sampled)
    page = report(tmp_path)
    shown = re.findall(r"<dd>([re]\d[^<]*)</dd>", page)
    assert shown == [*(f"r3.{i}" for i in range(8)), *(f"r6.{i}" for i in range(8)), "e3", "e4"]
    assert "<h3>Rollout 6, step 6, 8 of 9 recorded</h3>" in page and "<h3>Step 4</h3>" in page


def test_a_hostile_completion_stays_text(tmp_path):
    write_run(tmp_path, num_steps=2)
    hostile, state = cut(HOSTILE, 500), {"ghost_steps": 0, "last_step": 1}
    texts = dict.fromkeys(("sample", "prompt", "response", "answer", "excluded"), hostile)
    with MetricsWriter(tmp_path, MetricsConfig(), 3, True, state) as writer:
        given = completion(2, f"eval/{hostile}", rewards={HOSTILE[:20]: 1.0}, **texts)
        writer.write({"step": 2, "step_kind": "REAL", "phase": "rl"}, [given])
    page = report(tmp_path)
    assert "<script" not in page and "<img" not in page
    assert not re.search("[\x00-\x08\x1b\u202a-\u202e\u2066-\u2069]", page)
    assert "<dd>\\x1b[2J&lt;/dd&gt;&lt;/pre&gt;&lt;script&gt;alert(1)" in page and "&amp;amp;\ufffd</dd>" in page


def add_evaluation(run_dir, name: str, values: dict[str, list[float]]) -> None:
    """Write evaluations into the run's rows: of each kind one value after the steps 20, 40 and 60."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for number, row in enumerate(lines[19::20]):
        row |= {f"eval/{name}/{kind}": each[number] for kind, each in values.items()}
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))


def test_every_set_has_a_figure_with_a_line_for_each_number(tmp_path):
    write_run(tmp_path, num_warmup=0)
    numbers = {"pass@16": [0.5, 0.6, 0.7], "pass@2": [0.2, 0.3, 0.4], "pass@1": [0.1] * 3, "mean@16": [0.3] * 3}
    others = {"excluded": [1.0] * 3, "response_tokens_mean": [9.0] * 3, "mean@16_before": [0.9] * 3}
    add_evaluation(tmp_path, "hard", numbers | others)
    add_evaluation(tmp_path, "tile", {"mean@4": [0.1, 0.2, 0.3], "mean@4_se": [0.01, 0.02, 0.03]})
    page = report(tmp_path)
    assert re.search(r'<div class="note">steps 19 and 59, mean@4; standard error 0.010 and 0.030</div>', page)
    assert "mean@4_se" not in svg_of(page, "Evaluation: tile")
    (legend,) = re.findall(r"<b>Evaluation: hard</b>.*?<div class=\"legend\">(.*?)</div>", page)
    assert re.findall(r"</i>([^<]+)</span>", legend)[:4] == ["mean@16", "pass@1", "pass@2", "pass@16"]
    assert "step 39\nmean@16: 0.3\npass@1: 0.1\npass@2: 0.3\npass@16: 0.6" in svg_of(page, "Evaluation: hard")
    # beside it the set "test", evaluated greedily
    assert "mean@1, greedy, on held-out prompts" in page and 'aria-label="Evaluation: test"' in page
    assert re.search(r'hard</div><div class="value"><span>0.900 → </span>0.300</div><div class="note">.*?mean@16', page)


def test_pass_at_1_that_is_the_mean_is_drawn_once_and_axes_hold_what_lies_beyond_0_and_1(tmp_path):
    write_run(tmp_path)
    add_evaluation(tmp_path, "hard", {"mean@4": [0.1, 0.2, 0.3], "pass@1": [0.1, 0.2, 0.3], "pass@4": [0.4] * 3})
    add_evaluation(tmp_path, "wide", {"mean@4": [-1.0, 0.5, 2.5], "pass@1": [0.1, 0.2, 0.3]})
    page = report(tmp_path)
    assert "step 39\nmean@4 = pass@1: 0.2\npass@4: 0.4" in svg_of(page, "Evaluation: hard")
    ticks = re.findall(r'class="tick" text-anchor="end"[^>]*>([^<]+)<', svg_of(page, "Evaluation: wide"))
    assert float(ticks[0]) <= -1.0 and float(ticks[-1]) >= 2.5


def test_text_is_escaped(tmp_path):
    write_run(tmp_path, **{"eval/<b>&/mean@1": 0.5})
    page = report(tmp_path, config_yaml="name: <script>alert('&')</script>")
    assert "<script>" not in page and "&lt;script&gt;alert(&#x27;&amp;&#x27;)" in page
    assert "Evaluation: &lt;b&gt;&amp;" in page


@pytest.mark.parametrize("num_steps", [0, 1, 2, 7, 1500])
def test_runs_of_any_length(tmp_path, num_steps):
    write_run(tmp_path, num_steps=num_steps, num_warmup=0)
    page = report(tmp_path)
    assert ("no optimizer step yet" in page) == (num_steps == 0) and len(page) < 600_000


def test_a_run_that_died_in_its_warmup_and_one_with_one_evaluation(tmp_path):
    write_run(tmp_path, num_steps=10)
    assert "<b>Gradient norm</b>" in report(tmp_path)
    write_run(tmp_path, num_steps=30)
    page = report(tmp_path)  # one evaluation is a tile and no plot
    assert "Evaluation: test" in page and "<b>Evaluation: test</b>" not in page


def test_command_line(tmp_path, capsys):
    write_run(tmp_path, num_steps=12)
    assert main([str(tmp_path)]) == 0 and (tmp_path / "report.html").exists()
    assert main([str(tmp_path / "x")]) == 2
    assert "metrics.jsonl'; give the folder of a run" in capsys.readouterr().err
    for name, words in (("metrics.jsonl", "it is no regular file"), ("config.yaml", "is no regular file; text")):
        (tmp_path / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name)
        assert main([str(tmp_path)]) == 2 and words in capsys.readouterr().err


def test_running_mean_equals_the_naive_loop_stays_in_its_phase_and_a_plot_of_nothing_is_refused():
    values = np.random.default_rng(1).normal(size=40)
    values[[3, 4, 5, 6, 7, 20]] = math.nan
    for window in (1, 3, 5, 61):
        naive = []
        for i in range(len(values)):
            near = [v for v in values[max(0, i - window // 2) : i + window // 2 + 1] if math.isfinite(v)]
            naive.append(sum(near) / len(near) if near else math.nan)
        np.testing.assert_allclose(running_mean(values, window), naive, rtol=1e-12, atol=1e-15)  # order of additions
    svg = plot(np.arange(20) >= 10, phase_starts=(0, 10))
    raw, smooth = (re.search(rf'class="{css} c1" d="(.*?)"', svg).group(1) for css in ("raw", "line"))
    assert raw == smooth
    with pytest.raises(ValueError, match="'x' has no finite value"):
        plot([math.nan, math.inf])


def plot(values, **more: object) -> str:
    series = Series(label="x", steps=np.arange(len(values)), values=np.asarray(values, dtype=float), color=1)
    frame = Frame(first_step=0, last_step=len(values) - 1, ghost_steps=np.asarray([]), **more)
    return line_plot("x", [series], frame)


def test_spikes_survive_thinning_and_axes_cover_their_values():
    raw = re.search(r'class="raw c1" d="(.*?)"', plot(np.arange(20_000) == 12_345)).group(1)
    assert any(float(y) == 16.0 for y in re.findall(r"[ML][\d.]+ ([\d.]+)", raw)), "the top of the plot is reached"
    assert len(raw) < 15_000 and ticks_between(0.0, 0.93) == (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    assert ticks_between(-3.0, 12.0) == (-5.0, 0.0, 5.0, 10.0, 15.0)
    for values in ([0.0], [5.0, 5.0], [-2.0], [1e-12, 3e-12], [-1e9, 1e9]):
        for from_zero in (False, True):
            axis = linear_axis(np.asarray(values), from_zero)
            assert axis.low <= min(values) <= max(values) <= axis.high and axis.low < axis.high
    assert [short(x) for x in (0.0, 0.05, 340.0, 15_000.0, 1.2e6, 3e9)] == ["0", "0.05", "340", "15k", "1.2M", "3B"]
