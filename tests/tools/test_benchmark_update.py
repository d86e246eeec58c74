"""Checks settings, padding, comparison and tables of tools/benchmarks/update.py; the whole where trl is installed."""

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
import update as benchmark_update
import update_compare
from rich.console import Console
from update_compare import BAR, FAMILIES, GradientsDiffer
from update_trl import INSTALL, LAYOUTS, make_microbatches, pad_rows, padded_tokens, trl_settings

from megatron_rl.types import Sample
from tests.patience import patient
from tests.tools import BENCHMARKS, ROOT, words

needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason=f"trl is not installed: {INSTALL}")
SMALL = "--groups 8 --hidden 64 --layers 1 --vocab 128 --mean-tokens 24 --repeats 1 --trl-samples 2 4 8 \
    --max-tokens-per-microbatch 128 256"
LENGTHS = [8, 40, 12, 21, 9, 33, 16, 27]


def test_missing_trl_names_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)  # what makes `import trl` fail, installed or not
    assert benchmark_update.main([]) == 2 and INSTALL in capsys.readouterr().err


def make_samples(lengths: list[int]) -> list[Sample]:
    """Make samples whose prompts are a quarter of their tokens; token t of sample i is 100 · (i + 1) + t."""

    def sample(i: int, length: int) -> Sample:
        prompt = max(2, length // 4)
        mask, logprobs = np.ones(length - prompt, dtype=bool), np.zeros(length - prompt, dtype=np.float32)
        ids = 100 * (i + 1) + np.arange(length)
        return Sample(sample_id=f"s{i}", prompt_tokens=prompt, token_ids=ids, loss_mask=mask, logprobs=logprobs)

    return [sample(i, length) for i, length in enumerate(lengths)]


def test_every_size_is_there_once_in_every_layout() -> None:
    given = benchmark_update.parse(words("--trl-samples 16 4 8 8 --max-tokens-per-microbatch 4096 1024"))
    assert given.trl_samples == [4, 8, 16] and given.max_tokens_per_microbatch == [1024, 4096]
    settings = trl_settings([4, 8, 16])
    assert len({x.name for x in settings}) == len(settings) == 10
    assert {(x.samples, x.layout) for x in settings} == {(size, layout) for size in (4, 8, 16) for layout in LAYOUTS}
    assert sum(x.as_shipped for x in settings) == 4
    assert [x.name for x in settings if x.checkpointing] == ["TRL 8 samples, batch, checkpointing"]
    more = trl_settings([4, 8, 16], compiled=True)
    assert more[:10] == settings and len({x.name for x in more}) == 16 and all(x.compiled for x in more[10:])


def test_prompts_are_padded_left_responses_right_and_layouts_pad_less_and_less() -> None:
    rows = [np.array([7, 8]), np.array([9])]
    ids, mask = pad_rows(rows, left=True, width=3)
    assert ids.tolist() == [[0, 7, 8], [0, 0, 9]] and mask.tolist() == [[0, 1, 1], [0, 0, 1]]
    ids, mask = pad_rows(rows, left=False, width=2)
    assert ids.tolist() == [[7, 8], [9, 0]] and mask.tolist() == [[1, 1], [1, 0]]
    with pytest.raises(ValueError, match="a row of 2 tokens does not fit a width of 1"):
        pad_rows(rows, left=True, width=1)
    samples, settings = make_samples(LENGTHS), [x for x in trl_settings([2]) if not x.checkpointing]
    sizes = {x.layout: padded_tokens(make_microbatches(samples, np.zeros(8), x)) for x in settings}
    assert sizes["batch"] == 8 * (10 + 30)  # the longest prompt and the longest response, for every sample
    assert sizes["sorted"] < sizes["trimmed"] < sizes["batch"]


@pytest.mark.parametrize("setting", trl_settings([2, 4, 8]), ids=lambda x: x.name)
def test_microbatches_hold_every_sample_once_with_its_advantage(setting) -> None:
    samples, advantages = make_samples(LENGTHS), np.arange(8) / 8
    found = {}
    for part in make_microbatches(samples, advantages, setting):
        assert len(part["prompt_ids"]) == setting.samples
        assert part["num_items_in_batch"] == sum(len(x.token_ids) - x.prompt_tokens for x in samples)  # the whole batch
        for row in range(setting.samples):
            prompt = part["prompt_ids"][row][part["prompt_mask"][row].bool()].tolist()
            response = part["completion_ids"][row][part["completion_mask"][row].bool()].tolist()
            found[prompt[0]] = (prompt + response, len(prompt), part["advantages"][row].item())
    wanted = [(x.token_ids.tolist(), x.prompt_tokens, a) for x, a in zip(samples, advantages, strict=True)]
    assert found == {ids[0]: (ids, *rest) for ids, *rest in wanted}


def gradients() -> dict[str, torch.Tensor]:
    return {"a.weight": torch.tensor([[3.0, 0.0], [0.0, 0.0]]), "b.bias": torch.tensor([4.0])}


def test_error_is_relative_to_the_norm_over_all_weights_and_another_models_are_refused() -> None:
    found = gradients()
    found["b.bias"] += 0.5
    assert update_compare.gradient_error(gradients(), gradients())["error"] == 0.0
    assert update_compare.gradient_error(found, gradients()) == {"error": 0.1, "norm": 5.0, "worst": "b.bias"}
    one, both = {"a.weight": gradients()["a.weight"]}, gradients()
    for found, wanted, said in (
        (one, both, r"missing \['b.bias'\]"),
        (both, one, r"surplus \['b.bias'\]"),
        ({**both, "a.weight": torch.zeros(1, 4)}, both, r"a.weight.*\(1, 4\)"),
    ):
        with pytest.raises(GradientsDiffer, match=said):
            update_compare.gradient_error(found, wanted)


def contender(family: str, name: str, gradient=gradients, update=lambda: None) -> update_compare.Contender:
    return update_compare.Contender(family=family, name=name, tokens=10, gradient=gradient, update=update)


def compare(**wrong: dict) -> list[dict]:
    """Compare one contender in each family, all with the same gradient but for those given."""
    names = {"trl_shipped": "x", "trl_helped": "y", "dense": "z", "skip": "w"}
    each = {family: wrong.get(family, gradients()) for family in names}
    contenders = [contender(family, name, each[family].copy) for family, name in names.items()]
    return update_compare.compare_gradients(contenders, BAR)


def test_each_setting_is_compared_with_the_other_side_and_contenders_take_turns() -> None:
    assert [(x["setting"], x["against"]) for x in compare()] == [("x", "z"), ("y", "z"), ("z", "x"), ("w", "x")]
    assert {x["error"] for x in compare()} == {0}
    turns: list[str] = []
    both = [contender(f, n, update=lambda n=n: turns.append(n)) for f, n in (("dense", "z"), ("skip", "w"))]
    rows = update_compare.time_contenders(both, repeats=3, tokens=100)
    assert turns == ["z", "w"] * 4  # one round to warm up
    for row in rows:
        assert len(row["all_s"]) == 3 and row["s"] == sorted(row["all_s"])[1] and row["tokens_per_s"] == 100 / row["s"]


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("wrong", [4.0 * (1 + 2 * BAR), -4.0, float("nan"), float("inf")])
def test_one_wrong_gradient_on_either_side_is_found(family, wrong) -> None:
    with pytest.raises(GradientsDiffer, match="nothing was measured"):
        compare(**{family: {**gradients(), "b.bias": torch.tensor([wrong])}})
    zero = {name: torch.zeros_like(x) for name, x in gradients().items()}
    with pytest.raises(GradientsDiffer, match="nothing was measured"):  # no gradient is no agreement
        compare(**dict.fromkeys(FAMILIES, zero))


def make_rows(**seconds: float) -> list[dict]:
    return [
        {"family": x, "setting": f"{x} {n}", "positions": 7, "s": s * n, "cpu_s": s * n / 2, "tokens_per_s": 100 / s}
        for x, s in seconds.items() for n in (2, 1)
    ]


def test_best_is_the_fastest_of_each_family() -> None:
    best = update_compare.best_of(make_rows(trl_shipped=8.0, trl_helped=6.0, dense=4.0, skip=2.0))
    assert [row["setting"] for row in best.values()] == ["trl_shipped 1", "trl_helped 1", "dense 1", "skip 1"]
    assert [row["over_shipped"] for row in best.values()] == [1.0, 8 / 6, 2.0, 4.0]
    for key in ("over_helped", "cpu_over_helped"):
        assert [row[key] for row in best.values()] == [6 / 8, 1.0, 1.5, 3.0]
    # TRL is not slower for the help
    best = update_compare.best_of(make_rows(trl_shipped=5.0, trl_helped=6.0, dense=4.0, skip=2.0))
    assert best["trl_helped"]["setting"] == "trl_shipped 1" and best["dense"]["over_helped"] == 5 / 4


def test_tables_say_what_was_compared_and_what_trl_ran() -> None:
    rows = make_rows(trl_shipped=8.0, trl_helped=6.0, dense=4.0, skip=2.0)
    gradients = [{"setting": x["setting"], "error": 3e-7} for x in rows]
    result = {"dead_share": 0.75, "dense_tokens": 100, "samples": 16, "samples_without_signal": 12}
    result |= {"samples_forwarded_by_trl": 16, "gradient_error": 3e-7, "gradients": gradients}
    result |= {"best": update_compare.best_of(rows), "settings": rows}
    console = Console(width=150, file=io.StringIO())
    console.print(benchmark_update.summary_table(result), benchmark_update.settings_table(result))
    printed = console.file.getvalue()
    assert "75 % of the groups" in printed and "3.0e-07 (bar 1e-05)" in printed
    assert "ran 16 of 16 samples, 12 of them with zero advantage" in " ".join(printed.split())
    assert all(name in printed for name in [*FAMILIES.values(), *(x["setting"] for x in rows)])


def run_tool(*arguments: str) -> subprocess.CompletedProcess:
    """Run the tool in a process of its own: torch.distributed and accelerate's state are one per process."""
    command = [sys.executable, str(BENCHMARKS / "update.py"), *words(SMALL), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=patient(600))


@needs_trl
@pytest.mark.long
def test_gradients_agree_and_every_setting_is_measured(tmp_path: pathlib.Path) -> None:
    done = run_tool("--dead-share", "0", "0.75", "--json", str(tmp_path / "update.json"))
    assert done.returncode == 0, done.stderr[-2000:]
    written = json.loads((tmp_path / "update.json").read_text())
    for result, dead in zip(written["results"], (0, 24), strict=True):
        assert result["samples_without_signal"] == dead
        assert result["samples_forwarded_by_trl"] == result["samples"] == 32
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
