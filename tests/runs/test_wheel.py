"""A wheel made from the sdist, as `python -m build` makes it, holds the whole package and runs each of its commands."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser

import pytest

from megatron_rl import __version__
from megatron_rl.commands.command import HERE, VERBS
from tests.patience import HANG_S, patient
from tests.runs.command import ROOT, said_by

BOUND_S = patient(4 * HANG_S)
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
EPOCH = str(1_700_000_000)  # what dates the files of a wheel, whenever it is made
HELP = (
    *("train", "serve", "watch", "serve-vllm", "convert", "verify", "check", "simulate", "doctor", "new", "pod"),
    "translate", "check-decided",
)


def build(kind: str, source: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    """Call setuptools' own backend in the source, as a build front end does; return the file that it made."""
    said_by([sys.executable, "-c", BUILD, f"build_{kind}", str(out)], source, BOUND_S, SOURCE_DATE_EPOCH=EPOCH)
    (made,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return made


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path]:
    """The wheel of a copy of the tree, and the one of the sdist of that copy."""
    folder = tmp_path_factory.mktemp("wheels")
    tree, out, second = folder / "tree", folder / "out", folder / "second"
    shutil.copytree(ROOT / "megatron_rl", tree / "megatron_rl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, tree / name)
    out.mkdir()
    second.mkdir()
    with tarfile.open(build("sdist", tree, out)) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return build("wheel", tree, out), build("wheel", unpacked, second)


def contents(wheel: pathlib.Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_of_the_sdist_is_the_wheel_of_the_tree_and_holds_every_file_of_the_package(wheels) -> None:
    of_tree, of_sdist = map(contents, wheels)
    package = {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for path in (ROOT / "megatron_rl").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert of_sdist == of_tree and wheels[0].read_bytes() == wheels[1].read_bytes()
    assert {name: content for name, content in of_sdist.items() if name.startswith("megatron_rl/")} == package
    assert all(f"megatron_rl/commands/templates/slurm/{name}" in package for name in ("job.sh", "node.sh"))


def test_the_metadata_names_licence_links_and_types(wheels) -> None:
    packed = contents(wheels[1])
    (metadata,) = (Parser().parsestr(text.decode()) for name, text in packed.items() if name.endswith("/METADATA"))
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown" and metadata["Version"] == __version__
    assert [packed[name] for name in packed if name.endswith("/licenses/LICENSE")] == [(ROOT / "LICENSE").read_bytes()]
    links = dict(link.split(", ") for link in metadata.get_all("Project-URL"))
    assert set(links) == {"Homepage", "Documentation", "Changelog", "Source", "Issues"}
    # a licence among the classifiers beside an expression is refused by the index (PEP 639)
    assert not [name for name in metadata.get_all("Classifier") if name.startswith("License ::")]
    assert "megatron_rl/py.typed" in packed and "Typing :: Typed" in metadata.get_all("Classifier")


def test_the_links_of_the_package_s_page_are_absolute_and_lead_to_files(wheels) -> None:
    (metadata,) = (text.decode() for name, text in contents(wheels[1]).items() if name.endswith("/METADATA"))
    head, _, page = metadata.partition("\n\n")
    (home,) = re.findall(r"^(?:Home-page|Project-URL: Homepage,) *:? *(\S+)$", head, re.M)
    links = re.findall(r"\]\(([^)]*)\)", page)
    assert len(links) == len(re.findall(r"\]\(", (ROOT / "README.md").read_text())) > 20 and "<img" not in page
    for link in [*links, *re.findall(r"^Project-URL: (?:Documentation|Changelog), (\S+)$", head, re.M)]:
        kind, place = re.fullmatch(rf"{re.escape(home)}/(raw|blob)/main/([^#]+)(?:#.*)?", link).groups()
        assert (ROOT / place).is_file() and (kind == "raw") == (pathlib.Path(place).suffix in (".png", ".svg")), link


@pytest.mark.long(seconds=120)
def test_every_command_runs_where_the_wheel_alone_is_installed(wheels, arithmetic: pathlib.Path, tmp_path) -> None:
    made = tmp_path / "environment"
    venv.create(made)
    (site,) = made.glob("lib/python*/site-packages")
    # what the package asks for, from this environment; its own .pth files, an editable installation's too, are not read
    (site / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(made / "bin/python"), "install", "--no-deps", "--no-index"]
    # --ignore-installed: an installation beside of the same version would count as this one
    said_by([*pip, "--ignore-installed", "--no-compile", "--quiet", str(wheels[1])], tmp_path, BOUND_S)
    work = tmp_path / "work"
    work.mkdir()

    def ours(*words: str) -> str:
        variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        given = dict(env=variables | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=BOUND_S)
        done = subprocess.run([str(made / "bin/megatron-rl"), *words], cwd=work, check=False, **given)
        assert done.returncode == 0, (words, done.stdout + done.stderr)
        return done.stdout

    where = [str(made / "bin/python"), "-c", "import megatron_rl; print(megatron_rl.__file__)"]
    assert said_by(where, work, BOUND_S, PYTHONPATH="").startswith(str(site))
    assert set(HELP) == {*VERBS, *HERE}
    for name in HELP:
        assert ours(name, "--help").startswith("usage: "), name
    assert "healthy" in ours("doctor")
    model = str(arithmetic / "model")
    assert "equal" in ours("convert", "roundtrip", model, "--quiet")
    ours("new", "mine", "--model", model)
    parts = pathlib.Path("megatron_rl/commands/templates/slurm")
    for part in ("job.sh", "node.sh"):
        assert (work / "mine/slurm" / part).read_bytes() == (ROOT / parts / part).read_bytes()
    assert f'VENV="${{VENV:-{made}}}"' in (work / "mine/job.sbatch").read_text()
    job = ("--config", "mine/run.yaml", "data.max_prompt_tokens=16", "rollout.max_response_tokens=4")
    one_gpu = ("--nodes", "1", "--gpus-per-node", "1")
    assert "mine on 1 GPUs" in ours("simulate", *job, *one_gpu)
    assert "mine on 1 GPUs" in ours("train", "--dry-run", *job, *one_gpu)
    assert "verdict: PASSED" in ours("verify", *job)
