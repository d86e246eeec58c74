"""The device that a process takes: never the CPU in silence on a host whose GPU does not work."""

import dataclasses
import logging
import os
import pathlib
import subprocess
import sys

import pytest

from megatron_rl.distributed import platform
from megatron_rl.distributed.platform import choose_device, huge_pages_on_request
from megatron_rl.errors import ConfigError

CDLL = "import ctypes; ctypes.CDLL"
TOO_OLD = "The NVIDIA driver on your system is too old (found version 12040)"


def choose(environment: dict[str, str], *, driver: bool, works: bool) -> str:
    return choose_device(environment, driver_loaded=driver, is_available=lambda: works, reason=lambda: TOO_OLD)


def test_the_device_is_the_one_that_works_or_was_asked_for_and_one_not_there_is_an_error():
    for environment, driver, works, device in (
        ({}, True, True, "cuda"),
        ({}, False, False, "cpu"),
        ({"MEGATRON_RL_DEVICE": "cuda"}, True, True, "cuda"),
        ({"MEGATRON_RL_DEVICE": "cpu"}, True, True, "cpu"),
        ({"MEGATRON_RL_DEVICE": "CPU"}, True, False, "cpu"),
        ({"CUDA_VISIBLE_DEVICES": ""}, True, False, "cpu"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, True, True, "cpu"),
        ({"CUDA_VISIBLE_DEVICES": "3"}, True, True, "cuda"),
    ):
        assert choose(environment, driver=driver, works=works) == device
    for device, message in (
        ("cuda", "MEGATRON_RL_DEVICE=cuda, and CUDA does not work here.*too old"),
        ("tpu", "MEGATRON_RL_DEVICE='tpu' is no device; set it to cpu or cuda"),
    ):
        with pytest.raises(ConfigError, match=message):
            choose({"MEGATRON_RL_DEVICE": device}, driver=False, works=False)


@pytest.mark.parametrize("environment", [{}, {"CUDA_VISIBLE_DEVICES": "0,1"}, {"MEGATRON_RL_DEVICE": "cuda"}])
def test_a_gpu_host_on_which_cuda_does_not_work_is_an_error_with_torchs_reason(environment):
    with pytest.raises(ConfigError) as error:
        choose(environment, driver=True, works=False)
    assert TOO_OLD in str(error.value) and "MEGATRON_RL_DEVICE=cpu" in str(error.value)


def its_modules() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]


@pytest.fixture
def planted(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """Plant a Transformer Engine that passes over its torch part's ImportError, as the real one does."""
    for name in its_modules():
        monkeypatch.delitem(sys.modules, name)  # restored afterwards
    monkeypatch.syspath_prepend(tmp_path)

    def plant(of_torch: str, of_top: str = "") -> None:
        part = tmp_path / "transformer_engine" / "pytorch"
        part.mkdir(parents=True)
        (part / "__init__.py").write_text(of_torch)
        top = "try:\n    from . import pytorch\nexcept ImportError:\n    pass\n"
        (part.parent / "__init__.py").write_text(of_top + top)

    yield plant
    for name in its_modules():
        del sys.modules[name]


@pytest.mark.parametrize(
    ("of_torch", "said"),
    [
        ("import not_inspected", "lacks the package not_inspected (ModuleNotFoundError: No module named 'not_"),
        (f"{CDLL}('libnccl_of_nobody.so.2')", "needs the library libnccl_of_nobody.so.2, which is not found (OSError"),
        ("raise FileNotFoundError('Could not find shared object file')", "is half-installed (FileNotFoundError: Could"),
    ],
)
def test_a_transformer_engine_that_breaks_megatron_core_ends_the_start_in_one_sentence(planted, of_torch, said):
    planted(of_torch)
    with pytest.raises(ImportError) as error:
        platform.check_transformer_engine()
    assert f"Megatron-Core cannot be imported: Transformer Engine {said}" in str(error.value)
    assert "python -m megatron_rl.doctor" in str(error.value)


def test_a_transformer_engine_that_megatron_core_takes_for_absent_ends_no_start(planted):
    planted("", of_top="import not_inspected\n")
    platform.check_transformer_engine()


def test_a_library_that_does_not_load_is_no_transformer_engine_and_is_logged(planted, monkeypatch, caplog):
    planted(f"{CDLL}('libnccl_of_nobody.so.2')")
    monkeypatch.setattr(platform, "HOST", dataclasses.replace(platform.HOST, device_type="cuda"))
    with caplog.at_level(logging.WARNING):
        assert platform.transformer_engine_importable.__wrapped__() is False
    assert "needs the library libnccl_of_nobody.so.2, which is not found" in caplog.text


@pytest.mark.parametrize("setting, wanted", [
    ("always [madvise] never\n", True), ("[always] madvise never\n", True), ("always madvise [never]\n", False),
    (None, False),
])
def test_huge_pages_are_asked_for_where_the_kernel_has_them(tmp_path, setting, wanted) -> None:
    file = tmp_path / "enabled"
    if setting is not None:
        file.write_text(setting)
    assert huge_pages_on_request(file) is wanted


@pytest.mark.parametrize("given", [None, "0"])
def test_a_process_on_a_cpu_asks_torch_for_huge_pages_unless_told_otherwise(given) -> None:
    """Before its first large tensor, since torch reads the variable then."""
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    environment |= {"MEGATRON_RL_DEVICE": "cpu"} | ({} if given is None else {"THP_MEM_ALLOC_ENABLE": given})
    code = "import os, megatron_rl.distributed.platform as p; print(os.environ.get('THP_MEM_ALLOC_ENABLE'), "
    code += "p.huge_pages_on_request(p.HUGE_PAGES))"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    value, has = found.stdout.split()
    assert value == (given or ("1" if has == "True" else "None"))
