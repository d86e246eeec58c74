"""LoRA adapters of linear layers: y = W x + (alpha / rank) · B A x (Hu et al. 2021, arXiv:2106.09685, eq. 3).

W and the rest of the model are frozen. A pair (A [rank, in], B [out, rank]) belongs to one Hugging Face
projection, though Megatron-Core fuses q, k, v and gate, up: so a pair means the same under every layout, and to PEFT. A
forward hook on the linear adds the pairs' outputs.

With p tensor ranks, each with its shard of W, a linear layer is:

- split by rows (linear_qkv, linear_fc1): A is whole on every rank, B has a rank's own rows. Every rank computes A x; in
  backward the gradient of A x, ``rank`` numbers per token and pair, is summed over ranks, so that the gradients of A
  and of x are whole on each of them. Under sequence parallelism x holds a rank's own tokens: A x is gathered, its
  gradient is reduce-scattered, and A's gradient, of its own tokens, is summed by finalize.
- split by columns (linear_proj, linear_fc2): A has a rank's own columns, B is whole. A x is summed over ranks (under
  sequence parallelism reduce-scattered); B's gradient is whole on every rank (under sequence parallelism it is of the
  rank's own tokens, and summed by finalize).

A parameter that finalize sums carries the mark ``sequence_parallel``, and a split one ``tensor_model_parallel``:
without the latter the gradient norm counts tensor rank 0's part alone; a whole parameter is counted once (0.16.1
``finalize_model_grads.py``, ``optimizer/optimizer.py``).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F

from megatron_rl.config import LoraConfig
from megatron_rl.distributed import platform  # noqa: F401  (before megatron.core)
from megatron_rl.distributed.topology import Topology
from megatron_rl.errors import ConfigError
from megatron_rl.weights.entry import Entry, Layout
from megatron_rl.weights.export import named_weights
from megatron_rl.weights.mapping import (
    adapter_entries,
    adapter_name,
    hf_size,
    load_shard,
    pair_entries,
    shard_size,
    target_entries,
)
from megatron_rl.weights.model_shape import ModelShape
from megatron_rl.weights.reader import WeightReader

from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes  # isort: skip
from megatron.core.tensor_parallel.mappings import (  # isort: skip
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint  # isort: skip

MERGED_ROWS = 1024  # rows of a weight that are merged at a time, in float32


class Adapter(torch.nn.Module):
    """Holds the pairs of one linear layer, as parameters ``<projection>_A`` and ``<projection>_B``.

    The pairs are zeros until they are filled. enabled: False inside ``adapters_off``. target: the linear layer's name.
    """

    def __init__(self, linear: torch.nn.Module, weight: Entry, shape: ModelShape, topology: Topology) -> None:
        super().__init__()
        self.enabled = True
        self.target = weight.megatron.removesuffix(".weight").rpartition(".")[2]
        self.scale = shape.lora_alpha / shape.lora_rank
        self.in_rows = weight.layout is not Layout.COLUMNS
        self.groups = shape.num_kv_heads // topology.tensor_size if weight.layout is Layout.QKV else 1
        self.sequence_parallel, self.tp_group = linear.sequence_parallel, linear.tp_group
        self.projections = tuple(name.removesuffix(".weight").rpartition(".")[2] for name in weight.hf)
        self.split: dict[str, int] = {}  # parameter's name → the dimension that tensor ranks split
        for entry in pair_entries(weight):
            name = entry.megatron.rpartition(".")[2]
            size = shard_size(entry, shape, topology.tensor_size)
            parameter = torch.nn.Parameter(torch.zeros(size, dtype=linear.weight.dtype, device=linear.weight.device))
            if entry.layout is Layout.REPLICATED:
                parameter.sequence_parallel = self.sequence_parallel
            else:
                self.split[name] = 0 if self.in_rows else 1
                set_tensor_model_parallel_attributes(parameter, True, self.split[name], 1)
            self.register_parameter(name, parameter)

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (A, B) of each projection, in the order in which the linear layer fuses them."""
        return [(self.get_parameter(f"{name}_A"), self.get_parameter(f"{name}_B")) for name in self.projections]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the adapter's term of this rank's output of the linear.

        x: [S, 1, in], the linear's input. The term is [S', 1, out], as the linear's output.
        """
        pairs = self.pairs()
        narrow = F.linear(x, torch.cat([a for a, _ in pairs])) * self.scale
        if self.in_rows and self.sequence_parallel:
            narrow = gather_from_sequence_parallel_region(narrow, tensor_parallel_output_grad=True, group=self.tp_group)
        elif self.in_rows:
            narrow = copy_to_tensor_model_parallel_region(narrow, group=self.tp_group)
        elif self.sequence_parallel:
            narrow = reduce_scatter_to_sequence_parallel_region(narrow, group=self.tp_group)
        else:
            narrow = reduce_from_tensor_model_parallel_region(narrow, group=self.tp_group)
        parts = [F.linear(product, b) for product, (_, b) in zip(narrow.chunk(len(pairs), -1), pairs, strict=True)]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part.unflatten(-1, (self.groups, -1)) for part in parts], -1).flatten(-2)

    @torch.no_grad()
    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """Return W + (alpha / rank) · B A of this rank's shard in a new tensor.

        Product and sum are computed in float32 and rounded to W's dtype once. The memory is that of the result and of
        two float32 blocks of MERGED_ROWS rows.
        """
        merged = weight.detach().clone()
        grouped, start = merged.unflatten(0, (self.groups, -1)), 0
        for a, b in self.pairs():
            grouped_b = b.unflatten(0, (self.groups, -1))
            rows = grouped_b.shape[1]
            for group, group_b in zip(grouped[:, start : start + rows], grouped_b, strict=True):
                for block, block_b in zip(group.split(MERGED_ROWS), group_b.split(MERGED_ROWS), strict=True):
                    block.copy_(torch.addmm(block.float(), block_b.float(), a.float(), alpha=self.scale))
            start += rows
        return merged

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Return the pairs under global shapes for ``dist_checkpointing``, so that another layout loads them."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            self.split,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def _adds(adapter: Adapter):
    """Return a forward hook that adds the adapter's term to its linear's (output, bias)."""

    def hook(_linear: torch.nn.Module, inputs: tuple[torch.Tensor], output: tuple[torch.Tensor, torch.Tensor | None]):
        return (output[0] + adapter(inputs[0]), output[1]) if adapter.enabled else None

    return hook


def put_adapters(
    chunks: Sequence[GPTModel], shape: ModelShape, lora: LoraConfig, topology: Topology, seed: int
) -> ModelShape:
    """Freeze this rank's chunks, put adapters beside their linear layers and return the shape with adapters.

    A starts as PEFT's does (kaiming uniform: uniform within ±1/√in), from ``seed`` and its own name, so that every
    layout starts with the same; B starts at zero. Raises ConfigError where the layers cannot take adapters. Not a
    collective.
    """
    shape = shape.with_adapters(lora)
    _check_place(shape)
    for chunk in chunks:
        chunk.requires_grad_(False)
        for layer in chunk.decoder.layers:
            for weight in target_entries(shape):
                parent, _, name = weight.megatron.removesuffix(".weight").rpartition(".")
                block = layer.get_submodule(parent)
                adapter = Adapter(block.get_submodule(name), weight, shape, topology)
                block.add_module(adapter_name(name), adapter)
                block.get_submodule(name).register_forward_hook(_adds(adapter))
        if chunk.pre_process and chunk.config.recompute_granularity is not None:
            chunk.embedding.register_forward_hook(_starts_the_graph)
    start_adapters(chunks, shape, topology, seed=seed)
    return shape


def start_adapters(
    chunks: Sequence[torch.nn.Module],
    shape: ModelShape,
    topology: Topology,
    *,
    seed: int,
    rank: int | None = None,
    targets: Sequence[str] | None = None,
) -> None:
    """Give this rank's adapters the values of untrained ones, and the scale of their rank. Not a collective.

    rank: at most ``lora.rank``: rows of A and columns of B beyond it are zeros, and stay zeros, since each is the
        other's gradient; None: ``lora.rank``.
    targets: the linear layers whose adapters train; those of others are zeros, and stay so; None: all that have one.
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
    """Make a frozen embedding's output require a gradient, for the recomputation of the layers after it.

    Megatron-Core's recomputation gives no gradient to parameters inside it unless one of its inputs requires a gradient
    (0.16.1 ``tensor_parallel/random.py`` CheckpointFunction), and a frozen embedding's output does not.
    """
    if torch.is_grad_enabled():
        output.requires_grad_()


def _check_place(shape: ModelShape) -> None:
    if shape.layer_spec != "torch":
        raise ConfigError(
            f"lora.rank={shape.lora_rank} puts adapters beside linear layers, and with "
            f"model.layer_spec={shape.layer_spec} linear_qkv and linear_fc1 take their input before its norm, which "
            "is within them; set model.layer_spec=torch"
        )
    asked = [name for name in shape.lora_targets if name != "linear_proj"]
    if shape.kv_lora_rank and asked:
        raise ConfigError(
            f"lora.targets={list(shape.lora_targets)} names {asked[0]}, and in {shape.family}, whose keys and values "
            "are made of latents and whose MLP is a mixture of experts, adapters are built for linear_proj alone; set "
            "lora.targets=[linear_proj]"
        )
    asked = [name for name in shape.lora_targets if name in ("linear_fc1", "linear_fc2")]
    if shape.num_experts and asked:
        raise ConfigError(
            f"lora.targets={list(shape.lora_targets)} names {asked[0]}, and the MLP of {shape.family} is a mixture of "
            "experts, which takes no adapters; set lora.targets=[linear_qkv,linear_proj]"
        )
    for weight in target_entries(shape):
        if weight.joined:
            linear = weight.megatron.removesuffix(".weight").rpartition(".")[2]
            raise ConfigError(
                f"lora.targets={list(shape.lora_targets)} names {linear}, which {shape.family} holds as one tensor, "
                f"{weight.hf[0]}, and no adapter is built for several parts in one; set "
                "lora.targets=[linear_proj,linear_fc2]"
            )


class _Start:
    """Reads the values of untrained adapters; A is drawn whole on the host, whichever slice is read."""

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

    reader: reads tensors by PEFT's names without ``base_model.model.``.

    Raises ConfigError where a tensor has another shape.
    """
    stages = topology.pipeline_size * topology.virtual_size
    for number, chunk in enumerate(chunks):
        parameters = dict(chunk.named_parameters())
        for entry in adapter_entries(
            shape, number * topology.pipeline_size + topology.pipeline_rank, stages, topology.expert_size
        ):
            (name,) = entry.hf
            if reader.size(name) != hf_size(shape, name):
                raise ConfigError(
                    f"{name} has shape {reader.size(name)} and lora.rank={shape.lora_rank} asks for "
                    f"{hf_size(shape, name)}"
                )
            parameters[entry.megatron].copy_(
                load_shard(entry, shape, reader.read, topology.tensor_rank, topology.tensor_size)
            )


def adapters_of(chunks: Sequence[torch.nn.Module]) -> list[Adapter]:
    """Return this rank's adapters, layer by layer; none where every weight is trained."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, Adapter)]


@contextlib.contextmanager
def adapters_off(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Turn the adapters off within the body: it computes with and exports the frozen model. Not a collective.

    Under ``overlap_param_gather`` the gather of parameters must have ended before (``Schedule.gather_parameters``): in
    the body no forward pass would wait for it. Raises ValueError where the model has no adapters.
    """
    adapters = adapters_of(chunks)
    if not adapters:
        raise ValueError(
            "adapters_off() leaves the frozen model, and every weight of this one is trained; set lora.rank"
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
    """Maps names to a chunk's weights and buffers, a weight with its adapter merged in on request (and not kept)."""

    def __init__(self, chunk: torch.nn.Module, *, merges: bool = True) -> None:
        """Take the chunk; without ``merges`` a weight is the frozen one."""
        self.merges = merges
        adapters = {name: module for name, module in chunk.named_modules() if isinstance(module, Adapter)}
        inside = {f"{name}.{own}" for name, module in adapters.items() for own, _ in module.named_parameters()}
        self.parameters = {name: weight for name, weight in named_weights(chunk).items() if name not in inside}
        self.adapters = {f"{name.removesuffix(adapter_name(''))}.weight": module for name, module in adapters.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        parameter = self.parameters[name]
        if self.merges and name in self.adapters and self.adapters[name].enabled:
            return self.adapters[name].merged(parameter)
        return parameter

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)
