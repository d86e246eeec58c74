"""Checks the arguments, settings, padding, comparison and tables of tools/benchmarks/update.py.

The whole of it is run where trl is installed.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.patience import patient

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "benchmarks"))

import update as benchmark_update  # noqa: E402
from update_compare import (  # noqa: E402
    BAR,
    FAMILIES,
    Contender,
    GradientsDiffer,
    best_of,
    compare_gradients,
    gradient_error,
    time_contenders,
)
from update_trl import INSTALL, LAYOUTS, make_microbatches, pad_rows, padded_tokens, trl_settings  # noqa: E402

from megatron_rl.types import Sample  # noqa: E402

needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason=f"trl is not installed: {INSTALL}")
SMALL = ["--groups", "8", "--hidden", "64", "--layers", "1", "--vocab", "128", "--mean-tokens", "24", "--repeats", "1"]
SMALL += ["--trl-samples", "2", "4", "8", "--max-tokens-per-microbatch", "128", "256"]


# ---- arguments ------------------------------------------------------------------------------------------------------


def test_settings_are_sorted_and_counted_once() -> None:
    given = benchmark_update.parse(
        ["--trl-samples", "16", "4", "8", "8", "--max-tokens-per-microbatch", "4096", "1024"]
    )
    assert given.trl_samples == [4, 8, 16] and given.max_tokens_per_microbatch == [1024, 4096]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--trl-samples", "4", "8", "8"], "at least three"),
        (["--groups", "5", "--trl-samples", "2", "4", "8"], "--trl-samples 8 must divide the batch's 20 samples"),
        (["--dead-share", "1.0"], "--dead-share 1.0 leaves no signal in 40 groups"),
        (["--groups", "4", "--dead-share", "0.9"], "--dead-share 0.9 leaves no signal in 4 groups"),
        (["--dead-share", "-0.1"], "--dead-share -0.1"),
        (["--hidden", "100"], "--hidden 100 must be a multiple of 64"),
        (["--group-size", "1"], "--group-size 1 must be at least 2"),
        (["--max-tokens-per-microbatch", "4"], "--max-tokens-per-microbatch 4"),
        (["--threads", "0"], "--threads 0 must be at least 1"),
        (["--repeats", "0"], "--repeats 0 must be at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(arguments, said, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        benchmark_update.parse(arguments)
    assert ended.value.code == 2 and said in " ".join(capsys.readouterr().err.split())


def test_missing_trl_names_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)  # what makes `import trl` fail, installed or not
    assert benchmark_update.main([]) == 2
    assert INSTALL in capsys.readouterr().err


# ---- TRL's settings and padding -------------------------------------------------------------------------------------


def make_samples(lengths: list[int]) -> list[Sample]:
    """Make samples whose prompts are a quarter of their tokens.

    Tokens of sample i are 100 · (i + 1) + position, so that each is found again.
    """
    return [
        Sample(
            sample_id=f"s{i}",
            prompt_tokens=max(2, n // 4),
            token_ids=100 * (i + 1) + np.arange(n),
            loss_mask=np.ones(n - max(2, n // 4), dtype=bool),
            logprobs=np.zeros(n - max(2, n // 4), dtype=np.float32),
        )
        for i, n in enumerate(lengths)
    ]


def test_every_size_in_every_layout() -> None:
    settings = trl_settings([4, 8, 16])
    assert len({x.name for x in settings}) == len(settings) == 10
    assert {(x.samples, x.layout) for x in settings} == {(size, layout) for size in (4, 8, 16) for layout in LAYOUTS}
    assert sum(x.as_shipped for x in settings) == 4 and [x.name for x in settings if x.checkpointing] == [
        "TRL 8 samples, batch, checkpointing"
    ]
    more = trl_settings([4, 8, 16], compiled=True)
    assert more[:10] == settings and len({x.name for x in more}) == 16 and all(x.compiled for x in more[10:])


def test_prompts_are_padded_left_and_responses_right() -> None:
    rows = [np.array([7, 8]), np.array([9])]
    ids, mask = pad_rows(rows, left=True, width=3)
    assert ids.tolist() == [[0, 7, 8], [0, 0, 9]] and mask.tolist() == [[0, 1, 1], [0, 0, 1]]
    ids, mask = pad_rows(rows, left=False, width=2)
    assert ids.tolist() == [[7, 8], [9, 0]] and mask.tolist() == [[1, 1], [1, 0]]
    with pytest.raises(ValueError, match="a row of 2 tokens does not fit a width of 1"):
        pad_rows(rows, left=True, width=1)


@pytest.mark.parametrize("setting", trl_settings([2, 4, 8]), ids=lambda x: x.name)
def test_microbatches_hold_every_sample_once_with_its_advantage(setting) -> None:
    samples, advantages = make_samples([8, 40, 12, 21, 9, 33, 16, 27]), np.arange(8) / 8
    made = make_microbatches(samples, advantages, setting)
    found = {}
    for part in made:
        assert len(part["prompt_ids"]) == setting.samples
        # of the whole batch, in each
        assert part["num_items_in_batch"] == sum(len(x.token_ids) - x.prompt_tokens for x in samples)
        for row in range(setting.samples):
            prompt = part["prompt_ids"][row][part["prompt_mask"][row].bool()].tolist()
            response = part["completion_ids"][row][part["completion_mask"][row].bool()].tolist()
            found[prompt[0]] = (prompt + response, len(prompt), part["advantages"][row].item())
    wanted = {
        int(x.token_ids[0]): (x.token_ids.tolist(), x.prompt_tokens, a)
        for x, a in zip(samples, advantages, strict=True)
    }
    assert found == wanted


def test_layouts_pad_less_and_less() -> None:
    samples = make_samples([8, 40, 12, 21, 9, 33, 16, 27])
    sizes = {
        x.layout: padded_tokens(make_microbatches(samples, np.zeros(8), x))
        for x in trl_settings([2])
        if not x.checkpointing
    }
    assert sizes["batch"] == 8 * (10 + 30)  # the longest prompt and the longest response, for every sample
    assert sizes["sorted"] < sizes["trimmed"] < sizes["batch"]


# ---- gradients ------------------------------------------------------------------------------------------------------


def gradients() -> dict[str, torch.Tensor]:
    return {"a.weight": torch.tensor([[3.0, 0.0], [0.0, 0.0]]), "b.bias": torch.tensor([4.0])}


def test_error_is_relative_to_the_norm_over_all_weights() -> None:
    found = gradients()
    found["b.bias"] += 0.5
    assert gradient_error(gradients(), gradients())["error"] == 0.0
    assert gradient_error(found, gradients()) == {"error": 0.1, "norm": 5.0, "worst": "b.bias"}


def test_weights_of_another_model_are_refused() -> None:
    other = gradients()
    del other["b.bias"]
    with pytest.raises(GradientsDiffer, match="missing \\['b.bias'\\]"):
        gradient_error(other, gradients())
    with pytest.raises(GradientsDiffer, match="surplus \\['b.bias'\\]"):
        gradient_error(gradients(), other)
    with pytest.raises(GradientsDiffer, match="a.weight.*\\(1, 4\\)"):
        gradient_error({**gradients(), "a.weight": torch.zeros(1, 4)}, gradients())


def contender(family: str, name: str, gradient=gradients, update=lambda: None) -> Contender:
    return Contender(family=family, name=name, tokens=10, gradient=gradient, update=update)


def compare(**wrong: dict) -> list[dict]:
    """Compare one contender in each family, all with the same gradient but for those given."""
    names = {"trl_shipped": "x", "trl_helped": "y", "dense": "z", "skip": "w"}
    each = {family: wrong.get(family, gradients()) for family in names}
    return compare_gradients([contender(family, name, each[family].copy) for family, name in names.items()], BAR)


def test_each_setting_is_compared_with_the_other_side() -> None:
    assert [(x["setting"], x["against"], x["error"]) for x in compare()] == [
        ("x", "z", 0),
        ("y", "z", 0),
        ("z", "x", 0),
        ("w", "x", 0),
    ]


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("wrong", [4.0 * (1 + 2 * BAR), -4.0, float("nan"), float("inf")])
def test_one_wrong_gradient_on_either_side_is_found(family, wrong) -> None:
    with pytest.raises(GradientsDiffer, match="nothing was measured"):
        compare(**{family: {**gradients(), "b.bias": torch.tensor([wrong])}})


def test_no_gradient_is_no_agreement() -> None:
    zero = {name: torch.zeros_like(x) for name, x in gradients().items()}
    with pytest.raises(GradientsDiffer, match="nothing was measured"):
        compare(**dict.fromkeys(FAMILIES, zero))


# ---- times and tables -----------------------------------------------------------------------------------------------


def test_contenders_take_turns() -> None:
    turns: list[str] = []
    both = [contender(f, n, update=lambda n=n: turns.append(n)) for f, n in (("dense", "z"), ("skip", "w"))]
    rows = time_contenders(both, repeats=3, tokens=100)
    assert turns == ["z", "w"] * 4  # one round to warm up
    for row in rows:
        assert len(row["all_s"]) == 3 and row["s"] == sorted(row["all_s"])[1] and row["tokens_per_s"] == 100 / row["s"]


def make_rows(**seconds: float) -> list[dict]:
    return [
        {
            "family": family,
            "setting": f"{family} {factor}",
            "positions": 7,
            "s": s * factor,
            "cpu_s": s * factor / 2,
            "tokens_per_s": 100 / s,
        }
        for family, s in seconds.items()
        for factor in (2, 1)
    ]


def test_best_is_the_fastest_of_each_family() -> None:
    best = best_of(make_rows(trl_shipped=8.0, trl_helped=6.0, dense=4.0, skip=2.0))
    assert [row["setting"] for row in best.values()] == ["trl_shipped 1", "trl_helped 1", "dense 1", "skip 1"]
    assert [row["over_shipped"] for row in best.values()] == [1.0, 8 / 6, 2.0, 4.0]
    assert (
        [row["over_helped"] for row in best.values()]
        == [6 / 8, 1.0, 1.5, 3.0]
        == [row["cpu_over_helped"] for row in best.values()]
    )


def test_trl_is_not_slower_for_the_help() -> None:
    best = best_of(make_rows(trl_shipped=5.0, trl_helped=6.0, dense=4.0, skip=2.0))
    assert best["trl_helped"]["setting"] == "trl_shipped 1" and best["dense"]["over_helped"] == 5 / 4


def test_tables_say_what_was_compared_and_what_trl_ran() -> None:
    from rich.console import Console

    rows = make_rows(trl_shipped=8.0, trl_helped=6.0, dense=4.0, skip=2.0)
    result = {
        "dead_share": 0.75,
        "dense_tokens": 100,
        "samples": 16,
        "samples_without_signal": 12,
        "samples_forwarded_by_trl": 16,
        "gradient_error": 3e-7,
        "gradients": [{"setting": x["setting"], "error": 3e-7} for x in rows],
        "best": best_of(rows),
        "settings": rows,
    }
    console = Console(width=150, file=io.StringIO())
    console.print(benchmark_update.summary_table(result), benchmark_update.settings_table(result))
    printed = console.file.getvalue()
    assert "75 % of the groups" in printed and "3.0e-07 (bar 1e-05)" in printed
    assert "ran 16 of 16 samples, 12 of them with zero advantage" in " ".join(printed.split())
    assert all(name in printed for name in FAMILIES.values()) and all(x["setting"] in printed for x in rows)


# ---- the whole, with trl --------------------------------------------------------------------------------------------


def run_tool(*arguments: str) -> subprocess.CompletedProcess:
    """Run the tool in a process of its own: torch.distributed and accelerate's state are one per process."""
    command = [sys.executable, str(ROOT / "tools" / "benchmarks" / "update.py"), *SMALL, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=patient(600))


@needs_trl
@pytest.mark.long
def test_gradients_agree_and_every_setting_is_measured(tmp_path: pathlib.Path) -> None:
    done = run_tool("--dead-share", "0", "0.75", "--json", str(tmp_path / "update.json"))
    assert done.returncode == 0, done.stderr[-2000:]
    written = json.loads((tmp_path / "update.json").read_text())
    for result, dead in zip(written["results"], (0, 24), strict=True):
        assert (
            result["samples_without_signal"] == dead and result["samples_forwarded_by_trl"] == result["samples"] == 32
        )
        assert result["gradient_error"] < BAR and len(result["gradients"]) == len(result["settings"]) == 10 + 4
        assert all(x["s"] > 0 and x["tokens_per_s"] == result["dense_tokens"] / x["s"] for x in result["settings"])
        ours = {x["family"]: x["positions"] for x in result["settings"] if x["family"] in ("dense", "skip")}
        assert ours["dense"] == result["dense_tokens"] and (ours["skip"] < ours["dense"]) == bool(dead)
    assert written["versions"]["trl"] and written["settings"]["threads"] == 1


@needs_trl
@pytest.mark.long
@pytest.mark.parametrize("fault", benchmark_update.FAULTS)
def test_planted_fault_is_found_and_nothing_measured(fault, tmp_path: pathlib.Path) -> None:
    done = run_tool("--fault", fault, "--json", str(tmp_path / "update.json"))
    assert done.returncode == 1 and "nothing was measured" in done.stderr, done.stderr[-2000:]
    assert not (tmp_path / "update.json").exists() and "tokens/s" not in done.stdout
