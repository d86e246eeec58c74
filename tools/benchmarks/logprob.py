"""Measures log-probs from logits (plain) and without them (lean), forward and backward: peak extra memory, and time.

    python tools/benchmarks/logprob.py --tokens 2048 4096 --vocab 62000 --hidden 256

plain is F.linear and vocab_parallel_logprob, lean is linear_logprob; one tensor rank, so --vocab is the shard's width.
Times are alternating medians. Peak extra memory is the memory that forward and backward add to hidden, weight and
targets, the two gradients included. On CUDA: max_memory_allocated. On the CPU: the growth of the kernel's high-water
mark of resident memory (VmHWM in /proc/self/status), each measurement in a process of its own, after a warm-up on a few
tokens. If plain would not fit --plain-limit-gb, it is not run: its memory is extrapolated on the line through the sizes
that were run, and marked ~; its time is left out. --main-grad autograd adds the weight's gradient to a float32 buffer,
as Megatron-Core's DistributedDataParallel does; straight has lean add it there itself: two runs, whose ratios to plain
compare. On a busy host the ratio of CPU seconds under --threads 1 says more
than that of seconds: it counts this process's work alone.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform as host_platform
import statistics
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # tests/vocab_parallel.py
PATHS = ("plain", "lean")
GIB = 2**30


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/benchmarks/logprob.py --tokens 4096 8192 32768 --repeats 0 "
        "--json runs/benchmark_logprob.json",
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096], help="sizes, one row each")
    parser.add_argument("--vocab", type=int, default=62_000, help="columns of this tensor rank's shard")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--chunk-tokens", type=int, help="default: linear_logprob's own")
    parser.add_argument("--kernel", choices=("torch", "triton"), default="torch", help="of lean (default torch)")
    parser.add_argument(
        "--main-grad", choices=("none", "autograd", "straight"), default="none", help="where the weight's gradient goes"
    )
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--train-entropy", action="store_true")
    parser.add_argument(
        "--repeats", type=int, default=5, help="alternating pairs timed, after one to warm up; 0: memory alone"
    )
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's own")
    parser.add_argument(
        "--plain-limit-gb", type=float, default=8.0, help="plain is not run where its two [tokens, vocab] exceed this"
    )
    parser.add_argument("--json", type=pathlib.Path, help="also write what is printed there")
    # --measure is for the child process that measures memory.
    parser.add_argument("--measure", nargs=2, metavar=("PATH", "TOKENS"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    for name in ("vocab", "hidden"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} {getattr(given, name)} must be at least 1")
    if given.kernel == "triton" and not given.measure and device_type() == "cpu":
        parser.error("--kernel triton needs a GPU: on the CPU Triton only interprets its kernels, for tests")
    if min(given.tokens) < 1 or given.repeats < 0:
        parser.error(f"--tokens {given.tokens} must be at least 1 each and --repeats {given.repeats} at least 0")
    given.tokens = sorted(set(given.tokens))
    return given


def device_type() -> str:
    """Return "cuda" where torch sees a GPU, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def make_inputs(given: argparse.Namespace, tokens: int):
    """Return hidden [tokens, H], weight [V, H] and targets [tokens], on the device.

    The logits have a standard deviation of 1.
    """
    import torch

    device = device_type()
    torch.manual_seed(0)
    options = {"device": device, "dtype": vars(torch)[given.dtype]}
    hidden = torch.randn(tokens, given.hidden, **options).requires_grad_()
    weight = torch.randn(given.vocab, given.hidden, **options).mul_(given.hidden**-0.5).requires_grad_()
    if given.main_grad != "none":
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32, requires_grad=False)
    return hidden, weight, torch.randint(0, given.vocab, (tokens,), device=device)


def step(path: str, given: argparse.Namespace, hidden, weight, targets) -> None:
    """Run one forward and backward; no gradients stay but those in main_grad."""
    import torch

    from megatron_rl.model.logprob.linear import linear_logprob
    from tests.vocab_parallel import vocab_parallel_logprob

    options = {"temperature": given.temperature, "vocab_size": given.vocab, "train_entropy": given.train_entropy}
    if path == "lean":
        options |= {"chunk_tokens": given.chunk_tokens, "kernel": given.kernel}
        options["into_main_grad"] = given.main_grad == "straight"
        logprobs, entropy = linear_logprob(hidden, weight, targets, **options)
    else:
        logprobs, entropy = vocab_parallel_logprob(torch.nn.functional.linear(hidden, weight), targets, **options)
    loss = logprobs.sum() + 0.01 * entropy.sum() if given.train_entropy else logprobs.sum()
    _, gradient = torch.autograd.grad(loss, (hidden, weight))
    if given.main_grad == "autograd" or (given.main_grad == "straight" and path == "plain"):
        weight.main_grad.add_(gradient)


def peak_resident_bytes() -> int:
    """Return the high-water mark of this process since its exec.

    ru_maxrss is not used: it starts from the parent's.
    """
    status = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def measure_here(path: str, given: argparse.Namespace, tokens: int) -> int:
    """Return the peak extra bytes in this process; on the CPU the process must be a fresh one."""
    import torch

    inputs = make_inputs(given, tokens)
    hidden, weight, targets = make_inputs(argparse.Namespace(**vars(given) | {"vocab": min(64, given.vocab)}), 2)
    few = argparse.Namespace(**vars(given) | {"vocab": len(weight)})
    step(path, few, hidden, weight, targets)  # warms up: libraries load and allocate once
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(path, given, *inputs)
        return torch.cuda.max_memory_allocated() - before
    before = peak_resident_bytes()
    step(path, given, *inputs)
    return peak_resident_bytes() - before


def measure_memory(path: str, given: argparse.Namespace, tokens: int) -> int:
    import torch

    if torch.cuda.is_available():
        return measure_here(path, given, tokens)
    names = ("vocab", "hidden", "dtype", "temperature", "chunk_tokens", "kernel", "main_grad", "threads")
    chosen = {name: vars(given)[name] for name in names if vars(given)[name] is not None}
    options = [word for name, value in chosen.items() for word in (f"--{name.replace('_', '-')}", value)]
    options += ["--train-entropy"] if given.train_entropy else []
    command = [sys.executable, os.path.abspath(__file__), "--measure", path, tokens, *options]
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"{path} at {tokens} tokens ended with status {done.returncode} (-9: out of memory)\n{done.stderr[-2000:]}"
        )
    return int(done.stdout.split()[-1])


def measure_times(given: argparse.Namespace, tokens: int, paths: tuple[str, ...]) -> dict[str, float]:
    """Return the median seconds and CPU seconds of each path, the paths taken in turn.

    With both paths, the ratios lean / plain are returned too.
    """
    import torch

    inputs = make_inputs(given, tokens)
    seconds: dict[str, list[tuple[float, float]]] = {path: [] for path in paths}
    for repeat in range(given.repeats + 1):
        for path in paths:
            started, cpu_started = time.perf_counter(), time.process_time()
            step(path, given, *inputs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if repeat:
                seconds[path].append((time.perf_counter() - started, time.process_time() - cpu_started))
    row = {f"{path}_s": statistics.median(x for x, _ in seconds[path]) for path in paths}
    row |= {f"{path}_cpu_s": statistics.median(x for _, x in seconds[path]) for path in paths}
    if len(paths) == 2:
        row |= {"time_ratio": row["lean_s"] / row["plain_s"], "cpu_ratio": row["lean_cpu_s"] / row["plain_cpu_s"]}
    return row


def plain_fits(given: argparse.Namespace, tokens: int) -> bool:
    size = 2 if given.dtype == "bfloat16" else 4
    return 2 * tokens * given.vocab * size <= given.plain_limit_gb * 1e9


def extrapolated(measured: dict[int, int], tokens: int) -> float:
    """Extrapolate on the line through the smallest and the largest size; with one size, in proportion."""
    low, high = min(measured), max(measured)
    slope = (measured[high] - measured[low]) / (high - low) if high > low else measured[high] / high
    return measured[high] + slope * (tokens - high)


def measure(given: argparse.Namespace) -> list[dict]:
    rows, plain_bytes = [], {}
    for tokens in given.tokens:
        row: dict = {
            "tokens": tokens,
            "lean_bytes": measure_memory("lean", given, tokens),
            "plain_is_extrapolated": False,
        }
        if plain_fits(given, tokens):
            row["plain_bytes"] = plain_bytes[tokens] = measure_memory("plain", given, tokens)
        elif plain_bytes:
            row |= {"plain_bytes": extrapolated(plain_bytes, tokens), "plain_is_extrapolated": True}
        if "plain_bytes" in row:
            row["memory_ratio"] = row["plain_bytes"] / row["lean_bytes"]
        if given.repeats:
            row |= measure_times(given, tokens, PATHS if plain_fits(given, tokens) else ("lean",))
        rows.append(row)
    return rows


def show(rows: list[dict], given: argparse.Namespace, machine: str) -> None:
    from rich.console import Console
    from rich.table import Table

    ways = f"kernel {given.kernel}, main_grad {given.main_grad}"
    title = f"lean against plain: shard of {given.vocab}, hidden {given.hidden}, {given.dtype}; {ways}; {machine}"
    table = Table(title=title, caption="peak extra memory in GiB, gradients included; ~ extrapolated")
    for name in (
        "tokens",
        "plain GiB",
        "lean GiB",
        "plain / lean",
        "plain s",
        "lean s",
        "lean / plain",
        "CPU lean / plain",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        about = "~" if row["plain_is_extrapolated"] else ""
        cells = [f"{row['tokens']}", f"{about}{row['plain_bytes'] / GIB:.2f}" if "plain_bytes" in row else "-"]
        cells += [
            f"{row['lean_bytes'] / GIB:.2f}",
            f"{about}{row['memory_ratio']:.1f}" if "memory_ratio" in row else "-",
        ]
        cells += [f"{row[key]:.2f}" if key in row else "-" for key in ("plain_s", "lean_s", "time_ratio", "cpu_ratio")]
        table.add_row(*cells)
    Console(width=130).print(table)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    import torch

    if given.threads is not None:
        torch.set_num_threads(given.threads)
    if given.measure:
        print(measure_here(given.measure[0], given, int(given.measure[1])))
        return 0
    rows = measure(given)
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"{host_platform.machine()}, {torch.get_num_threads()} threads"
    )
    machine = f"{device}, torch {torch.__version__}"
    show(rows, given, machine)
    if given.json:
        settings = {key: str(value) if isinstance(value, pathlib.Path) else value for key, value in vars(given).items()}
        given.json.write_text(
            json.dumps({"machine": machine, "settings": settings, "rows": rows}, indent=1) + "\n", encoding="utf-8"
        )
        print(f"written: {given.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
