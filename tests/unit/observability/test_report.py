"""Checks observability/report.py: one file holds the page and the run, and runs its own script alone."""

import base64
import gzip
import hashlib
import json
import math
import os
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from megatron_rl.config import MetricsConfig
from megatron_rl.observability.completions import Completion, cut
from megatron_rl.observability.metrics import MetricsWriter, read_metrics
from megatron_rl.observability.report import PAGE, main, write_report
from megatron_rl.observability.run_status import RunState, write_status

VOID = {"meta", "br", "hr", "img", "link", "input"}
HOSTILE = "\x1b[2J</dd></pre></script><script>alert(1)</script>\x00\u202eabc\u2066<!--<img src=x onerror=y>&amp;\ud800"


class Balanced(HTMLParser):
    """Keeps the texts of scripts and styles; fails on a tag that is closed out of order or never."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, str] = {}
        self.policy: str | None = None

    def handle_starttag(self, tag, attrs):
        facts = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("script", "style"):
            self.element = facts.get("id", tag)
            assert self.element not in self.texts, f"a second <{tag}>"
            self.texts[self.element] = ""
        if facts.get("http-equiv") == "Content-Security-Policy":
            self.policy = facts["content"]

    def handle_data(self, data):
        if self.open and self.open[-1] in ("script", "style"):
            self.texts[self.element] += data

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()


def write_run(run_dir, num_steps=60, **changes) -> None:
    random = np.random.default_rng(0)
    with MetricsWriter(run_dir, MetricsConfig(), num_steps, True) as writer:
        for step in range(num_steps):
            row = {"step": step, "step_kind": "GHOST" if step % 7 == 0 else "REAL", "phase": "rl"}
            row |= {"train/grad_norm": random.gamma(2.0), "reward/mean": step / num_steps}
            if step % 20 == 19:
                row["eval/test/mean@1"] = step / num_steps
            writer.write(row | changes)


def parsed(run_dir, config_yaml="run:\n  name: x\n") -> Balanced:
    write_report(run_dir / "metrics.jsonl", config_yaml, run_dir / "report.html")
    page = Balanced()
    page.feed((run_dir / "report.html").read_text(encoding="utf-8"))
    page.close()
    assert page.open == []
    return page


def inlined(run_dir, **more) -> dict:
    return json.loads(parsed(run_dir, **more).texts["report"])


def rows_in(report: dict) -> list[dict]:
    packed = json.loads(gzip.decompress(base64.b64decode(report["rows"])))
    cells = [dict(zip(packed["names"], values, strict=True)) for values in zip(*packed["columns"], strict=True)]
    return [{name: value for name, value in row.items() if value is not None} for row in cells]


def test_a_report_is_the_whole_page_and_runs_and_fetches_nothing_else(tmp_path):
    write_run(tmp_path)
    page = parsed(tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert not re.search(r"<link|@import|url\(|src=", text)
    for name in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(page.texts[name].encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in page.policy
    assert page.policy.startswith("default-src 'none'")
    files = {path.suffix: [] for path in PAGE.iterdir()}
    for path in PAGE.iterdir():
        files[path.suffix].append(path.read_text())
    assert page.texts["style"] == files[".css"][0] and all(each in page.texts["script"] for each in files[".js"])
    assert len(page.texts["script"]) == sum(map(len, files[".js"]))
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]


def test_every_row_is_there_with_six_digits_and_numbers_that_are_not_finite_by_name(tmp_path):
    write_run(tmp_path, **{"train/loss": 1 / 3, "train/kl": math.inf, "train/entropy": math.nan})
    found, rows = rows_in(inlined(tmp_path)), read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in found] == list(range(60))
    assert [row.keys() for row in found] == [row.keys() for row in rows]
    assert found[5]["train/loss"] == 0.333333
    assert (found[5]["train/kl"], found[5]["train/entropy"]) == ("inf", "nan")
    for mine, row in zip(found, rows, strict=True):
        assert mine["train/grad_norm"] == pytest.approx(row["train/grad_norm"], rel=5e-6)


def test_a_long_run_stays_small(tmp_path):
    """10,000 steps with 40 metrics, each of them noise: a few bytes a number."""
    random = np.random.default_rng(0)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step, values in enumerate(random.normal(size=(10_000, 40))):
            row = {"step": step, "step_kind": "REAL", "phase": "rl"} | {f"a/{i}": x for i, x in enumerate(values)}
            file.write(json.dumps(row) + "\n")
    report = inlined(tmp_path)
    assert len(rows_in(report)) == 10_000 and (tmp_path / "report.html").stat().st_size < 3_000_000


def test_the_state_is_told_by_the_status(tmp_path):
    write_run(tmp_path, num_steps=3)
    assert inlined(tmp_path)["facts"]["state"].items() >= {"name": "written", "total_steps": None}.items()
    write_status(tmp_path, RunState.RUNNING, 9)
    assert inlined(tmp_path)["facts"]["state"].items() >= {"name": "written", "total_steps": 9}.items()
    write_status(tmp_path, RunState.FAILED, 9)
    assert inlined(tmp_path)["facts"]["state"].items() >= {"name": "failed", "total_steps": 9}.items()
    (tmp_path / "status.json").write_text("{}")
    assert "status.json lacks the field state" in inlined(tmp_path)["facts"]["state"]["fault"]


def completion(step: int, source: str, **changes: object) -> Completion:
    facts = {"finish_reason": "stop", "response_tokens": 2, "weight_version": 3, "answer": None, "reward": 1.0}
    facts |= {"sample": f"{step}@0#1", "prompt": "3+4=", "response": "7", "rewards": {"math": 1.0}}
    return Completion(source=source, **(facts | changes))


def test_first_and_last_completions_are_in_it(tmp_path):
    """Of training and of each evaluation the first and the last recorded are in the page, at most eight each."""
    write_run(tmp_path, num_steps=3)
    state = {"ghost_steps": 0, "last_step": 2}
    with MetricsWriter(tmp_path, MetricsConfig(print_completions_every_rollouts=0), 9, True, state) as writer:
        for step in range(3, 7):
            sampled = [completion(step, "train", rollout=step, response=f"r{step}.{i}") for i in range(9)]
            sampled += [completion(step, "eval/x", response=f"e{step}")] if step < 5 else []
            writer.write({"step": step, "step_kind": "REAL", "phase": "rl"}, sampled)
    found = inlined(tmp_path)["completions"]
    shown = [each["response"] for each in found]
    assert shown == [*(f"r3.{i}" for i in range(8)), *(f"r6.{i}" for i in range(8)), "e3", "e4"]
    assert {(each["source"], each["recorded"]) for each in found} == {("train", 9), ("eval/x", 1)}


def test_a_hostile_text_stays_text(tmp_path):
    write_run(tmp_path, num_steps=2, **{"eval/</script><b>/mean@1": 0.5})
    hostile, state = cut(HOSTILE, 500), {"ghost_steps": 0, "last_step": 1}
    texts = dict.fromkeys(("sample", "prompt", "response", "answer", "excluded"), hostile)
    with MetricsWriter(tmp_path, MetricsConfig(), 3, True, state) as writer:
        recorded = completion(2, f"eval/{hostile}", rewards={HOSTILE[:20]: math.inf}, **texts)
        writer.write({"step": 2, "step_kind": "REAL", "phase": "rl"}, [recorded])
    report = inlined(tmp_path, config_yaml=HOSTILE)
    (found,) = report["completions"]
    assert found["prompt"] == hostile and found["rewards"] == {HOSTILE[:20]: None}
    assert report["facts"]["config"] == HOSTILE and "eval/</script><b>/mean@1" in rows_in(report)[0]
    page = (tmp_path / "report.html").read_text()
    assert page.count("<script") == page.count("</script") == 2 and "<img" not in page
    assert not re.search("[\x00-\x08\x1b\u202a-\u202e\u2066-\u2069]", page)


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_short_run(tmp_path, num_steps):
    write_run(tmp_path, num_steps=num_steps)
    report = inlined(tmp_path)
    assert (report["rows"] == "") == (num_steps == 0) and report["facts"]["name"] == tmp_path.name


def test_command_line(tmp_path, capsys):
    write_run(tmp_path, num_steps=12)
    assert main([str(tmp_path)]) == 0 and (tmp_path / "report.html").exists()
    assert main([str(tmp_path / "x")]) == 2
    assert "metrics.jsonl'; give the folder of a run" in capsys.readouterr().err
    for name, words in (("metrics.jsonl", "it is no regular file"), ("config.yaml", "is no regular file; text")):
        (tmp_path / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name)
        assert main([str(tmp_path)]) == 2 and words in capsys.readouterr().err
