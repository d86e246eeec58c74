"""Checks tools/pack_gpu_report.py as far as it asks no package index: its folder, its versions, its refusals."""

from __future__ import annotations

import pathlib
import re
import sys
import tarfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import pack_gpu_report  # noqa: E402

MEGATRON = "megatron_core-0.19.2-cp312-cp312-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl"


def test_requirements_are_the_versions_of_the_wheels(tmp_path: pathlib.Path) -> None:
    for name in (MEGATRON, "rich-15.0.0-py3-none-any.whl", "psutil-7.2.2-cp36-abi3-manylinux2010_x86_64.whl"):
        (tmp_path / name).touch()
    assert pack_gpu_report.requirements(tmp_path) == ["megatron-core==0.19.2", "psutil==7.2.2", "rich==15.0.0"]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["PyYAML-6.0-cp311-cp311-manylinux2014_x86_64.whl"], "is not for Python 3.12 on x86-64 Linux"),
        (["PyYAML-6.0-cp312-cp312-linux_x86_64.whl"], "is not for Python 3.12 on x86-64 Linux"),
        (["rich-15.0.0-py3-none-any.whl", "rich-14.0.0-py3-none-any.whl"], "holds rich twice"),
    ],
)
def test_wheels_that_would_not_install_are_refused(tmp_path: pathlib.Path, names: list[str], says: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(SystemExit, match=re.escape(says)):
        pack_gpu_report.requirements(tmp_path)


def test_a_folder_with_other_files_is_left_alone(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(SystemExit):
        pack_gpu_report.main(["--out", str(tmp_path)])
    assert "thesis.tex, which this tool did not put there" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").exists()


def test_every_requirement_of_setup_is_packed_or_comes_with_torch() -> None:
    text = (ROOT / "setup.py").read_text().split("install_requires=[")[1].split("]")[0]
    wanted = {re.match(r"[\w-]+", line)[0] for line in re.findall(r'"([^"]+)"', text)}
    packed = {re.match(r"[\w-]+", line)[0].lower() for line in pack_gpu_report.PACKAGES}
    there = {"torch", "triton", "transformers", "tokenizers", "safetensors", "numpy"}
    assert wanted - packed - there == {"tensorboard"}  # imported only where a run asks for it


def test_the_project_is_head(tmp_path: pathlib.Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this tree is no git repository")
    pack_gpu_report.pack_project(tmp_path)
    with tarfile.open(tmp_path / "project.tar.gz") as file:
        assert {"setup.py", "megatron_rl/train.py", "tools/acceptance.py"} <= set(file.getnames())
