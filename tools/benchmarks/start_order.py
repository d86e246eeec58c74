"""Measures a rollout of heavy-tailed lengths by the order in which its groups are started (docs/rollout-lengths.md).

    python tools/benchmarks/start_order.py                    # under an environment with vLLM
    python tools/benchmarks/start_order.py --engine counted   # no engine: decoding steps are counted

Lengths are drawn from a log-normal distribution and cut at --most-tokens. The engine holds --slots samples at once. The
orders: as drawn; longest first by the lengths themselves; by the lengths of the last epoch, which differ from these by
a log-normal factor; and by the prompts' lengths, as in the first epoch, which say nothing of the responses' here.

Against two bounds. Counted: decoding steps, each of which gives every running sample one token, against the most of
(all tokens / slots) and the longest, in the mean. vllm: the medians of a rollout, the orders in turn within each round,
against a rollout of the same tokens that are dealt out evenly.
"""

from __future__ import annotations

import argparse
import heapq
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/benchmarks/start_order.py --prompts 64 --json runs/benchmark_start_order.json",
    )
    parser.add_argument("--engine", choices=["vllm", "counted"], default="vllm")
    parser.add_argument("--prompts", type=int, default=64, help="of a rollout, one sample each")
    parser.add_argument("--slots", type=int, default=8, help="samples that the engine holds at once")
    parser.add_argument("--median-tokens", type=float, default=60.0)
    parser.add_argument("--sigma", type=float, default=1.0, help="of the lengths' logarithm")
    parser.add_argument("--most-tokens", type=int, default=600)
    parser.add_argument("--epoch-sigma", type=float, default=0.4, help="of the logarithm of a length's change by epoch")
    parser.add_argument("--rounds", type=int, default=5, help="rollouts, each of lengths of its own")
    parser.add_argument("--json", type=pathlib.Path, help="also write what is printed there")
    given = parser.parse_args(arguments)
    for name in ("prompts", "slots", "most_tokens", "rounds"):
        if vars(given)[name] < 1:
            parser.error(f"--{name.replace('_', '-')} {vars(given)[name]} must be at least 1")
    return given


def draw_lengths(given: argparse.Namespace, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return [prompts] each: the responses' tokens, those of the last epoch, and the prompts' tokens."""

    def cut(lengths: np.ndarray) -> np.ndarray:
        return np.clip(lengths.round().astype(int), 1, given.most_tokens)

    lengths = given.median_tokens * np.exp(given.sigma * random.normal(size=given.prompts))
    before = lengths * np.exp(given.epoch_sigma * random.normal(size=given.prompts))
    return cut(lengths), cut(before), random.integers(4, 28, size=given.prompts)


def orders_of(lengths: np.ndarray, before: np.ndarray, prompt_tokens: np.ndarray) -> dict[str, list[int]]:
    """Return each order's positions, by the order of the product (``rollout.start_order=longest_first``)."""
    from megatron_rl.rollout.start_order import StartOrder
    from megatron_rl.types import Prompt

    prompts = {
        row: Prompt(prompt_id=f"{row}@1", text="", token_ids=(5,) * int(tokens), columns={})
        for row, tokens in enumerate(prompt_tokens)
    }
    found = {"as drawn": list(prompts)}
    known = {"longest first": lengths, "longest first by the last epoch": before, "longest prompt first": None}
    for name, values in known.items():
        order = StartOrder(longest_first=True)
        if values is not None:
            order.load_state({str(row): int(length) for row, length in enumerate(values)})
        found[name] = list(order.arrange(prompts))
    return found


def count_steps(lengths: Sequence[int], slots: int) -> int:
    """Return the decoding steps of samples that are started in this order, each as soon as a slot is free."""
    ends = [0] * slots
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + int(length))
    return max(ends)


def measure_counted(given: argparse.Namespace) -> list[dict]:
    ratios: dict[str, list[float]] = {}
    for number in range(given.rounds):
        lengths, *others = draw_lengths(given, np.random.default_rng(number))
        bound = max(-(-int(lengths.sum()) // given.slots), int(lengths.max()))
        for name, order in orders_of(lengths, *others).items():
            ratios.setdefault(name, []).append(count_steps(lengths[order], given.slots) / bound)
    return [{"order": name, "of_the_bound": statistics.mean(values)} for name, values in ratios.items()]


def open_engine(given: argparse.Namespace, folder: pathlib.Path, *settings: str):
    """Start an engine of a tiny model of random weights, none of whose samples ends before its bound.

    Returns it, its configuration with ``settings``, and its weights, which it has as version 0.
    """
    from one_engine import build_one
    from safetensors.torch import load_file
    from short_run import prepare

    from megatron_rl.config import load_config

    longest = given.most_tokens + 32
    prepare(folder / "inputs", hidden=64, layers=2, max_position=longest)
    model = folder / "inputs" / "model"
    config = load_config(
        None,
        [
            f"model.hf_path={model}",
            "model.dtype=float32",
            "rollout.engine=vllm",
            "data.max_prompt_tokens=32",
            f"rollout.max_response_tokens={given.most_tokens}",
            f"rollout.vllm={{max_num_seqs: {given.slots}}}",
            f"run.dir={folder / 'run'}",
            *settings,
        ],
    )
    engine = build_one(config)
    engine._stop_ids = ()  # a sample has exactly its most tokens
    try:
        engine.recover([])
        weights = {name: x for file in sorted(model.glob("*.safetensors")) for name, x in load_file(file).items()}
        engine.take_report(0, engine.load_weights(iter(weights.items()), 0).failed, [])
    except BaseException:
        engine.close()
        raise
    return engine, config, weights


def measure_vllm(given: argparse.Namespace, folder: pathlib.Path) -> list[dict]:
    engine, *_ = open_engine(given, folder)
    seconds: dict[str, list[float]] = {}
    try:
        _generate(engine, given, np.full(given.slots, 16), np.full(given.slots, 8))  # to warm up
        for number in range(given.rounds):
            lengths, before, prompt_tokens = draw_lengths(given, np.random.default_rng(number))
            even, rest = divmod(int(lengths.sum()), given.prompts)
            evenly = np.array([even + 1] * rest + [even] * (given.prompts - rest))
            seconds.setdefault("evenly dealt", []).append(_generate(engine, given, evenly, prompt_tokens))
            for name, order in orders_of(lengths, before, prompt_tokens).items():
                seconds.setdefault(name, []).append(_generate(engine, given, lengths[order], prompt_tokens[order]))
    finally:
        engine.close()
    even = seconds["evenly dealt"]
    return [
        {
            "order": name,
            "seconds": statistics.median(values),
            "of_the_bound": statistics.median(a / b for a, b in zip(values, even, strict=True)),
        }
        for name, values in seconds.items()
    ]


def _generate(engine, given: argparse.Namespace, lengths: np.ndarray, prompt_tokens: np.ndarray) -> float:
    from megatron_rl.types import Prompt

    random = np.random.default_rng(0)
    prompts = [
        Prompt(prompt_id=f"{i}@0", text="", token_ids=tuple(random.integers(5, 15, size=size).tolist()), columns={})
        for i, size in enumerate(prompt_tokens)
    ]
    started = time.perf_counter()
    rollouts = engine.generate(prompts, 1, max_tokens=[int(length) for length in lengths])
    seconds = time.perf_counter() - started
    if [len(x.response_ids) for x in rollouts] != lengths.tolist():
        raise RuntimeError("a sample has not the length that was asked for")
    return seconds


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    if given.engine == "counted":
        rows = measure_counted(given)
    else:
        with tempfile.TemporaryDirectory() as folder:
            rows = measure_vllm(given, pathlib.Path(folder))
    for row in rows:
        seconds = f"{row['seconds']:8.2f} s" if "seconds" in row else ""
        print(f"{row['order']:<32}{seconds} {row['of_the_bound']:6.3f} of the bound")
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(
            json.dumps({"given": {k: str(v) for k, v in vars(given).items()}, "rows": rows}, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
