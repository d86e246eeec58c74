"""Functions that add, initialise, load, turn off and merge all LoRA adapters of a model.

model/lora/layer.py has the adapter of one linear layer.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from megatron_rl.config import LoraConfig
from megatron_rl.distributed import platform  # noqa: F401  (before megatron.core)
from megatron_rl.distributed.topology import Topology
from megatron_rl.errors import ConfigError
from megatron_rl.model.lora.layer import Adapter, GroupedAdapter, add_to
from megatron_rl.weights.entry import Entry
from megatron_rl.weights.export import named_weights
from megatron_rl.weights.families.register import FAMILIES
from megatron_rl.weights.mapping import (
    ADAPTER,
    adapted_weight,
    adapter_entries,
    hf_size,
    load_shard,
    target_entries,
    target_of,
)
from megatron_rl.weights.model_shape import ModelShape
from megatron_rl.weights.reader import WeightReader

from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip


def put_adapters(
    chunks: Sequence[GPTModel], shape: ModelShape, lora: LoraConfig, topology: Topology, seed: int
) -> ModelShape:
    """Freeze this rank's chunks, put adapters beside their linear layers and return the model's shape with adapters.

    An adapter's A starts as in PEFT (kaiming uniform: uniform within ±1/√in). Only ``seed`` and A's
    name determine its values, so every parallel layout starts with the same values. B starts at
    zero. Not a collective.

    Raises ConfigError if the layers cannot take adapters.
    """
    shape = shape.with_adapters(lora)
    _check_stages(shape)
    _check_place(shape, any(chunk.config.moe_shared_expert_overlap for chunk in chunks))
    for number, chunk in enumerate(chunks):
        chunk.requires_grad_(False)
        stage = number * topology.pipeline_size + topology.pipeline_rank
        for layer, block in zip(shape.layers_on(stage), chunk.decoder.layers, strict=True):
            by_linear: dict[str, list[Entry]] = {}
            for weight in target_entries(shape, layer, topology.expert_size):
                by_linear.setdefault(weight.megatron.rpartition(".weight")[0], []).append(weight)
            for linear, weights in by_linear.items():
                _put_beside(block, linear, weights, shape, topology)
        if chunk.pre_process and chunk.config.recompute_granularity is not None:
            chunk.embedding.register_forward_hook(_starts_the_graph)
    start_adapters(chunks, shape, topology, seed=seed)
    return shape


def _put_beside(
    block: torch.nn.Module, name: str, weights: Sequence[Entry], shape: ModelShape, topology: Topology
) -> None:
    """Add adapter modules beside the linear layer ``name``, and add their outputs to the linear's output.

    block: the transformer layer that holds the linear layer.
    weights: the ``Entry`` (weights/entry.py) of the linear's weight; for a grouped linear, the
        entries of the weights of all experts of this rank.
    """
    linear = block.get_submodule(name)
    adapters = [Adapter(linear, weight, shape, topology) for weight in weights]
    grouped = not weights[0].megatron.endswith(".weight")
    parent, _, own = name.rpartition(".")
    block.get_submodule(parent).add_module(
        own + ADAPTER, GroupedAdapter(topology).extend(adapters) if grouped else adapters[0]
    )
    add_to(linear, adapters)


def start_adapters(
    chunks: Sequence[torch.nn.Module],
    shape: ModelShape,
    topology: Topology,
    *,
    seed: int,
    rank: int | None = None,
    targets: Sequence[str] | None = None,
) -> None:
    """Give this rank's adapters their initial, untrained values, and the scale lora.alpha / ``rank``. Not a collective.

    rank: at most ``lora.rank``; None for ``lora.rank``. Rows of A and columns of B beyond it are
        zeros, and stay zeros: a row of A has a gradient of 0 while its column of B is 0, and the
        other way round.
    targets: the names of the linear layers whose adapters train; None for all. Other adapters are
        zeros and stay zeros.
    """
    fill_adapters(chunks, shape, topology, _Start(shape, seed))
    rank = rank or shape.lora_rank
    with torch.no_grad():
        for adapter in adapters_of(chunks):
            adapter.scale = shape.lora_alpha / rank
            trains = targets is None or adapter.target in targets
            for a, b in adapter.pairs():
                a[rank if trains else 0 :].zero_()
                b[:, rank if trains else 0 :].zero_()


def _starts_the_graph(_embedding: torch.nn.Module, _inputs: tuple, output: torch.Tensor) -> None:
    """Make a frozen embedding's output require a gradient, so that recomputed layers train their adapters.

    Megatron-Core's recomputation gives no gradient to parameters inside it unless one of its inputs
    requires a gradient (0.16.1 ``tensor_parallel/random.py`` CheckpointFunction), and a frozen
    embedding's output does not.
    """
    if torch.is_grad_enabled():
        output.requires_grad_()


def _check_place(shape: ModelShape, overlaps: bool) -> None:
    """Raise ConfigError if ``lora.targets`` names a linear layer that takes no adapter in this model.

    overlaps: whether shared experts run while the dispatcher exchanges tokens
        (``moe_shared_expert_overlap``).
    """
    # families that take adapters only on some layers
    targets = f"lora.targets={list(shape.lora_targets)}"
    named = [name for name in shape.lora_targets if name != "linear_proj"]
    if shape.kv_lora_rank and named:
        raise ConfigError(
            f"{targets} names {named[0]}, and in {shape.family}, whose keys and values are made of latents, adapters "
            "are built for linear_proj alone; set lora.targets=[linear_proj]"
        )
    named = [name for name in shape.lora_targets if name in ("linear_fc1", "linear_fc2")]
    if shape.num_experts and named and not FAMILIES[shape.family].expert_adapters:
        raise ConfigError(
            f"{targets} names {named[0]}, and adapters on experts were not tested for {shape.family}; set "
            "lora.targets=[linear_qkv,linear_proj]"
        )
    # targets that no kind of layer has, or that no adapter fits, and stages without a target
    weights = [x for layer in _kinds(shape) for x in target_entries(shape, layer, shape.num_experts or 1)]
    for target in shape.lora_targets:
        if all(target_of(weight.megatron) != target for weight in weights):
            raise ConfigError(
                f"{targets} names {target}, and {shape.family} has no linear layer of that name; leave it out"
            )
    for weight in weights:
        if weight.joined:
            raise ConfigError(
                f"{targets} names {target_of(weight.megatron)}, which {shape.family} holds as one tensor, "
                f"{weight.hf[0]}, and no adapter is built for several parts in one; set "
                "lora.targets=[linear_proj,linear_fc2]"
            )
        if overlaps and ".shared_experts." in weight.megatron:
            raise ConfigError(
                f"{targets} names {target_of(weight.megatron)}, and with "
                "megatron.transformer.moe_shared_expert_overlap=true a shared expert's ranks exchange its tokens "
                "outside its linear layers; set it to false, or lora.targets=[linear_qkv,linear_proj]"
            )


def _kinds(shape: ModelShape) -> list[int]:
    """Return the numbers of layers that show every kind of layer of the model."""
    mixers = [shape.has_delta_net(layer) for layer in range(shape.num_layers)]
    return list(dict.fromkeys((0, shape.num_layers - 1, *(mixers.index(kind) for kind in dict.fromkeys(mixers)))))


def _check_stages(shape: ModelShape) -> None:
    """Raise ConfigError if a pipeline stage has layers but none with an adapter, so that it would train nothing."""
    if shape.delta is None:
        return
    for stage in range(shape.num_stages):
        layers = shape.layers_on(stage)
        if layers and not any(target_entries(shape, layer, shape.num_experts or 1) for layer in layers):
            raise ConfigError(
                f"lora.targets={list(shape.lora_targets)} puts no adapter on pipeline stage {stage}, whose layers "
                f"{layers[0]} to {layers[-1]} have no linear layer of these names; name others too, or change "
                "parallel.pipeline_layout"
            )


class _Start:
    """Gives the values of untrained adapters by the methods of ``WeightReader``: random numbers for A, zeros for B.

    A is drawn whole on the host, and the wanted slice of it is returned.
    """

    def __init__(self, shape: ModelShape, seed: int) -> None:
        self.shape, self.seed = shape, seed

    def has(self, name: str) -> bool:
        return True  # every adapter can be drawn

    def size(self, name: str) -> tuple[int, ...]:
        return hf_size(self.shape, name)

    def read(self, name: str, dimension: int, start: int, stop: int) -> torch.Tensor:
        whole = torch.zeros(self.size(name))
        if ".lora_A." in name:
            number = int.from_bytes(hashlib.sha256(f"{self.seed}/{name}".encode()).digest()[:8]) >> 1
            bound = 1 / math.sqrt(whole.shape[1])
            whole.uniform_(-bound, bound, generator=torch.Generator().manual_seed(number))
        return whole.narrow(dimension, start, stop - start)


@torch.no_grad()
def fill_adapters(
    chunks: Sequence[torch.nn.Module], shape: ModelShape, topology: Topology, reader: WeightReader
) -> None:
    """Overwrite this rank's adapters by a reader's tensors. Not a collective.

    reader: reads slices of tensors by PEFT's names without the prefix ``base_model.model.``.

    Raises ConfigError if a tensor has another shape than the adapter.
    """
    for number, chunk in enumerate(chunks):
        parameters = dict(chunk.named_parameters())
        stage = number * topology.pipeline_size + topology.pipeline_rank
        for stage_entry in adapter_entries(shape, stage, topology.expert_size):
            entry = stage_entry.held_by(topology.expert_rank, shape, topology.expert_size)
            (name,) = entry.hf
            if reader.size(name) != hf_size(shape, name):
                raise ConfigError(
                    f"{name} has shape {reader.size(name)} and lora.rank={shape.lora_rank} asks for "
                    f"{hf_size(shape, name)}"
                )
            rank, ranks = topology.tensor_rank, topology.tensor_size
            if entry.expert is not None:
                rank, ranks = topology.expert_tensor_rank, topology.expert_tensor_size
            parameters[entry.megatron].copy_(load_shard(entry, shape, reader.read, rank, ranks))


def adapters_of(chunks: Sequence[torch.nn.Module]) -> list[Adapter]:
    """Return the adapters of this rank's chunks, layer by layer; [] for a model without LoRA."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, Adapter)]


@contextlib.contextmanager
def adapters_off(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Turn the adapters off within the ``with`` block: the model then computes with, and exports, the frozen weights.

    Not a collective. Under ``overlap_param_gather`` call ``Schedule.gather_parameters`` before the
    block. A forward pass without adapters does not wait for the gather of their parameters.

    Raises ValueError if the model has no adapters.
    """
    adapters = adapters_of(chunks)
    if not adapters:
        raise ValueError(
            "adapters_off() needs adapters, and this model has none: every weight is trained; set lora.rank"
        )
    before = [adapter.enabled for adapter in adapters]
    try:
        for adapter in adapters:
            adapter.enabled = False
        yield
    finally:
        for adapter, enabled in zip(adapters, before, strict=True):
            adapter.enabled = enabled


class MergedParameters(Mapping[str, torch.Tensor]):
    """Maps the name of each weight and buffer of a chunk to its tensor.

    If a weight has an adapter that is turned on, each access returns a new tensor with the adapter
    merged into the weight.
    """

    def __init__(self, chunk: torch.nn.Module, *, merges: bool = True) -> None:
        """Collect a chunk's weights and adapters; ``merges=False`` makes every access return the frozen weight."""
        self.merges = merges
        adapters = {name: module for name, module in chunk.named_modules() if isinstance(module, Adapter)}
        inside = {f"{name}.{own}" for name, module in adapters.items() for own, _ in module.named_parameters()}
        self.parameters = {name: weight for name, weight in named_weights(chunk).items() if name not in inside}
        self.adapters = {adapted_weight(name): module for name, module in adapters.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        parameter = self.parameters[name]
        if self.merges and name in self.adapters and self.adapters[name].enabled:
            return self.adapters[name].merged(parameter)
        return parameter

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)
