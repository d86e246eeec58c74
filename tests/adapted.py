"""The reference of the adapter tests: a Hugging Face model whose linear layers carry A and B, in plain autograd."""

from collections.abc import Mapping

import torch

from megatron_rl.weights.fused import file_tensors

PROJECTIONS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
DELTA = {"in_proj": ("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
         "out_proj": ("out_proj",)}  # of gated delta nets


EXPERTS = {"mixtral": {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}}  # files' names, where they are others


def adapt(
    model: torch.nn.Module, *, rank: int, alpha: float, targets: tuple[str, ...] = tuple(PROJECTIONS), seed: int = 7
) -> None:
    """Put adapters y + (alpha / rank) · B (A x) on the model's linear layers and experts, and freeze the rest.

    A and B are random: with B = 0 the gradient of A would be 0 too. Parameters have the names that the tests ask for:
    ``model.layers.0.self_attn.q_proj.lora_A.weight``; an expert's, ``…mlp.experts.3.gate_proj.lora_A.weight``.
    """
    model.requires_grad_(False)
    random = torch.Generator().manual_seed(seed)
    wanted = {name for target in targets for name in (PROJECTIONS | DELTA)[target]}
    for name, module in list(model.named_modules()):
        if name.endswith("mlp.experts") and wanted & set(PROJECTIONS["linear_fc1"] + PROJECTIONS["linear_fc2"]):
            _adapt_experts(module, EXPERTS.get(model.config.model_type, {}), wanted, rank, alpha / rank, random)
        elif name.rpartition(".")[2] in wanted and isinstance(module, torch.nn.Linear):
            _put_pair(module, module.in_features, module.out_features, rank, random)
            module.register_forward_hook(
                lambda own, inputs, output: output + alpha / rank * own.lora_B(own.lora_A(inputs[0]))
            )


def _put_pair(module: torch.nn.Module, inputs: int, outputs: int, rank: int, random: torch.Generator) -> None:
    module.lora_A = torch.nn.Linear(inputs, rank, bias=False)
    module.lora_B = torch.nn.Linear(rank, outputs, bias=False)
    for each in (module.lora_A.weight, module.lora_B.weight):
        each.data = 0.1 * torch.randn(each.shape, generator=random)


def _adapt_experts(
    experts: torch.nn.Module, names: dict[str, str], wanted: set[str], rank: int, scale: float, random: torch.Generator
) -> None:
    """Give each expert pairs of its own, as modules 0, 1, …, and have the experts run one after the other with them."""
    hidden, width = experts.hidden_dim, experts.intermediate_dim
    sizes = {"gate_proj": (hidden, width), "up_proj": (hidden, width), "down_proj": (width, hidden)}
    for number in range(experts.num_experts):
        own = torch.nn.Module()
        for projection in [x for x in sizes if x in wanted]:
            own.add_module(names.get(projection, projection), pair := torch.nn.Module())
            _put_pair(pair, *sizes[projection], rank, random)
        experts.add_module(str(number), own)

    def linear(number: int, projection: str, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        product = x @ weight.t()
        if projection not in wanted:
            return product
        pair = experts.get_submodule(f"{number}.{names.get(projection, projection)}")
        return product + scale * pair.lora_B(pair.lora_A(x))

    def forward(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for number in range(experts.num_experts):
            rows = (chosen == number).any(-1).nonzero()[:, 0]
            gate, up = experts.gate_up_proj[number].chunk(2)
            own = x[rows]
            inner = experts.act_fn(linear(number, "gate_proj", gate, own)) * linear(number, "up_proj", up, own)
            out = linear(number, "down_proj", experts.down_proj[number], inner)
            share = (weights * (chosen == number)).sum(-1)[rows]
            total = total.index_add(0, rows, out * share[:, None])
        return total

    experts.forward = forward


def without_adapters(model: torch.nn.Module) -> torch.nn.Module:
    """Take the adapters out of a model and return the same object, whose state has them no longer."""
    for name, module in list(model.named_modules()):
        if name.endswith("mlp.experts"):
            module._modules.clear()
        elif isinstance(module, torch.nn.Linear) and "lora_A" in module._modules:
            del module.lora_A, module.lora_B
            module._forward_hooks.clear()
    return model


def adapters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = {name: x.detach().clone() for name, x in model.named_parameters() if ".lora_" in name}
    return file_tensors(named, model.config.model_type)


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
