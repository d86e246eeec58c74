"""The reference of the adapter tests: a Hugging Face model whose linear layers carry A and B, in plain autograd."""

from __future__ import annotations

from collections.abc import Mapping

import torch

PROJECTIONS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


def adapt(
    model: torch.nn.Module, *, rank: int, alpha: float, targets: tuple[str, ...] = tuple(PROJECTIONS), seed: int = 7
) -> None:
    """Put adapters y + (alpha / rank) · B (A x) on the model's linear layers, and freeze the rest.

    A and B are random: with B = 0 the gradient of A would be 0 too. Parameters have the names that the tests ask for:
    ``model.layers.0.self_attn.q_proj.lora_A.weight``.
    """
    model.requires_grad_(False)
    random = torch.Generator().manual_seed(seed)
    wanted = {name for target in targets for name in PROJECTIONS[target]}
    for name, linear in list(model.named_modules()):
        if name.rpartition(".")[2] not in wanted:
            continue
        linear.lora_A = torch.nn.Linear(linear.in_features, rank, bias=False)
        linear.lora_B = torch.nn.Linear(rank, linear.out_features, bias=False)
        for each in (linear.lora_A.weight, linear.lora_B.weight):
            each.data = 0.1 * torch.randn(each.shape, generator=random)
        linear.register_forward_hook(
            lambda own, inputs, output: output + alpha / rank * own.lora_B(own.lora_A(inputs[0]))
        )


def adapters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in model.named_parameters() if ".lora_" in name}


@torch.no_grad()
def merged(weights: Mapping[str, torch.Tensor], *, rank: int, alpha: float) -> dict[str, torch.Tensor]:
    """Return the weights by name with each adapter added to its weight: W + (alpha / rank) · B A, in float64."""
    found = {name: x for name, x in weights.items() if ".lora_" not in name}
    for name in found:
        side = name.removesuffix(".weight") + ".lora_{}.weight"
        if side.format("A") in weights:
            product = weights[side.format("B")].double() @ weights[side.format("A")].double()
            found[name] = (found[name].double() + alpha / rank * product).to(found[name].dtype)
    return found
