"""Megatron-Core names ↔ Hugging Face names: one table per family, for the torch layer spec and Transformer Engine's.

An entry is a Megatron parameter of one layer, the Hugging Face tensors that it is made of, and their layout:

- ``REPLICATED``: the same on every tensor rank (norms).
- ``ROWS``:       split by rows over tensor ranks (embeddings, LM head); rows past the vocabulary are zeros.
- ``COLUMNS``:    split by columns (o_proj, down_proj).
- ``QKV``:        q, k and v interleaved by query group: [group, (heads per group + 2) · head_dim, …], groups split over
                  ranks (read, megatron-core 0.16.1 ``transformer/attention.py``
                  SelfAttention.get_query_key_value_tensors).
- ``GATE_UP``:    each rank's rows of gate, then its rows of up (0.16.1 ``transformer/mlp.py``); where there is one
                  tensor, each rank's rows of it.

Hugging Face names are those of the checkpoint's **files**: transformers 5 keeps a layer's experts fused in memory
(weights/fused.py).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

import torch

from megatron_rl.weights.model_shape import ModelShape


class Layout(Enum):
    REPLICATED = "replicated"
    ROWS = "rows"
    COLUMNS = "columns"
    QKV = "qkv"
    GATE_UP = "gate_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Describes one Megatron parameter and its Hugging Face tensors, in the order of the layout.

    expert: for an expert's parameter, the expert's number among this rank's experts; ``{expert}`` in its Hugging Face
            names stands for the number among all, which ``held_by`` fills in. Such a parameter is split over expert
            tensor ranks, any other over tensor ranks.
    """

    megatron: str
    hf: tuple[str, ...]
    layout: Layout
    expert: int | None = None

    def held_by(self, expert_rank: int, shape: ModelShape, expert_size: int) -> Entry:
        """Return the entry as one expert-parallel rank holds it.

        Rank e has experts e·E/size to (e + 1)·E/size (``moe/moe_layer.py``).
        """
        if self.expert is None:
            return self
        number = expert_rank * (shape.num_experts // expert_size) + self.expert
        return dataclasses.replace(self, hf=tuple(name.replace("{expert}", str(number)) for name in self.hf))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Holds Hugging Face's names of a family's mixture, below ``model.layers.<layer>.``."""

    block: str
    gate: str
    up: str
    down: str


EXPERT_NAMES = {
    "mixtral": ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
    "qwen3_moe": ExpertNames(block="mlp", gate="gate_proj", up="up_proj", down="down_proj"),
}

EMBEDDING = Entry(megatron="embedding.word_embeddings.weight", hf=("model.embed_tokens.weight",), layout=Layout.ROWS)
HEAD = Entry(megatron="output_layer.weight", hf=("lm_head.weight",), layout=Layout.ROWS)
TIED_HEAD = Entry(megatron="output_layer.weight", hf=("model.embed_tokens.weight",), layout=Layout.ROWS)
# transformers' reward models have this tensor
VALUE_HEAD = Entry(megatron="output_layer.weight", hf=("score.weight",), layout=Layout.REPLICATED)
FINAL_NORM = Entry(megatron="decoder.final_layernorm.weight", hf=("model.norm.weight",), layout=Layout.REPLICATED)


def layer_entries(shape: ModelShape) -> tuple[Entry, ...]:
    """Return the table of one decoder layer.

    Megatron names are relative to ``decoder.layers.<local>.``, Hugging Face's to ``model.layers.<layer>.``.
    """
    fused = shape.layer_spec == "transformer_engine"
    attention_norm = "self_attention.linear_qkv.layer_norm_weight" if fused else "input_layernorm.weight"
    # a router reads the normed state too, so Transformer Engine's spec fuses no norm into the experts (0.16.1
    # gpt_layer_specs.py)
    mlp_norm = "mlp.linear_fc1.layer_norm_weight" if fused and not shape.num_experts else "pre_mlp_layernorm.weight"
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    entries = [
        Entry(megatron=attention_norm, hf=("input_layernorm.weight",), layout=Layout.REPLICATED),
        Entry(
            megatron="self_attention.linear_qkv.weight", hf=tuple(f"{part}.weight" for part in qkv), layout=Layout.QKV
        ),
        Entry(megatron="self_attention.linear_proj.weight", hf=("self_attn.o_proj.weight",), layout=Layout.COLUMNS),
        Entry(megatron=mlp_norm, hf=("post_attention_layernorm.weight",), layout=Layout.REPLICATED),
    ]
    if shape.num_experts:
        router = f"{EXPERT_NAMES[shape.family].block}.gate.weight"
        entries.append(Entry(megatron="mlp.router.weight", hf=(router,), layout=Layout.REPLICATED))
    else:
        gate_up = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
        entries.append(Entry(megatron="mlp.linear_fc1.weight", hf=gate_up, layout=Layout.GATE_UP))
        entries.append(Entry(megatron="mlp.linear_fc2.weight", hf=("mlp.down_proj.weight",), layout=Layout.COLUMNS))
    if shape.qkv_bias:
        entries.append(
            Entry(
                megatron="self_attention.linear_qkv.bias", hf=tuple(f"{part}.bias" for part in qkv), layout=Layout.QKV
            )
        )
    if shape.qk_norm:
        for part in "qk":
            entries.append(
                Entry(
                    megatron=f"self_attention.{part}_layernorm.weight",
                    hf=(f"self_attn.{part}_norm.weight",),
                    layout=Layout.REPLICATED,
                )
            )
    return tuple(entries)


def expert_entries(shape: ModelShape, expert: int) -> tuple[Entry, ...]:
    """Return the table of one of this rank's experts, with names as in ``layer_entries``.

    The torch spec makes an MLP of each (0.16.1 and 0.19.2 ``moe/experts.py`` SequentialMLP), Transformer Engine's makes
    one grouped linear of all, with a weight per expert (TEGroupedMLP; run on a stand-in, not on a GPU).
    """
    names = EXPERT_NAMES[shape.family]
    within = f"{names.block}.experts.{{expert}}"
    grouped = shape.layer_spec == "transformer_engine"
    fc1, fc2 = (
        f"mlp.experts.{x}.weight{expert}" if grouped else f"mlp.experts.local_experts.{expert}.{x}.weight"
        for x in ("linear_fc1", "linear_fc2")
    )
    gate_up = (f"{within}.{names.gate}.weight", f"{within}.{names.up}.weight")
    return (
        Entry(megatron=fc1, hf=gate_up, layout=Layout.GATE_UP, expert=expert),
        Entry(megatron=fc2, hf=(f"{within}.{names.down}.weight",), layout=Layout.COLUMNS, expert=expert),
    )


def stage_entries(shape: ModelShape, stage: int, num_stages: int, expert_size: int) -> Iterator[Entry]:
    """Yield the parameters of one model chunk under full names, in an order that every rank derives alike.

    stage: counts chunks in the order of the layers: chunk c of pipeline rank r is stage c · PP + r of PP · VPP.

    An expert's entry stands for the i-th expert of every expert-parallel rank.

    A tied output layer on another stage than the embedding is a copy: it is loaded, and never exported twice
    (``export`` skips it).
    """
    if stage == 0:
        yield EMBEDDING
    per_stage = shape.num_layers // num_stages
    for local in range(per_stage):
        layer = stage * per_stage + local
        for entries in (
            layer_entries(shape),
            *(expert_entries(shape, i) for i in range(shape.num_experts // expert_size)),
        ):
            for entry in entries:
                yield dataclasses.replace(
                    entry,
                    megatron=f"decoder.layers.{local}.{entry.megatron}",
                    hf=tuple(f"model.layers.{layer}.{name}" for name in entry.hf),
                )
    if stage == num_stages - 1:
        yield FINAL_NORM
        if shape.value_head:
            yield VALUE_HEAD
        elif not shape.tied_embeddings:
            yield HEAD
        elif num_stages > 1:
            yield TIED_HEAD


def target_entries(shape: ModelShape) -> tuple[Entry, ...]:
    """Return the entries of one layer's weights that ``lora.targets`` names."""
    wanted = {f"{name}.weight" for name in shape.lora_targets}
    return tuple(entry for entry in layer_entries(shape) if entry.megatron.partition(".")[2] in wanted)


def adapter_name(linear: str) -> str:
    """Return the name of a linear layer's adapters, a module beside it: mlp.linear_fc1 → mlp.linear_fc1_adapter."""
    return f"{linear}_adapter"


def pair_entries(weight: Entry) -> Iterator[Entry]:
    """Yield the entries of A and B for each Hugging Face tensor of a target's weight, under PEFT's names.

    For a layer that is split by rows, A is whole on every tensor rank and B is split by rows, in the order of its own
    tensor; for one that is split by columns, A is split by columns and B is whole.
    """
    linear = adapter_name(weight.megatron.removesuffix(".weight"))
    in_rows = weight.layout is not Layout.COLUMNS
    for tensor in weight.hf:
        projection = tensor.removesuffix(".weight")
        for side, split, layout in (("A", not in_rows, Layout.COLUMNS), ("B", in_rows, Layout.GATE_UP)):
            yield Entry(
                megatron=f"{linear}.{projection.rpartition('.')[2]}_{side}",
                hf=(f"{projection}.lora_{side}.weight",),
                layout=layout if split else Layout.REPLICATED,
            )


def adapter_entries(shape: ModelShape, stage: int, num_stages: int, expert_size: int) -> Iterator[Entry]:
    """Yield the adapters' entries of one stage; Hugging Face names are PEFT's without its ``base_model.model.``."""
    per_stage = shape.num_layers // num_stages
    for local in range(per_stage):
        layer = stage * per_stage + local
        for entry in (pair for weight in target_entries(shape) for pair in pair_entries(weight)):
            yield dataclasses.replace(
                entry, megatron=f"decoder.layers.{local}.{entry.megatron}", hf=(f"model.layers.{layer}.{entry.hf[0]}",)
            )


def hf_size(shape: ModelShape, name: str) -> tuple[int, ...]:
    """Return the shape that a Hugging Face tensor has in a file, from the config alone, so without communication."""
    if ".lora_" in name:
        projection, _, side = name.removesuffix(".weight").rpartition(".lora_")
        rows, columns = hf_size(shape, f"{projection}.weight")
        return (shape.lora_rank, columns) if side == "A" else (rows, shape.lora_rank)
    kind = name.split("layers.")[-1].split(".", 1)[-1] if ".layers." in name else name
    kind = re.sub(r"^(mlp|block_sparse_moe)\.experts\.(\d+|\{expert\})\.", "expert.", kind)
    q, kv, hidden, ffn = (
        shape.num_heads * shape.head_dim,
        shape.num_kv_heads * shape.head_dim,
        shape.hidden_size,
        shape.ffn_hidden_size,
    )
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab_size, hidden),
        "lm_head.weight": (shape.vocab_size, hidden),
        "score.weight": (1, hidden),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.q_proj.bias": (q,),
        "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.weight": (hidden, q),
        "self_attn.q_norm.weight": (shape.head_dim,),
        "self_attn.k_norm.weight": (shape.head_dim,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    if shape.num_experts:
        names = EXPERT_NAMES[shape.family]
        sizes |= {
            f"{names.block}.gate.weight": (shape.num_experts, hidden),
            f"expert.{names.gate}.weight": (ffn, hidden),
            f"expert.{names.up}.weight": (ffn, hidden),
            f"expert.{names.down}.weight": (hidden, ffn),
        }
    return sizes.get(kind, (hidden,))  # the rest are norms over the hidden state


def shard_size(entry: Entry, shape: ModelShape, ranks: int) -> tuple[int, ...]:
    """Return the shape of one tensor rank's shard of a Megatron parameter."""
    first = hf_size(shape, entry.hf[0])
    match entry.layout:
        case Layout.REPLICATED:
            return first
        case Layout.ROWS:
            return (shape.padded_vocab_size // ranks, *first[1:])
        case Layout.COLUMNS:
            return (first[0], first[1] // ranks)
        case Layout.QKV | Layout.GATE_UP:
            return (sum(hf_size(shape, name)[0] for name in entry.hf) // ranks, *first[1:])


ReadRows = Callable[[str, int, int, int], torch.Tensor]
"""(name, dimension, start, stop) → that slice of a Hugging Face tensor, without reading the rest of it."""


def load_shard(entry: Entry, shape: ModelShape, read: ReadRows, rank: int, ranks: int) -> torch.Tensor:
    """Return this tensor rank's shard of a Megatron parameter, read from its own slices of Hugging Face tensors."""

    def part(name: str, dimension: int) -> torch.Tensor:
        share = hf_size(shape, name)[dimension] // ranks
        return read(name, dimension, rank * share, (rank + 1) * share)

    match entry.layout:
        case Layout.REPLICATED:
            return read(entry.hf[0], 0, 0, hf_size(shape, entry.hf[0])[0])
        case Layout.COLUMNS:
            return part(entry.hf[0], 1)
        case Layout.GATE_UP:
            return torch.cat([part(name, 0) for name in entry.hf])
        case Layout.QKV:
            groups = shape.num_kv_heads // ranks
            parts = [part(name, 0) for name in entry.hf]
            return torch.cat([x.view(groups, -1, *x.shape[1:]) for x in parts], dim=1).flatten(0, 1)
        case Layout.ROWS:
            share = shape.padded_vocab_size // ranks
            start, stop = rank * share, min((rank + 1) * share, shape.vocab_size)
            rows = read(entry.hf[0], 0, start, max(start, stop))
            if rows.shape[0] == share:
                return rows
            return torch.cat([rows, rows.new_zeros(share - rows.shape[0], *rows.shape[1:])])


def hf_parts(entry: Entry, shape: ModelShape, shards: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, part) of the Hugging Face tensors of a Megatron parameter; the inverse of ``load_shard``.

    shards: [ranks, *shard], those of all tensor ranks; may be rows of a wider buffer, but for ``ROWS``.

    Nothing is copied: each part is a view that has a tensor's elements in order, under more dimensions where ranks or
    groups cut it (``part.reshape(hf_size(shape, name))`` is the tensor).
    """
    match entry.layout:
        case Layout.REPLICATED:
            yield entry.hf[0], shards[0]
        case Layout.COLUMNS:
            yield entry.hf[0], shards.transpose(0, 1)
        case Layout.GATE_UP:
            yield from zip(entry.hf, shards.unflatten(1, (len(entry.hf), -1)).unbind(1), strict=True)
        case Layout.QKV:
            grouped = shards.unflatten(1, (shape.num_kv_heads // len(shards), -1))
            per_group = shape.num_heads // shape.num_kv_heads * shape.head_dim
            yield from zip(entry.hf, grouped.split([per_group, shape.head_dim, shape.head_dim], dim=2), strict=True)
        case Layout.ROWS:
            yield entry.hf[0], shards.view(-1, *shards.shape[2:])[: shape.vocab_size]


def merge_shards(entry: Entry, shape: ModelShape, shards: list[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Return the Hugging Face tensors of separate shards, each in its own shape; copied where the layout needs it."""
    stacked = shards[0][None] if len(shards) == 1 else torch.stack(shards)
    return [(name, part.reshape(hf_size(shape, name))) for name, part in hf_parts(entry, shape, stacked)]
