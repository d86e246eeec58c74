"""Measures rollouts by vLLM on this host: weight sync, tokens a second against the trainer's own engine, and waiting.

    python tools/benchmarks/rollout.py --hidden 512 --layers 8                 # under an environment with vLLM
    python tools/benchmarks/rollout.py --model FOLDER --skip generation run    # a model of your own, its syncs alone

`make .venv-vllm/.installed` makes such an environment.

sync:       a running engine is sent the model's weights, --repeats times for each channel and bucket; the median, in
            GB/s and as a multiple of the time of one copy of the same bytes within this process (torch, the same run).
            The gather over model-parallel ranks is not part of it.
generation: the same prompts, samples and lengths on vLLM and on rollout.engine=transformers, in turn; medians of
            tokens a second.
run:        a short training run with each engine; the share of the time between two rollouts that waits for weights
            and rollouts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tools" / "benchmarks"))
PARTS = ("sync", "generation", "run")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/benchmarks/rollout.py --hidden 512 --layers 8 --json runs/benchmark_rollout.json",
    )
    parser.add_argument(
        "--model", type=pathlib.Path, help="a Hugging Face folder; default: a random Qwen2 of the sizes below"
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--channels", nargs="+", default=["shared_memory", "broadcast"], choices=["shared_memory", "broadcast"]
    )
    parser.add_argument("--buckets-mb", type=float, nargs="+", default=[16.0, 128.0, 512.0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8, help="per prompt")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--response-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5, help="after one to warm up")
    parser.add_argument("--steps", type=int, default=10, help="rollouts of each short run")
    parser.add_argument("--skip", nargs="*", default=[], choices=PARTS, help="parts to leave out")
    parser.add_argument("--json", type=pathlib.Path, help="also write what is printed there")
    given = parser.parse_args(arguments)
    for name in ("hidden", "layers", "prompts", "samples", "prompt_tokens", "response_tokens", "repeats", "steps"):
        if vars(given)[name] < 1:
            parser.error(f"--{name.replace('_', '-')} {vars(given)[name]} must be at least 1")
    return given


def open_engine(given: argparse.Namespace, model: pathlib.Path, folder: pathlib.Path, kind: str):
    """Start the engine that a run of one rank would have, with weights; return it and the weights."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoTokenizer

    from megatron_rl.config import load_config
    from megatron_rl.rollout.build import place_engine
    from megatron_rl.rollout.engines.placement import RankLocation

    config = load_config(
        None,
        [
            f"model.hf_path={model}",
            f"rollout.engine={kind}",
            f"data.max_prompt_tokens={given.prompt_tokens}",
            f"rollout.max_response_tokens={given.response_tokens}",
            f"run.dir={folder / kind}",
            "rollout.allow_large_embedded_model=true",
        ],
    )
    location = RankLocation(rank=0, world_size=1, local_rank=0, local_world_size=1)
    weights = {name: x for file in sorted(model.glob("*.safetensors")) for name, x in load_file(file).items()}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    engine, _, _ = place_engine(
        config,
        AutoTokenizer.from_pretrained(model),
        location=location,
        device=device,
        dtype=torch.float32,
        vocab_size=AutoConfig.from_pretrained(model).vocab_size,
    )
    try:
        engine.recover([])
        engine.take_report(0, engine.load_weights(iter(weights.items()), 0).failed, [])
    except BaseException:
        engine.close()
        raise
    return engine, weights


def measure_sync(given: argparse.Namespace, model: pathlib.Path, folder: pathlib.Path) -> list[dict]:
    import torch

    from megatron_rl.rollout.weight_sync.sender import WeightSender

    engine, weights = open_engine(given, model, folder, "vllm")
    rows = []
    try:
        num_bytes = sum(x.numel() * x.element_size() for x in weights.values())
        # The yardstick: one copy of the same bytes.
        copies = [_seconds(lambda: [x.clone() for x in weights.values()]) for _ in range(given.repeats + 1)][1:]
        rows.append({"channel": "one copy in this process", "bytes": num_bytes, "seconds": statistics.median(copies)})
        # Every channel with every bucket.
        version = 0
        for channel in given.channels:
            for bucket_mb in given.buckets_mb:
                device = next(iter(weights.values())).device if channel == "shared_memory" else torch.device("cpu")
                sync = WeightSender(
                    channel=channel, bucket_bytes=int(bucket_mb * 2**20), deadline_s=300.0, device=device
                )
                seconds = []
                for _ in range(given.repeats + 1):
                    version += 1
                    report = sync.deliver(iter(weights.items()), version, engine._replicas)
                    if report.failed:
                        raise RuntimeError(f"the sync by {channel} failed: {report.failed}")
                    seconds.append(report.seconds)
                sync.forget(engine._replicas[0])
                sync.free()
                rows.append(
                    {
                        "channel": channel,
                        "bucket_mb": bucket_mb,
                        "bytes": num_bytes,
                        "seconds": statistics.median(seconds[1:]),
                    }
                )
    finally:
        engine.close()
    for row in rows:
        row["gigabytes_per_second"] = row["bytes"] / row["seconds"] / 1e9
        row["times_one_copy"] = row["seconds"] / rows[0]["seconds"]
    return rows


def _seconds(act) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def measure_generation(given: argparse.Namespace, model: pathlib.Path, folder: pathlib.Path) -> list[dict]:
    """Measure tokens a second; both engines stay up and take turns, so that a busy host slows both."""
    import numpy as np

    from megatron_rl.types import Prompt

    prompt_ids = np.random.default_rng(0).integers(5, 15, size=(given.prompts, given.prompt_tokens))
    prompts = [
        Prompt(prompt_id=f"{i}@0", text="", token_ids=tuple(row.tolist()), columns={})
        for i, row in enumerate(prompt_ids)
    ]
    engines, rates = {}, {}
    try:
        for kind in ("vllm", "transformers"):
            engines[kind], rates[kind] = open_engine(given, model, folder, kind)[0], []
        for turn in range(given.repeats + 1):
            for kind, engine in engines.items():
                started = time.perf_counter()
                rollouts = engine.generate(
                    [dataclasses.replace(prompt, attempt=turn) for prompt in prompts], given.samples
                )
                rates[kind].append(sum(len(x.response_ids) for x in rollouts) / (time.perf_counter() - started))
    finally:
        for engine in engines.values():
            engine.close()
    return [{"engine": kind, "tokens_per_second": statistics.median(measured[1:])} for kind, measured in rates.items()]


def measure_run(given: argparse.Namespace, inputs: pathlib.Path, folder: pathlib.Path) -> list[dict]:
    """Measure short runs with the quickstart's data and settings on one process."""
    rows = []
    for kind in ("vllm", "transformers"):
        overrides = (f"train.num_rollouts={given.steps}", f"rollout.engine={kind}")
        lines, logged = short_run(inputs, folder / f"run_{kind}", *overrides)
        name = "perf/rollout_wait_share"
        shares = [line[name] for line in lines if name in line][1:]  # the first waits for the start
        rows.append({"engine": kind, "wait_share": statistics.median(shares), "said": _said(logged)})
    return rows


def _said(text: str) -> str:
    return next((line for line in text.splitlines() if line.startswith("rollouts: ")), "")


def show(found: dict[str, list[dict]]) -> None:
    for part, rows in found.items():
        names = [name for name in rows[-1] if name != "said"]
        print(f"\n{part}\n| " + " | ".join(names) + " |\n|" + "---|" * len(names))
        for row in rows:
            print(
                "| "
                + " | ".join(f"{row[n]:,.3g}" if isinstance(row.get(n), float) else str(row.get(n, "")) for n in names)
                + " |"
            )
        for row in rows:
            if row.get("said"):
                print(f"{row['engine']}: {row['said']}")


def prepare(folder: pathlib.Path, *, hidden: int, layers: int, max_position: int) -> None:
    """Make data, tokenizer and a Qwen2 with heads of 64 by examples/quickstart/prepare.py."""
    sizes = {
        "hidden": hidden,
        "layers": layers,
        "heads": hidden // 64,
        "kv-heads": hidden // 64,
        "intermediate": 3 * hidden,
        "max-position": max_position,
    }
    command = [sys.executable, str(ROOT / "examples/quickstart/prepare.py"), "--out", str(folder)]
    command += [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def short_run(inputs: pathlib.Path, run_dir: pathlib.Path, *overrides: str, **variables: str) -> tuple[list[dict], str]:
    """Run one process and one thread on the quickstart's data; return its rows of metrics.jsonl, and what it logged.

    inputs:    the folder that ``prepare`` made.
    overrides: settings of the run.
    variables: variables for its environment.

    Raises RuntimeError with the end of the log if the run fails.
    """
    command = [
        sys.executable,
        "-m",
        "megatron_rl.train",
        "--config",
        str(ROOT / "examples/quickstart/quickstart.yaml"),
        "--run-dir",
        str(run_dir),
        f"model.hf_path={inputs / 'model'}",
        f"data.train={inputs / 'train.jsonl'}",
        "parallel.pipeline=1",
        "sft.steps=0",
        "metrics.progress=false",
        "train.export_last=false",
        *overrides,
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tools' / 'benchmarks'}",
        **variables,
    }
    done = subprocess.run(command, cwd=run_dir.parent, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the run in {run_dir.name} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()], done.stderr


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    from skip_table import machine_name

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        prepare(folder / "inputs", hidden=given.hidden, layers=given.layers, max_position=4096)
        model = given.model or folder / "inputs" / "model"
        parts: dict[str, list[dict]] = {}
        if "sync" not in given.skip:
            parts["sync"] = measure_sync(given, model, folder)
        if "generation" not in given.skip:
            parts["generation"] = measure_generation(given, model, folder)
        if "run" not in given.skip:
            parts["run"] = measure_run(given, folder / "inputs", folder)
    print(machine_name())
    show(parts)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(
            json.dumps({"machine": machine_name(), "arguments": vars(given), **parts}, indent=1, default=str)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
