"""Measures the weight sync of what changed against the whole one: bytes and seconds to a running vLLM engine.

    python tools/benchmarks/delta_sync.py --json runs/benchmark_delta_sync.json      # under an environment with vLLM

`make .venv-vllm/.installed` makes such an environment. A model of random weights (SmolLM2-135M's shape, unless the
sizes say otherwise) takes AdamW steps on random gradients, with float32 masters as in a mixed-precision run, and its
weights in the engine's dtype are sent after each: by what changed, then whole. Each way has its median. A gradient of
noise makes Adam's steps smaller than a real one may; the share that changed is measured beside the bytes.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import tempfile

from one_engine import add_sizes, build_one, sizes_config
from short_run import prepare

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
INIT = 0.02  # standard deviation of the weights


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/benchmarks/delta_sync.py --dtypes bfloat16 --learning-rates 1e-6",
    )
    add_sizes(parser)
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--channels", nargs="+", default=["shared_memory"], choices=["shared_memory", "broadcast"])
    parser.add_argument("--bucket-mb", type=float, default=128.0, help="of the sender's two halves together")
    parser.add_argument("--warm-up", type=int, default=10, help="steps before the first sync, until Adam's are small")
    parser.add_argument("--repeats", type=int, default=3, help="measured syncs, after one to warm up")
    parser.add_argument("--json", type=pathlib.Path, help="also write what is printed there")
    given = parser.parse_args(arguments)
    for name in ("hidden", "layers", "heads", "kv_heads", "intermediate", "vocab", "repeats"):
        if vars(given)[name] < 1:
            parser.error(f"--{name.replace('_', '-')} {vars(given)[name]} must be at least 1")
    return given


def make_folder(given: argparse.Namespace, folder: pathlib.Path) -> pathlib.Path:
    """Write a folder with config.json and a tokenizer, whose weights come by sync."""
    prepare(folder / "inputs", hidden=64, layers=1, max_position=512)
    model = folder / "inputs" / "model"
    for path in (*model.glob("*.safetensors"), model / "generation_config.json"):
        path.unlink(missing_ok=True)
    sizes_config(given, max_position_embeddings=512, architectures=["LlamaForCausalLM"]).save_pretrained(model)
    return model


class Trainer:
    """Holds float32 masters that AdamW moves by random gradients."""

    def __init__(self, model: pathlib.Path, learning_rate: float) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            shapes = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.float32)
        self.random = torch.Generator().manual_seed(0)
        self.masters = {
            name: torch.nn.Parameter(self.draw(x.shape) * INIT + float(name.endswith("norm.weight")))
            for name, x in shapes.named_parameters()
        }
        self.optimizer = torch.optim.AdamW(self.masters.values(), lr=learning_rate, weight_decay=0.0)

    def draw(self, shape):
        import torch

        return torch.randn(shape, generator=self.random)

    def step(self) -> None:
        for parameter in self.masters.values():
            parameter.grad = self.draw(parameter.shape)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def weights(self, dtype):
        return ((name, parameter.detach().to(dtype)) for name, parameter in self.masters.items())


def open_engine(model: pathlib.Path, folder: pathlib.Path, dtype: str):
    from megatron_rl.config import load_config

    settings = (f"model.hf_path={model}", f"model.dtype={dtype}", f"run.dir={folder / dtype}", "rollout.engine=vllm")
    engine = build_one(load_config(None, [*settings, "data.max_prompt_tokens=64", "rollout.max_response_tokens=64"]))
    try:
        engine.recover([])
    except BaseException:
        engine.close()
        raise
    return engine


def measure(given: argparse.Namespace, model: pathlib.Path, folder: pathlib.Path) -> list[dict]:
    """Return a row for each dtype, channel, learning rate and way."""
    import torch

    from megatron_rl.rollout.weight_sync.sender import WeightSender

    rows, version = [], 0
    for dtype in given.dtypes:
        engine = open_engine(model, folder, dtype)
        try:
            replica = engine._replicas[0]
            for channel in given.channels:
                for learning_rate in given.learning_rates:
                    trainer = Trainer(model, learning_rate)
                    for _ in range(given.warm_up):
                        trainer.step()
                    common = {"deadline_s": 300.0, "device": torch.device("cpu"), "channel": channel}
                    common["bucket_bytes"] = int(given.bucket_mb * 2**20)
                    ways = {
                        "changes": WeightSender(full_every=10**6, **common),
                        "whole": WeightSender(**common),
                    }
                    reports = {}
                    for way, sender in ways.items():
                        reports[way] = []
                        for _ in range(given.repeats + 2):  # the first brings everything, the second warms up
                            trainer.step()
                            version += 1
                            report = sender.deliver(trainer.weights(getattr(torch, dtype)), version, [replica])
                            if report.failed:
                                raise RuntimeError(f"the sync by {channel} failed: {report.failed}")
                            reports[way].append(report)
                        sender.forget(replica)
                        sender.free()
                    rows += [row_of(dtype, channel, learning_rate, way, x[2:]) for way, x in reports.items()]
        finally:
            engine.close()
    return rows


def row_of(dtype: str, channel: str, learning_rate: float, way: str, reports: list) -> dict:
    shares = [x.changed_share for x in reports if x.changed_share is not None]
    return {
        "dtype": dtype,
        "channel": channel,
        "learning rate": learning_rate,
        "way": way,
        "weights_mb": reports[0].num_bytes / 1e6,
        "sent_mb": statistics.median(x.sent_bytes for x in reports) / 1e6,
        "changed": statistics.median(shares) if shares else None,
        "seconds": statistics.median(x.seconds for x in reports),
    }


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    from skip_table import machine_name

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        rows = measure(given, make_folder(given, folder), folder)
    print(machine_name())
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(f"{x:,.4g}" if isinstance(x, float) else str(x or "") for x in row.values()) + " |")
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(
            json.dumps({"machine": machine_name(), "arguments": vars(given), "rows": rows}, indent=1, default=str)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
