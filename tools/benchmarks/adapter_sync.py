"""Measures what a weight sync of LoRA adapters takes, merged into the weights and alone, and what sampling pays for it.

    python tools/benchmarks/adapter_sync.py                            # in an environment with vLLM; 135M parameters
    python tools/benchmarks/adapter_sync.py --layers 4 --vocab 2048 --rank 8 --repeats 3

`make .venv-vllm/.installed` makes such an environment.

A trainer of one rank, with random weights and adapters, and two engines as its runs would have them, one for each
setting of weight_sync.adapters. They take turns: each is sent the same adapters, new ones in every round, and then
samples the same prompts. A sync is the export (merging included) and the delivery; the first to each engine brings
every weight, and has a row of its own. The gap is the largest difference of the engines' log-probs of the same tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tools" / "benchmarks"))

from one_engine import add_sizes, build_one, sizes_config  # noqa: E402

WAYS = ("merged", "alone")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/benchmarks/adapter_sync.py --rank 16 --json runs/adapter_sync.json",
    )
    add_sizes(parser)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--channel", choices=("shared_memory", "broadcast"), default="shared_memory")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4, help="per prompt")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--response-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5, help="rounds of both engines, after the first syncs")
    parser.add_argument("--json", type=pathlib.Path, help="also write what is printed there")
    given = parser.parse_args(arguments)
    for name, value in vars(given).items():
        if isinstance(value, int) and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value} must be at least 1")
    return given


def make_folder(given: argparse.Namespace, folder: pathlib.Path) -> pathlib.Path:
    """Write a llama's config and random weights, beside the quickstart's tokenizer, which has fewer tokens."""
    import torch
    from transformers import LlamaForCausalLM

    out = folder / "inputs"
    command = [sys.executable, str(ROOT / "examples/quickstart/prepare.py"), "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    sizes = sizes_config(given, max_position_embeddings=2048, dtype=given.dtype)
    torch.manual_seed(0)
    LlamaForCausalLM(sizes).to(getattr(torch, given.dtype)).save_pretrained(out / "model")
    return out / "model"


@dataclass(slots=True, eq=False)
class Way:
    """Holds one engine, and what was measured with it. ``num_bytes`` are of the syncs after the first."""

    name: str
    engine: object
    first: dict[str, float] = field(default_factory=dict)
    num_bytes: int = 0
    seconds: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def row(self) -> dict[str, object]:
        return {
            "weight_sync.adapters": self.name,
            "first_bytes": self.first["bytes"],
            "first_seconds": self.first["seconds"],
            "bytes": self.num_bytes,
            "seconds": statistics.median(self.seconds),
            "tokens_per_second": statistics.median(self.rates),
        }


def config_of(given: argparse.Namespace, model: pathlib.Path, folder: pathlib.Path, way: str):
    from megatron_rl.config import load_config

    return load_config(
        None,
        [
            f"model.hf_path={model}",
            f"model.dtype={given.dtype}",
            "model.layer_spec=torch",
            f"lora.rank={given.rank}",
            "rollout.engine=vllm",
            f"data.max_prompt_tokens={given.prompt_tokens}",
            f"rollout.max_response_tokens={given.response_tokens}",
            f"run.dir={folder / way}",
            f"weight_sync.adapters={way}",
            f"weight_sync.channel={given.channel}",
            "rollout.sleep=never",
        ],
    )


def sync(way: Way, backend, version: int) -> None:
    """Send an engine what a run would send it, and note bytes and seconds."""
    import itertools

    first, started = not way.first, time.perf_counter()
    if way.name == "merged":
        tensors = backend.export()
    elif way.engine.lacks_weights:
        tensors = itertools.chain(backend.export(merges=False), backend.export_adapters())
    else:
        tensors = backend.export_adapters()
    report = way.engine.load_weights(tensors, version)
    way.engine.take_report(version, report.failed, report.lost)
    if report.failed:
        raise RuntimeError(f"the sync of adapters {way.name} failed: {report.failed}")
    seconds = time.perf_counter() - started
    if first:
        way.first = {"bytes": report.num_bytes, "seconds": seconds}
    else:
        way.num_bytes = report.num_bytes
        way.seconds.append(seconds)


def move_adapters(backend) -> None:
    """Give the adapters other values, as a step of training would."""
    import torch

    from megatron_rl.model.adapter import adapters_of

    with torch.no_grad():
        for adapter in adapters_of([chunk.module for chunk in backend.chunks]):
            for parameter in adapter.parameters():
                parameter.copy_(0.02 * torch.randn(parameter.shape))


def measure(given: argparse.Namespace, model: pathlib.Path, folder: pathlib.Path) -> tuple[list[dict], float]:
    """Return a row for each way, and the largest gap between the two engines' log-probs of a prompt."""
    import numpy as np

    from megatron_rl.backend import MegatronBackend
    from megatron_rl.rollout.sampling import SampleRequest
    from megatron_rl.types import Prompt

    random = np.random.default_rng(0)
    ids = random.integers(2, given.vocab, size=(given.prompts, given.prompt_tokens)).tolist()
    prompts = [Prompt(prompt_id=f"{i}@0", text="", token_ids=tuple(row), columns={}) for i, row in enumerate(ids)]
    ways: list[Way] = []
    gap = 0.0
    try:
        for name in WAYS:
            ways.append(Way(name, build_one(config_of(given, model, folder, name))))
            ways[-1].engine.recover([])
        backend = MegatronBackend(config_of(given, model, folder, "merged"))
        for turn in range(given.repeats + 1):
            move_adapters(backend)
            found = []
            for way in ways:
                sync(way, backend, turn)
                started = time.perf_counter()
                asked = [dataclasses.replace(prompt, attempt=turn) for prompt in prompts]
                rollouts = way.engine.generate(asked, given.samples)
                rate = sum(len(x.response_ids) for x in rollouts) / (time.perf_counter() - started)
                way.rates += [rate] if turn else []
                requests = [
                    SampleRequest(
                        request_id=str(i),
                        token_ids=tuple(row),
                        num_samples=1,
                        max_tokens=1,
                        temperature=1.0,
                        seed=0,
                        stop_ids=(),
                        prompt_logprobs=True,
                    )
                    for i, row in enumerate(ids)
                ]
                found.append(np.stack([x.prompt_logprobs for x in way.engine.sample(requests)]))
            gap = max(gap, float(np.nanmax(np.abs(found[0] - found[1]))))
    finally:
        for way in ways:
            way.engine.close()
    return [way.row() for way in ways], gap


def show(rows: list[dict], gap: float) -> None:
    names = list(rows[0])
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for row in rows:
        cells = (f"{value:,.3g}" if isinstance(value, float) else f"{value:,}" for value in list(row.values())[1:])
        print(f"| {row['weight_sync.adapters']} | " + " | ".join(cells) + " |")
    print(f"largest gap of the two engines' log-probs of the prompts: {gap:.2g}")


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    from skip_table import machine_name

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        rows, gap = measure(given, make_folder(given, folder), folder)
    print(machine_name())
    show(rows, gap)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": machine_name(), "arguments": vars(given), "rows": rows, "largest_gap": gap}
        given.json.write_text(json.dumps(content, indent=1, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
