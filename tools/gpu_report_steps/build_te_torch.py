"""Builds the wheel of transformer_engine_torch for the torch of a Python environment, without a GPU or a CUDA toolkit.

    .venv-gpu-trial/bin/pip install "nvidia-cuda-nvcc==13.0.*" "nvidia-cuda-cccl==13.0.*" ninja pybind11 wheel
    .venv-gpu-trial/bin/python tools/gpu_report_steps/build_te_torch.py --out wheels

The index has its source alone. Compiler and headers come from NVIDIA's packages beside torch, in nvidia/cu13, put
together here as the toolkit that the build expects. 13 minutes of processor time; the wheel has 1 MB.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import sysconfig
import tempfile

VERSION = "2.20.2"


def toolkit(nvidia: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Make a toolkit's folder of links: libraries under the names that a linker asks for. Raises SystemExit."""
    source = nvidia / "cu13"
    if not (source / "bin" / "nvcc").exists():
        raise SystemExit(f'build_te_torch.py: {source} has no nvcc; pip install "nvidia-cuda-nvcc==13.0.*"')
    for name in ("bin", "include", "nvvm"):
        (folder / name).symlink_to(source / name)
    (folder / "lib64").mkdir()
    for path in (source / "lib").glob("*.so*"):
        (folder / "lib64" / f"{path.name.split('.so')[0]}.so").symlink_to(path)
    return folder


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: .venv-gpu-trial/bin/python tools/gpu_report_steps/build_te_torch.py --out wheels",
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="FOLDER")
    parser.add_argument("--jobs", type=int, default=2, help="compilers side by side, 2 GB of memory each (default 2)")
    given = parser.parse_args(arguments)
    nvidia = pathlib.Path(sysconfig.get_path("purelib")) / "nvidia"
    with tempfile.TemporaryDirectory() as folder:
        home = toolkit(nvidia, pathlib.Path(folder))
        headers = [home / "include", nvidia / "cudnn" / "include", nvidia / "nccl" / "include"]
        environment = {
            **os.environ,
            "PATH": os.pathsep.join((str(pathlib.Path(sys.executable).parent), os.environ["PATH"])),
            "CUDA_HOME": str(home),
            "MAX_JOBS": str(given.jobs),
            "CPLUS_INCLUDE_PATH": os.pathsep.join(map(str, headers)),
            "CXXFLAGS": "-Wno-interference-size",
            "NVTE_PYTORCH_FORCE_BUILD": "TRUE",
            "NVTE_WITH_NCCL_EP": "0",
        }
        command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-binary", ":all:"]
        command += ["--wheel-dir", str(given.out), f"transformer_engine_torch=={VERSION}"]
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
