"""Measures rollouts of the embedded engine with and without drafts of earlier answers, in turn, on this host.

    python tools/benchmarks/speculation.py                                  # a random Qwen2 of the sizes below
    python tools/benchmarks/speculation.py --model FOLDER --temperatures 1  # a model of your own

Each batch (its number of samples is printed) is sampled in several visits, as in a run's epochs: the weights of
each visit are those of the first, changed by --change of their norm, and the seeds differ. The first visit fills the
history and tries the widths; the others are measured. Both engines sample the same tokens, which is checked; a sample
may part where float rounding moves a token's probabilities past its random number, and such samples are counted.

A random model's answers tell nothing of yours: it is made certain by a low temperature, and repeats itself. The share
of accepted drafts is printed beside each ratio.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog="example: python tools/benchmarks/speculation.py --hidden 256"
    )
    parser.add_argument(
        "--model", type=pathlib.Path, help="a Hugging Face folder; default: a random Qwen2 of the sizes below"
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=4000)
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 64], help="samples decoded at once")
    parser.add_argument("--samples", type=int, default=4, help="per prompt")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--response-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.2, 0.4])
    parser.add_argument("--change", type=float, default=0.003, help="of the weights from visit to visit")
    parser.add_argument("--visits", type=int, default=3, help="after one that fills the history")
    parser.add_argument("--json", type=pathlib.Path, help="also write what is printed there")
    given = parser.parse_args(arguments)
    for name in ("hidden", "layers", "samples", "prompt_tokens", "response_tokens", "visits"):
        if vars(given)[name] < 1:
            parser.error(f"--{name.replace('_', '-')} {vars(given)[name]} must be at least 1")
    if any(batch % given.samples for batch in given.batches):
        parser.error(f"--batches {given.batches} must be multiples of --samples {given.samples}")
    return given


def write_model(given: argparse.Namespace, folder: pathlib.Path) -> pathlib.Path:
    """Write a random model and a tokenizer of numbers; return their folder."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=given.vocabulary,
        hidden_size=given.hidden,
        intermediate_size=4 * given.hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=max(1, given.hidden // 64),
        num_key_value_heads=max(1, given.hidden // 128),
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        initializer_range=0.05,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    core = Tokenizer(models.WordLevel({str(token): token for token in range(given.vocabulary)}, unk_token="1"))
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="0").save_pretrained(folder)
    return folder


def changed(weights: dict, share: float, visit: int) -> Iterator[tuple]:
    """Yield the weights of a visit: each tensor moved by ``share`` of its norm in a drawn direction."""
    import torch

    draws = torch.Generator().manual_seed(visit)
    for name, tensor in weights.items():
        noise = torch.randn(tensor.shape, generator=draws)
        yield name, tensor + share * tensor.norm() / noise.norm() * noise


def open_engines(given: argparse.Namespace, model: pathlib.Path, batch: int, temperature: float) -> dict:
    """Return the engine without drafts and the one with, by their ``rollout.speculation``. They have no weights."""
    import torch
    from transformers import AutoTokenizer

    from megatron_rl.config import RolloutConfig
    from megatron_rl.rollout.engines.embedded import TransformersEngine

    engines = {}
    for kind in ("off", "history"):
        settings = RolloutConfig(
            speculation=kind,
            temperature=temperature,
            max_response_tokens=given.response_tokens,
            max_batch_samples=batch,
            allow_large_embedded_model=True,
        )
        tokenizer, device = AutoTokenizer.from_pretrained(model), torch.device("cpu")
        engines[kind] = TransformersEngine(str(model), tokenizer, settings, seed=0, dtype=torch.float32, device=device)
    return engines


def measure(given: argparse.Namespace, model: pathlib.Path, batch: int, temperature: float) -> dict:
    """Return the medians of one batch size at one temperature."""
    import numpy as np
    from safetensors.torch import load_file
    from transformers import AutoConfig

    from megatron_rl.types import Prompt

    weights = {name: x for file in sorted(model.glob("*.safetensors")) for name, x in load_file(file).items()}
    vocab_size = AutoConfig.from_pretrained(model).vocab_size
    drawn = np.random.default_rng(0).integers(2, vocab_size, size=(batch // given.samples, given.prompt_tokens))
    prompts = [
        Prompt(prompt_id=f"{i}@0", text="", token_ids=tuple(x.tolist()), columns={}) for i, x in enumerate(drawn)
    ]
    engines = open_engines(given, model, batch, temperature)
    seconds: dict[str, list[float]] = {kind: [] for kind in engines}
    parted = tokens = steps = 0
    for visit in range(given.visits + 1):
        found = {}
        for kind, engine in engines.items():
            engine.load_weights(changed(weights, given.change, visit), visit)
            started = time.perf_counter()
            found[kind] = engine.generate(prompts, given.samples)
            seconds[kind].append(time.perf_counter() - started)
        if not visit:
            engines["history"].speculation.take_counts()
            continue
        tokens += sum(len(x.response_ids) for x in found["off"])
        steps += max(len(x.response_ids) for x in found["off"]) - 1
        pairs = zip(found["off"], found["history"], strict=True)
        parted += sum(one.response_ids != other.response_ids for one, other in pairs)
    counts = engines["history"].speculation.take_counts()
    ratios = [one / other for one, other in zip(seconds["off"], seconds["history"], strict=True)][1:]
    return {
        "samples": batch,
        "temperature": temperature,
        "tokens": tokens / given.visits,
        "steps": steps / given.visits,
        "accepted": counts["speculation/accepted"] / max(1, counts["speculation/drafted"]),
        "tokens_per_pass": 1 + counts["speculation/accepted"] / max(1, counts["speculation/passes"]),
        "off_s": statistics.median(seconds["off"][1:]),
        "history_s": statistics.median(seconds["history"][1:]),
        "ratios": ratios,
        "parted": parted,
    }


def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or write_model(given, pathlib.Path(folder))
        print(f"medians of {given.visits} visits; the last column: samples that part by rounding, of all")
        print(
            "| samples | temperature | tokens | accepted | tokens a pass | off s | history s | off / history | parted |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        for temperature in given.temperatures:
            for batch in given.batches:
                rows.append(row := measure(given, model, batch, temperature))
                ratio = f"{statistics.median(row['ratios']):.2f} ({min(row['ratios']):.2f} to {max(row['ratios']):.2f})"
                print(
                    f"| {batch} | {temperature:g} | {row['tokens']:.0f} | {row['accepted']:.0%} | "
                    f"{row['tokens_per_pass']:.2f} | {row['off_s']:.2f} | {row['history_s']:.2f} | {ratio} | "
                    f"{row['parted']} of {batch * given.visits} |",
                    flush=True,
                )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
