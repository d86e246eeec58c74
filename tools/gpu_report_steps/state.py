"""Measures moves of a trainer's state: offload and restore, a checkpoint, or the reference policy's swap.

    python tools/gpu_report_steps/state.py --part offload --json offload.json --work /tmp/work

A model of Qwen2.5-0.5B's shapes (the reference: 1.5B's), random weights, bfloat16, one process, after one update. The
state is compared to the bit. A step after a load is compared too, for the record alone: without run-wide determinism
kernels may add in another order.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

import torch
from clock import DEVICE, seconds_of, write

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "benchmarks"))
GIB = 2**30
SIZES = {
    "offload": ("qwen2.5-0.5b", "--groups 4 --mean-tokens 256 --max-tokens-per-microbatch 4096"),
    "checkpoint": ("qwen2.5-0.5b", "--groups 4 --mean-tokens 256 --max-tokens-per-microbatch 4096"),
    "reference": ("qwen2.5-1.5b", "--groups 2 --mean-tokens 256 --max-tokens-per-microbatch 4096"),
}
SMALL = "--hidden 64 --layers 2 --vocab 512 --groups 4 --mean-tokens 32 --max-tokens-per-microbatch 512"


class Trainer:
    """Holds a backend with a batch, and takes updates of it by tools/benchmarks/skip.py."""

    def __init__(self, part: str, *, small: bool) -> None:
        import skip

        name, sizes = SIZES[part]
        words = SMALL.split() if small else ["--hf-path", str(FOLDER / name), *sizes.split()]
        given = skip.parse([*words, "--dtype", "bfloat16"])
        self.backend, self.skip = skip.build_backend(given), skip
        self.case = skip.make_case(self.backend, skip.make_batch(self.backend, given), 0.5, given)
        self.step()

    def step(self) -> None:
        self.skip.update_once(self.backend, self.case, "skip", keep=False)

    def tensors(self) -> list[torch.Tensor]:
        """Return copies, on the host, of the weights and of AdamW's masters and moments."""
        parts = self.backend.optimizer.megatron.chained_optimizers
        found = [p for chunk in self.backend.chunks for p in chunk.module.parameters()]
        found += [p for part in parts for group in part.optimizer.param_groups for p in group["params"]]
        found += [x for part in parts for state in part.optimizer.state.values() for x in state.values() if x.dim()]
        return [x.detach().to("cpu", copy=True) for x in found]


def num_different(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> int:
    return sum(not torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def free_bytes() -> int:
    """Return the device's free memory as its driver counts it, all processes included; 0 on a CPU."""
    return torch.cuda.mem_get_info()[0] if DEVICE.type == "cuda" else 0


def measure_offload(trainer: Trainer, work: pathlib.Path) -> dict:
    backend, before, rows = trainer.backend, trainer.tensors(), []
    for _ in range(2):  # the first allocates the host's memory
        free, released = free_bytes(), []
        seconds = seconds_of(lambda found=released: found.append(backend.offload()))
        freed = free_bytes() - free
        rows.append({"offload_s": seconds, "restore_s": seconds_of(backend.restore), "freed_bytes": freed})
    moved = released[0].optimizer
    different = num_different(trainer.tensors(), before)
    row = rows[-1]
    share = row["freed_bytes"] / released[0].total if DEVICE.type == "cuda" else 1.0
    says = [
        f"{released[0].total / GIB:.2f} GiB leave ({moved / GIB:.2f} to the host): {row['offload_s']:.2f} s, back "
        f"{row['restore_s']:.2f} s, {moved / row['offload_s'] / 1e9:.1f} and {moved / row['restore_s'] / 1e9:.1f} GB/s",
        f"first time {rows[0]['offload_s']:.2f} s; {100 * share:.0f} % of the bytes free; {different} tensors differ",
    ]
    failed = f"{different} tensors differ after restore" if different else ""
    failed = failed or ("" if share > 0.9 else f"only {100 * share:.0f} % of the offloaded bytes came free")
    return {"headline": says, "times": rows, "bytes": released[0].total, "different": different, "failed": failed}


def measure_checkpoint(trainer: Trainer, work: pathlib.Path) -> dict:
    from megatron_rl.checkpoint import model_state

    backend, saved = trainer.backend, trainer.tensors()
    on_gpu = DEVICE.type == "cuda"
    held = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    pending: list = []
    save_s = seconds_of(lambda: pending.append(model_state.save(backend, work / "checkpoints", 1, {"a.json": "{}"})))
    kept, model = model_state.numbers(backend), model_state.identity(backend)
    started = time.perf_counter()
    path = pending[0].finish()
    write_s = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated() - held if on_gpu else 0
    trainer.step()
    later = trainer.tensors()
    load_s = seconds_of(lambda: model_state.load(backend, path, kept, model))
    different = num_different(trainer.tensors(), saved)
    trainer.step()
    again = num_different(trainer.tensors(), later)
    size = sum(x.stat().st_size for x in path.rglob("*") if x.is_file())
    says = [
        f"{size / GIB:.2f} GiB: {save_s:.2f} s until the trainer goes on, {write_s:.2f} s more until written, load "
        f"{load_s:.2f} s; {peak / GIB:.2f} GiB more on the device meanwhile",
        f"{different} tensors differ after the load; {again} of {len(later)} after a step that was taken twice",
    ]
    found = {"save_s": save_s, "write_s": write_s, "load_s": load_s, "bytes": size, "peak_bytes": peak}
    failed = f"{different} tensors differ after the load" if different else ""
    return {"headline": says, **found, "different": different, "different_after_a_step": again, "failed": failed}


def measure_reference(trainer: Trainer, work: pathlib.Path) -> dict:
    backend, before = trainer.backend, trainer.tensors()
    keep_s = seconds_of(backend.keep_reference)
    rows = []
    for _ in range(3):
        block = backend.reference_weights()
        rows.append((seconds_of(block.__enter__), seconds_of(lambda b=block: b.__exit__(None, None, None))))
    different = num_different(trainer.tensors(), before)
    num_bytes = sum(p.numel() * p.element_size() for chunk in backend.chunks for p in chunk.module.parameters())
    to_s, back_s = rows[-1]
    says = [
        f"{num_bytes / GIB:.2f} GiB: kept in {keep_s:.2f} s, swapped in {to_s:.2f} s and back {back_s:.2f} s (first "
        f"time {rows[0][0]:.2f} and {rows[0][1]:.2f} s); {different} tensors differ"
    ]
    failed = f"{different} tensors differ after the swap" if different else ""
    return {"headline": says, "keep_s": keep_s, "swaps_s": rows, "bytes": num_bytes, "failed": failed}


PARTS = {"offload": measure_offload, "checkpoint": measure_checkpoint, "reference": measure_reference}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/gpu_report_steps/state.py --part offload --json offload.json --work /tmp/work",
    )
    parser.add_argument("--part", choices=sorted(PARTS), required=True)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True, help="a folder for files that the step writes")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    given = parser.parse_args(arguments)
    trainer = Trainer(given.part, small=given.small)
    code = write(given.json, PARTS[given.part](trainer, given.work))
    trainer.backend.close()
    return code


if __name__ == "__main__":
    raise SystemExit(main())
