"""A run's report in a real browser, opened from disk: every figure that its run has, the names of those it lacks."""

import json
import math
import pathlib
import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from megatron_rl.config import MetricsConfig
from megatron_rl.observability.completions import Completion, cut
from megatron_rl.observability.metrics import MetricsWriter
from megatron_rl.observability.report import write_report
from tests.browser import Page, find_browser, open_page

NO_BROWSER = "no Chromium or Chrome on PATH; make test-browser installs Debian's and runs this"
pytestmark = pytest.mark.skipif(find_browser() is None, reason=NO_BROWSER)
TITLES = ("Reward", "Zero-advantage ratio", "Tokens: executed and dense", "Step time", "Gradient norm", "Entropy")
TITLES += ("Evaluation: test",)
HOSTILE = "\x1b[2J</dd></script><script>document.title='taken'</script>\x00\u202eabc<img src=x onerror=alert(1)>"
# Moves the pointer over a chart until it tells of a step; what the chart tells, or what it told last.
TELLS = """((card, wanted) => {
  const picture = card.querySelector("svg"), box = picture.getBoundingClientRect();
  for (let x = 0; x <= box.width; x += 0.5) {
    picture.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + x, clientY: box.top + 50 }));
    if (card.querySelector(".tip").textContent.startsWith(`step ${wanted}\\n`)) break;
  }
  return card.querySelector(".tip").textContent;
})"""


class Report:
    """Asks an open report."""

    def __init__(self, page: Page) -> None:
        self.page = page

    def texts(self, selector: str) -> list[str]:
        return self.page.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.innerText)")

    def titles(self, grid: str = "charts") -> list[str]:
        return self.texts(f"#{grid} figcaption b")

    def card(self, title: str, grid: str = "charts") -> str:
        found = f"[...document.querySelectorAll('#{grid} figure')].find((e) => e.querySelector('b').textContent === "
        return f"{found}{json.dumps(title)})"

    def inside(self, title: str, selector: str, grid: str = "charts") -> list[str]:
        nodes = f"[...{self.card(title, grid)}.querySelectorAll({json.dumps(selector)})]"
        return self.page.evaluate(f"{nodes}.map((e) => e.getAttribute('d') ?? e.textContent)")

    def tells(self, title: str, step: int, grid: str = "charts") -> str:
        return self.page.evaluate(f"{TELLS}({self.card(title, grid)}, {step})")

    def ends(self, title: str, grid: str = "charts") -> tuple[float, float]:
        """Return where the raw line of a chart begins and ends: 0 is the left edge of the chart, 1 the right one."""
        (line,) = self.inside(title, ".raw.c1", grid)
        left, right = (float(self.inside_number(title, grid, name)) for name in ("x1", "x2"))
        xs = [float(x) for x in re.findall(r"[ML]([\d.]+) ", line)]
        return (xs[0] - left) / (right - left), (xs[-1] - left) / (right - left)

    def inside_number(self, title: str, grid: str, attribute: str) -> str:
        return self.page.evaluate(f"{self.card(title, grid)}.querySelector('.grid').getAttribute('{attribute}')")


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[Page]:
    with open_page("about:blank", tmp_path_factory.mktemp("browser") / "profile") as opened:
        yield opened


@pytest.fixture
def opened(page: Page, tmp_path: pathlib.Path) -> Callable[[], Report]:
    def write_and_open(config_yaml: str = "run:\n  name: x\n") -> Report:
        write_report(tmp_path / "metrics.jsonl", config_yaml, tmp_path / "report.html")
        page.call("Page.navigate", url="about:blank")
        page.wait_for("location.href", "about:blank")
        page.call("Page.navigate", url=f"file://{tmp_path / 'report.html'}")
        page.wait_for("/written at|cannot be read/.test(document.getElementById('state').textContent)", True)
        assert "written at" in page.evaluate("document.getElementById('state').textContent")
        paths = "[...document.querySelectorAll('svg [d]')].map((e) => e.getAttribute('d')).join()"
        assert not re.search("NaN|Inf", page.evaluate(paths)), "no pixel is at nan"
        return Report(page)

    return write_and_open


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


def test_page_has_every_chart_ghost_and_unclaimed_time(opened, tmp_path):
    write_run(tmp_path)
    report = opened()
    assert set(TITLES) <= set(report.titles()) and "Spread of rewards" not in report.titles()
    assert report.texts("#missing") == [""]
    # the seven ghost steps (14, 21, ... 56) have a mark in every chart, and the tile counts them
    for title in TITLES:
        assert report.inside(title, ".ghost")[0].count("M") == 7
    assert "Ghost steps\n7\nof 50 optimizer steps, after 10 of warm-up" in report.texts(".tile")
    assert report.tells("Gradient norm", 13).startswith("step 13\n")
    assert not report.tells("Gradient norm", 14).startswith("step 14\n")
    assert report.tells("Step time", 30) == "step 30\nrollout: 1 s\nupdate: 0.5 s\nother: 0.25 s\nwhole step: 1.75 s"
    assert report.page.evaluate("document.title") == tmp_path.name
    assert report.page.evaluate("document.getElementById('yaml').textContent") == "run:\n  name: x\n"
    size = dict(height=910, deviceScaleFactor=1, mobile=False)
    report.page.call("Emulation.setDeviceMetricsOverride", width=360, **size)
    try:
        report.page.wait_for(f"{report.card('Reward')}.querySelector('svg').viewBox.baseVal.width < 360", True)
        parts = "...document.querySelectorAll('header, main, figure, figcaption, .tile, .charts')"
        wide = f"[document.documentElement, {parts}].filter((e) => e.scrollWidth > e.clientWidth)"
        assert report.page.evaluate(f"{wide}.map((e) => e.tagName).join()") == ""
    finally:
        report.page.call("Emulation.setDeviceMetricsOverride", width=1200, **size)


def test_a_supervised_start_takes_no_place_in_the_charts_of_rl(opened, tmp_path):
    """Of 200 steps before and 20 of RL each part fills its own charts; its evaluation is where RL's line begins."""
    write_run(tmp_path, num_steps=220, num_warmup=200)
    report = opened()
    assert report.texts("#start-steps") == ["imitation, steps 0 – 199"]
    charts = (("charts", "Reward", 21), ("charts", "Gradient norm", 21), ("start-charts", "Loss", 200))
    for grid, title, steps in charts:
        early = steps == 21  # RL's axis begins a step early, with the evaluation at 199
        assert report.ends(title, grid) == pytest.approx(((0.5 + early) / steps, 1 - 0.5 / steps), abs=1e-3)
    assert report.tells("Evaluation: test", 199) == "step 199\nmean@1: 0.9045"
    assert "Evaluation: test" in report.titles("start-charts")
    first = report.texts("#phase-table tr:nth-child(2) td")
    assert first[:6] == ["supervised start", "0 – 199", "200", "0", "2.550 → -16.450", "–"]


@pytest.mark.parametrize(("phase", "name"), [("sft", "SFT"), ("preference", "preference")])
def test_a_supervised_run_opens_with_its_loss_and_the_held_out_one_beside_it(opened, tmp_path, phase, name):
    rows = [{"step": n, "step_kind": "REAL", "phase": phase, "train/loss": 2.0 - n / 20} for n in range(1, 21)]
    rows = [row | {"train/grad_norm": 1.0, "time/step_s": 0.5, "perf/tokens_per_second": 1234.0} for row in rows]
    rows[0][f"{phase}/eval_loss_before"] = 2.5
    rows[9][f"{phase}/eval_loss"] = rows[19][f"{phase}/eval_loss"] = 1.25
    if phase == "preference":
        rows = [row | {"preference/accuracy": 0.75, "preference/chosen_reward": 0.25} for row in rows]
        rows = [row | {"preference/rejected_reward": -0.5} for row in rows]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = opened()
    assert report.titles()[0] == "Loss"
    # behind a step 0, for the held-out loss
    assert report.ends("Loss") == pytest.approx((1.5 / 21, 1 - 0.5 / 21), abs=1e-3)
    assert report.tells("Loss", 0) == "step 0\nheld out: 2.5 nats"
    assert report.tells("Loss", 10) == "step 10\ntrained: 1.5 nats\nheld out: 1.25 nats"
    tiles = "\n".join(report.texts(".tile"))
    assert "Loss\n1.725 → 1.225\n" in tiles and "Tokens a second\n1230\n" in tiles and f"20\n{name}" in tiles
    assert report.texts("#phase-table td")[:2] == [name, "1 – 20"]
    assert not re.search("warm-up|Ghost|so not drawn|Zero-advantage", " ".join(report.texts("main")))
    if phase == "preference":
        assert report.tells("Rewards of pairs", 5) == "step 5\nchosen: 0.25\nrejected: -0.5"


def test_missing_series_are_named_not_drawn_and_values_that_are_not_finite_counted(opened, tmp_path):
    write_run(tmp_path, **{"train/entropy": "leave out", "reward/mean": math.nan})
    report = opened()
    assert not {"Entropy", "Reward"} & set(report.titles())
    assert report.texts("#missing") == ["Not in this run's metrics, so not drawn: Reward, Entropy."]
    write_run(tmp_path, num_steps=40)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    lines[20] = re.sub(r'"train/grad_norm": [\d.]+', '"train/grad_norm": "inf"', lines[20])
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert opened().inside("Gradient norm", ".legend span")[-1] == "1 non-finite values are not drawn"


def test_rewards_have_a_band(opened, tmp_path):
    spread = {f"reward/{name}": number / 4 for number, name in enumerate(("min", "p25", "median", "p75", "max"))}
    write_run(tmp_path, **spread, **{"reward/std": 0.5, "rollout/truncated_share": 0.25})
    report = opened()
    assert report.tells("Spread of rewards", 30) == "step 30\nmin: 0\nmax: 1\np25: 0.25\np75: 0.75\nmedian: 0.5"
    assert len(report.inside("Spread of rewards", ".tint")) == 2
    assert {"Standard deviation of rewards", "Truncated responses"} <= set(report.titles())
    assert any(tile.startswith("Truncated responses\n25.0 %") for tile in report.texts(".tile"))


def add_evaluation(run_dir, name: str, values: dict[str, list[float]]) -> None:
    """Write evaluations into the run's rows: of each kind one value after the steps 20, 40 and 60."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for number, row in enumerate(lines[19::20]):
        row |= {f"eval/{name}/{kind}": each[number] for kind, each in values.items()}
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))


def test_every_set_has_a_figure_with_a_line_for_each_number(opened, tmp_path):
    write_run(tmp_path, num_warmup=0)
    numbers = {"pass@16": [0.5, 0.6, 0.7], "pass@2": [0.2, 0.3, 0.4], "pass@1": [0.1] * 3, "mean@16": [0.3] * 3}
    others = {"excluded": [1.0] * 3, "response_tokens_mean": [9.0] * 3, "mean@16_before": [0.9] * 3}
    add_evaluation(tmp_path, "hard", numbers | others)
    add_evaluation(tmp_path, "tile", {"mean@4": [0.1, 0.2, 0.3], "mean@4_se": [0.01, 0.02, 0.03]})
    report = opened()
    tiles = "\n".join(report.texts(".tile"))
    assert "steps 19 and 59, mean@4; standard error 0.010 and 0.030" in tiles
    assert "Evaluation: hard\n0.900 → 0.300\nsteps 18 and 59, mean@16" in tiles
    assert "mean@4_se" not in report.tells("Evaluation: tile", 39)
    keys = [text.rpartition(" ")[0] for text in report.inside("Evaluation: hard", ".legend span")]
    assert keys[:4] == ["mean@16", "pass@1", "pass@2", "pass@16"]
    said = "step 39\nmean@16: 0.3\npass@1: 0.1\npass@2: 0.3\npass@16: 0.6"
    assert report.tells("Evaluation: hard", 39) == said
    # beside it the set "test", evaluated greedily
    assert report.inside("Evaluation: test", ".sub") == ["mean@1, greedy, on held-out prompts"]


def test_pass_at_1_that_is_the_mean_is_drawn_once_and_axes_hold_what_lies_beyond_0_and_1(opened, tmp_path):
    write_run(tmp_path)
    add_evaluation(tmp_path, "hard", {"mean@4": [0.1, 0.2, 0.3], "pass@1": [0.1, 0.2, 0.3], "pass@4": [0.4] * 3})
    add_evaluation(tmp_path, "wide", {"mean@4": [-1.0, 0.5, 2.5], "pass@1": [0.1, 0.2, 0.3]})
    report = opened()
    assert report.tells("Evaluation: hard", 39) == "step 39\nmean@4 = pass@1: 0.2\npass@4: 0.4"
    ticks = report.inside("Evaluation: wide", ".tick.y")
    assert float(ticks[0]) <= -1.0 and float(ticks[-1]) >= 2.5


@pytest.mark.parametrize("num_steps", [0, 1, 2, 7, 1500])
def test_runs_of_any_length(opened, tmp_path, num_steps):
    write_run(tmp_path, num_steps=num_steps, num_warmup=0)
    report = opened()
    assert ("no optimizer step yet" in report.texts("#how")[0]) == (num_steps == 0)
    assert ("Gradient norm" in report.titles()) == (num_steps > 1)  # step 0 is a ghost


def test_a_run_that_died_in_its_warmup_and_one_with_one_evaluation(opened, tmp_path):
    write_run(tmp_path, num_steps=10)
    assert "Gradient norm" in opened().titles()
    write_run(tmp_path, num_steps=30)
    report = opened()  # one evaluation is a tile and no chart
    assert "Evaluation: test" in "".join(report.texts(".tile")) and "Evaluation: test" not in report.titles()


def test_a_hostile_text_stays_text(opened, tmp_path):
    write_run(tmp_path, num_steps=2, **{"eval/<b>&/mean@1": 0.5})
    hostile, state = cut(HOSTILE, 500), {"ghost_steps": 0, "last_step": 1}
    texts = dict.fromkeys(("sample", "prompt", "response", "answer", "excluded"), hostile)
    with MetricsWriter(tmp_path, MetricsConfig(), 3, True, state) as writer:
        facts = dict(finish_reason="stop", response_tokens=2, weight_version=3, reward=1.0, rewards={HOSTILE[:9]: 1.0})
        recorded = Completion(source=f"eval/{hostile}", **facts, **texts)
        writer.write({"step": 2, "step_kind": "REAL", "phase": "rl"}, [recorded])
    report = opened(HOSTILE)
    assert "Evaluation: <b>&" in "".join(report.texts(".tile"))
    report.page.evaluate("document.getElementById('tab-rollouts').click()")
    report.page.wait_for("document.querySelectorAll('.completion').length", 1)
    escapes = {"\x1b": "\\u{1b}", "\x00": "\\u{0}", "\u202e": "\\u{202e}"}
    shown = HOSTILE.translate(str.maketrans(escapes))
    assert report.texts(".prompt") + report.texts(".completion") == [shown] * 2
    assert report.page.evaluate("document.querySelectorAll('img').length + document.title") == f"0{tmp_path.name}"


def test_running_means_stay_in_their_phase_and_spikes_survive_thinning(page, opened, tmp_path):
    write_run(tmp_path, num_steps=3)
    opened()
    values = np.random.default_rng(1).normal(size=40)
    for window in (1, 3, 5, 61):
        near = [values[max(0, i - window // 2) : i + window // 2 + 1] for i in range(40)]
        means = page.evaluate(f"runningMean({values.tolist()}, {window})")
        np.testing.assert_allclose(means, [part.mean() for part in near], rtol=1e-12, atol=1e-15)
    step = "Array.from({ length: 20 }, (_, i) => [i, Number(i >= 10)])"
    assert page.evaluate(f"smoothed({step}, [0, 10]).every(([i, mean]) => mean === Number(i >= 10))") is True
    spike = "Array.from({ length: 20000 }, (_, i) => Number(i === 12345))"
    assert page.evaluate(f"thinned({spike}).includes(12345) && thinned({spike}).length <= 602") is True
    ticks = page.evaluate("[ticksBetween(0, 0.93), ticksBetween(-3, 12)]")
    assert ticks == [[0, 0.2, 0.4, 0.6, 0.8, 1], [-5, 0, 5, 10, 15]]
    for each in ([0.0], [5.0, 5.0], [-2.0], [1e-12, 3e-12], [-1e9, 1e9]):
        low, high = page.evaluate(f"(({{ low, high }}) => [low, high])(linearAxis({each}))")
        assert low <= min(each) <= max(each) <= high and low < high
    ends = [page.evaluate(f"linearAxis([0.62, 0.69], {close}).low") for close in ("false", "true")]
    assert ends == [0, 0.62] and page.evaluate("linearAxis([0.3, 0.69], true).low") == 0
    assert page.evaluate("[0, 0.05, 340, 15000, 1.2e6, 3e9].map(tickText)") == ["0", "0.05", "340", "15k", "1.2M", "3G"]
    assert page.evaluate("[4.2, 185, 7620].map(duration)") == ["4.2 s", "3 min 05 s", "2 h 07 min"]
