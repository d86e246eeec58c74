"""Checks and measures a gated delta net over packed sequences, by torch's kernels and by flash-linear-attention's.

    python tools/gpu_report_steps/delta_net.py --json delta.json

The layer of Qwen3.5-9B's shapes (hidden 4,096, 16 heads of q and k, 32 of v, 128 each), bfloat16, in micro-batches of
8,192 tokens: one sequence, 16 sequences, and 16 answers that share a prompt. Output and gradient of fla's kernels are
compared with torch's, which compute in float32. The bound is on the norm of the difference over the norm: 0.02.
Then tokens a second, forward and backward, in the third call.
"""

from __future__ import annotations

import argparse
import pathlib

import numpy as np
import torch
from clock import DEVICE, seconds_of, write
from transformers import Qwen3_5TextConfig

from megatron_rl.backend import MegatronBackend
from megatron_rl.config import load_config
from megatron_rl.model.attention.layout import Layout, lay_out
from megatron_rl.model.attention.packed import PackedSequences, pack
from megatron_rl.model.delta_net.kernels import fla_fault, torch_rule
from megatron_rl.model.delta_net.layer import GatedDeltaNet

BOUND = 0.02
SIZES = dict(hidden_size=4096, intermediate_size=12288, num_attention_heads=16, num_key_value_heads=4, head_dim=256)
SMALL = dict(hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
SMALL |= dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)


def layouts(tokens: int) -> dict[str, Layout]:
    """Return micro-batches of so many tokens, a multiple of 32."""
    answers = np.full(16, tokens // 32)
    shared = lay_out(np.full(16, tokens // 2), answers, np.zeros(16, dtype=int))
    return {"one sequence": Layout.of((tokens,)), "16": Layout.of((tokens // 16,) * 16), "16 of one prompt": shared}


def build(*, small: bool) -> MegatronBackend:
    """Return a backend whose model has a gated delta net, and attention behind it."""
    sizes = dict(vocab_size=512, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    config = Qwen3_5TextConfig(**sizes, **(SMALL if small else SIZES))
    settings = ["model.init=random", "model.dtype=bfloat16", "model.layer_spec=torch", "model.delta_kernel=torch"]
    return MegatronBackend(load_config(None, settings), hf_config=config, total_steps=1)


def run(layer: GatedDeltaNet, hidden: torch.Tensor, packed: PackedSequences) -> list[torch.Tensor]:
    """Return the layer's output, and the gradient of its input."""
    given = hidden.detach().requires_grad_()
    output, _ = layer(given, packed_seq_params=packed)
    (gradient,) = torch.autograd.grad(output, given, hidden)
    return [output.detach(), gradient]


def measure(layer: GatedDeltaNet, rules: dict, case: str, layout: Layout) -> tuple[list[dict], dict]:
    """Return tokens a second by each rule, and the error of fla's, if it is among them."""
    random = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(layout.num_tokens, 1, layer.config.hidden_size, generator=random, device=DEVICE).bfloat16()
    packed, speeds, found = pack(layout, DEVICE), [], {}
    for kernels, rule in rules.items():
        layer.rule = rule
        found[kernels] = run(layer, hidden, packed)  # compiles, tunes and lays out
        times = [seconds_of(lambda: run(layer, hidden, packed)) for _ in range(2)]
        speeds.append(dict(case=case, kernels=kernels, seconds=times[-1], tokens_per_s=layout.num_tokens / times[-1]))
    pairs = zip(found.get("fla", ()), found["torch"], strict=False)
    errors = [float((x.float() - y.float()).norm() / y.float().norm()) for x, y in pairs]
    return speeds, {"case": case, "error": max(errors, default=0.0), "bound": BOUND}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/gpu_report_steps/delta_net.py --json delta.json",
    )
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--small", action="store_true", help="a small layer, and torch's kernels alone without a GPU")
    given = parser.parse_args(arguments)
    backend, rules = build(small=given.small), {"torch": torch_rule}
    absent = fla_fault() if DEVICE.type == "cuda" else "there is no GPU"
    if not absent:
        from megatron_rl.model.delta_net.fla import fla_rule

        rules["fla"] = fla_rule
    layer = next(x for x in backend.chunks[0].module.modules() if isinstance(x, GatedDeltaNet))
    speeds, checks = [], []
    for case, layout in layouts(512 if given.small else 8192).items():
        of_case, check = measure(layer, rules, case, layout)
        speeds, checks = speeds + of_case, [*checks, check]
    backend.close()
    wrong = [x for x in checks if not x["error"] <= x["bound"]]
    says = [f"{x['case']}, {x['kernels']}: {x['tokens_per_s']:,.0f} tokens/s" for x in speeds]
    says.append(f"fla not run: {absent}" if absent else f"fla's worst error {max(x['error'] for x in checks):.2g}")
    failed = "; ".join(f"{x['case']}: {x['error']:.2g} above {x['bound']:g}" for x in wrong)
    return write(given.json, {"headline": says, "checks": checks, "speeds": speeds, "failed": failed})


if __name__ == "__main__":
    raise SystemExit(main())
