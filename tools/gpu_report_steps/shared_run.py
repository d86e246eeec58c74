"""Runs one rank of a training run whose ranks may share a GPU, and leaves its process id for tests of faults.

torchrun --nproc_per_node 2 tools/gpu_report_steps/shared_run.py --pids FOLDER --share-gpu -- --config FILE …
"""

from __future__ import annotations

import argparse
import os
import pathlib
import runpy
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: torchrun --nproc_per_node 2 tools/gpu_report_steps/shared_run.py --pids /tmp/pids -- "
        "--config examples/quickstart/quickstart.yaml",
    )
    parser.add_argument("--pids", type=pathlib.Path, required=True, help="folder for rank<N>.pid")
    parser.add_argument("--share-gpu", action="store_true", help="meet over NCCL's sockets on one GPU")
    parser.add_argument("arguments", nargs="*", help="those of megatron_rl.train")
    given = parser.parse_args()
    rank = os.environ.get("RANK")
    if rank is None:
        parser.error("RANK is not set: start it by torchrun")
    if given.share_gpu:
        from acceptance_matrix.shared_gpu import share

        share()
    given.pids.mkdir(parents=True, exist_ok=True)
    (given.pids / f"rank{rank}.pid").write_text(str(os.getpid()))
    sys.argv = ["megatron_rl.train", *given.arguments]
    runpy.run_module("megatron_rl.train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
