"""Runs scripts one after another in one process: what the first has imported is there for the next.

A line on the standard input names each, as {"words": ["script.py", "--json", "out.json"], "log": "log.txt"}; a line on
the standard output answers that it ended with 0 and left nothing that would change another's figures. Any other end is
the end of this process, as if the script had one of its own: by its exit code, its traceback or its signal.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import runpy
import sys
import types

KEPT_BYTES = 2**27  # of a GPU's memory: the workspaces of cuBLAS, which a process of its own would take too


def run(words: list[str]) -> None:
    """Run the script as `python` would, and forget it and the modules that lie beside it; other ends raise."""
    paths, variables = sys.path[:], dict(os.environ)
    sys.argv, sys.path[0] = words, str(pathlib.Path(words[0]).resolve().parent)
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    folders = {*sys.path} - {*paths[1:]}  # the script's own, and what it has added
    for name, module in [*sys.modules.items()]:
        file = vars(module).get("__file__") if isinstance(module, types.ModuleType) and name != "__main__" else None
        if file and os.path.dirname(file) in folders:
            del sys.modules[name]
    sys.path[:] = paths
    os.environ.clear()
    os.environ.update(variables)


def left() -> str:
    """Free what the script has used, and return what it left that would change another's figures, or ""."""
    gc.collect()
    if "torch" not in sys.modules:
        return ""
    import torch

    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # which counts the shapes that it compiles for, and stops at some number
    found = {
        "a process group": torch.distributed.is_initialized(),
        "another default dtype": torch.get_default_dtype() != torch.float32,
        "deterministic kernels": torch.are_deterministic_algorithms_enabled(),
    }
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # pinned memory; torch 2.11 has no public name for it
        torch.cuda.reset_peak_memory_stats()
        found["memory on the GPU"] = torch.cuda.memory_allocated() > KEPT_BYTES
    return ", ".join(name for name, holds in found.items() if holds)


def main() -> int:
    argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="""example: echo '{"words": ["script.py"], "log": "log.txt"}' | python tools/gpu_report_steps/warm.py""",
    ).parse_args()
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")  # which what a script starts does not inherit
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for line in requests:
        request = json.loads(line)
        with open(request["log"], "ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        run(request["words"])
        kept = left()
        if kept:
            print(f"warm.py: the script left {kept}, so the next one gets another process", file=sys.stderr)
            return 0
        sys.stdout.flush()
        sys.stderr.flush()
        print("passed", file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
