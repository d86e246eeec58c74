"""Times a model's export and load by the number of ranks: all ranks their own files, against the main rank alone.

    python tools/benchmarks/model_files.py --model FOLDER                      # 1, 2 and 4 ranks of this host, gloo
    python tools/benchmarks/model_files.py --model FOLDER --host-mb-per-s 100  # as if each rank had a host of its own

alone: every tensor is gathered to the main rank's memory and written by it, the only way until 2026-11-28, which stays
       for hosts without a common file system. all: each rank writes its own files (weights/model_folder.py). The two
       take turns, --repeats times after one to warm up; medians of seconds. The bytes go to the page cache of this
       host's one disk, without a sync.
load:  each rank reads the slices of its own parameters, from a page cache that holds the files.

With --host-mb-per-s a writer sleeps until its bytes would have gone through at that bandwidth: a stand-in for hosts
whose storage is the bound, since ranks of one host share one disk. Layouts are those of LAYOUTS, without replicas.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
LAYOUTS = {1: (), 2: ("parallel.pipeline=2",), 4: ("parallel.tensor=2", "parallel.pipeline=2")}
BOUND_S = 1800
MB = 10**6


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog="example: python tools/benchmarks/model_files.py --model FOLDER"
    )
    parser.add_argument("--model", type=pathlib.Path, required=True, help="a Hugging Face folder of a dense model")
    parser.add_argument("--ranks", type=int, nargs="+", default=sorted(LAYOUTS), choices=sorted(LAYOUTS))
    parser.add_argument("--repeats", type=int, default=5, help="after one to warm up")
    parser.add_argument("--host-mb-per-s", type=float, help="bandwidth of each rank's storage, stood in for by sleeps")
    parser.add_argument("--json", type=pathlib.Path, help="also write what is printed there")
    parser.add_argument("--out", type=pathlib.Path, help=argparse.SUPPRESS)  # of one rank, started by this program
    given = parser.parse_args(arguments)
    if given.repeats < 1:
        parser.error(f"--repeats {given.repeats} must be at least 1")
    if given.host_mb_per_s is not None and given.host_mb_per_s <= 0:
        parser.error(f"--host-mb-per-s {given.host_mb_per_s} must be above 0")
    return given


def rank_part(options: argparse.Namespace) -> None:
    """Time one number of ranks, on one of them; the main rank writes what it has found."""
    import torch.distributed as dist

    from megatron_rl.backend import MegatronBackend
    from megatron_rl.config import load_config
    from megatron_rl.weights import model_folder
    from megatron_rl.weights.export import load_weights
    from megatron_rl.weights.file_plan import FileSizes, plan_files
    from megatron_rl.weights.reader import HuggingFaceReader

    world = int(os.environ["WORLD_SIZE"])
    backend = MegatronBackend(load_config(None, [f"model.hf_path={options.model}", *LAYOUTS[world]]))
    parameters, folder = backend._exported(), options.out.with_suffix(".folder")
    if options.host_mb_per_s:
        throttle(options.host_mb_per_s * MB)
    plan = plan_files(parameters.shape, parameters.topology, parameters.dtype, FileSizes())
    chunks = [chunk.module for chunk in backend.chunks]
    ways: dict[str, Callable[[], None]] = {
        "alone": lambda: model_folder._write_alone(parameters, backend.hf_config, folder),
        "all": lambda: model_folder._write_own(parameters, plan, folder),
        "load": lambda: load_weights(chunks, backend.shape, backend.topology, HuggingFaceReader(options.model)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.repeats + 1):
        for name, way in ways.items():
            if backend.topology.is_main:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
            dist.barrier()
            started = time.perf_counter()
            way()
            dist.barrier()
            if turn:
                seconds[name].append(time.perf_counter() - started)
    if backend.topology.is_main:
        shutil.rmtree(folder)
        num_bytes = sum(file.num_bytes for file in plan.files)
        options.out.write_text(json.dumps({"seconds": seconds, "bytes": num_bytes, "files": len(plan.files)}))
    backend.close()


def throttle(bytes_per_s: float) -> None:
    """Have this process's writers take as long as their bytes do at a bandwidth."""
    import safetensors.torch

    from megatron_rl.weights.shards import FileWriter

    def slowed(write: Callable[..., None], size_of: Callable[..., int]) -> Callable[..., None]:
        def timed(*given, **named) -> None:
            until = time.perf_counter() + size_of(*given) / bytes_per_s
            write(*given, **named)
            time.sleep(max(0.0, until - time.perf_counter()))

        return timed

    FileWriter.add = slowed(FileWriter.add, lambda writer, name, tensor: tensor.nbytes)
    safetensors.torch.save_file = slowed(
        safetensors.torch.save_file, lambda tensors, path: sum(x.nbytes for x in tensors.values())
    )


def measure(options: argparse.Namespace, ranks: int, folder: pathlib.Path) -> dict:
    """Return one number of ranks' times, in processes of their own."""
    out = folder / f"{ranks}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc_per_node", str(ranks), __file__]
    command += ["--model", str(options.model), "--repeats", str(options.repeats), "--out", str(out)]
    if options.host_mb_per_s:
        command += ["--host-mb-per-s", str(options.host_mb_per_s)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=BOUND_S, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}\n{done.stderr[-4000:]}")
    return json.loads(out.read_text())


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.out:
        rank_part(options)
        return
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            found[ranks] = measure(options, ranks, pathlib.Path(folder))
    first = next(iter(found.values()))
    bound = f", {options.host_mb_per_s:g} MB/s a rank (sleeps)" if options.host_mb_per_s else ""
    print(f"{first['bytes'] / MB:.0f} MB, medians of {options.repeats} turns in s (min to max){bound}")
    print("| ranks | files | alone | all | alone / all, pair by pair | load |\n|---|---|---|---|---|---|")
    for ranks, of in found.items():
        times = of["seconds"]
        ratio = statistics.median(a / b for a, b in zip(times["alone"], times["all"], strict=True))
        cells = [f"{statistics.median(x):.2f} ({min(x):.2f} to {max(x):.2f})" for x in times.values()]
        print(f"| {ranks} | {of['files']} | {cells[0]} | {cells[1]} | {ratio:.2f} | {cells[2]} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
