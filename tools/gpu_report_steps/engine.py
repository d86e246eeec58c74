"""Starts a vLLM engine on random weights of Qwen2.5-0.5B's shapes, samples, puts it to sleep and wakes it.

    python tools/gpu_report_steps/engine.py --json engine.json --eager

In this process, bfloat16. Of an engine that does not start, the file has what it had done before and the error's last
line. --eager leaves CUDA graphs and torch.compile out.
"""

from __future__ import annotations

import argparse
import os
import pathlib

import torch
from clock import DEVICE, seconds_of, write

FOLDER = pathlib.Path(__file__).resolve().parent
GIB = 2**30
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 256, 128, 128
VOCABULARY = 151_000


def start(given: argparse.Namespace):
    """Return the engine. Raises what vLLM raises."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}  # read when vllm is imported
    from vllm import LLM

    on_gpu = {"gpu_memory_utilization": 0.5, "enable_sleep_mode": True} if DEVICE.type == "cuda" else {}
    return LLM(
        model=str(FOLDER / "qwen2.5-0.5b"),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=1024,
        enforce_eager=given.eager,
        disable_log_stats=True,
        **on_gpu,
    )


def sample(engine, prompts: int, tokens: int) -> int:
    """Sample as many tokens for each prompt, and return how many there are in all."""
    from vllm import SamplingParams

    random = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (prompts, PROMPT_TOKENS), generator=random).tolist()
    wanted = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
    done = engine.generate([{"prompt_token_ids": row} for row in ids], wanted, use_tqdm=False)
    return sum(len(x.outputs[0].token_ids) for x in done)


def sleep_and_wake(engine) -> dict:
    free = torch.cuda.mem_get_info()[0]
    sleep_s = seconds_of(lambda: engine.sleep(level=1))
    freed = torch.cuda.mem_get_info()[0] - free
    return {"sleep_s": sleep_s, "freed_bytes": freed, "wake_s": seconds_of(engine.wake_up)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/gpu_report_steps/engine.py --json engine.json --eager",
    )
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs and torch.compile")
    given = parser.parse_args(arguments)
    made: list = []
    start_s = seconds_of(lambda: made.append(start(given)))
    found: dict = {"headline": [f"started in {start_s:.1f} s"], "start_s": start_s}
    write(given.json, found)
    (engine,) = made
    sample(engine, 8, 8)  # the kernels are built
    counts: list[int] = []
    seconds = seconds_of(lambda: counts.append(sample(engine, PROMPTS, NEW_TOKENS)))
    found |= {"tokens": counts[0], "seconds": seconds, "tokens_per_s": counts[0] / seconds}
    found["headline"].append(f"{counts[0]:,} tokens of {PROMPTS} prompts at {found['tokens_per_s']:,.0f} a second")
    write(given.json, found)
    if DEVICE.type == "cuda":
        found |= sleep_and_wake(engine)
        freed = f"{found['freed_bytes'] / GIB:.1f} GiB free"
        found["headline"].append(f"asleep in {found['sleep_s']:.2f} s, {freed}, awake in {found['wake_s']:.2f} s")
    wanted = PROMPTS * NEW_TOKENS
    return write(given.json, {**found, "failed": "" if counts[0] == wanted else f"{counts[0]} tokens of {wanted}"})


if __name__ == "__main__":
    raise SystemExit(main())
