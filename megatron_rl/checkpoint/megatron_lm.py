"""The layout of Megatron-LM's checkpoint folder, and the keys under which it holds the tensors of weights/mapping.py.

    <folder>/latest_checkpointed_iteration.txt    the iteration, or "release" for a converted model
    <folder>/iter_0000100/, <folder>/release/     torch_dist files (checkpoint/torch_dist.py)
    <folder>/hf/                                  our addition: Hugging Face config, tokenizer, generation config

Megatron-LM refuses iteration 0 (``training/checkpointing.py``, read_metadata: "assert iteration > 0
or release"). It starts a ``release`` at iteration 0 with a fresh optimizer.

The keys are the keys of ``GPTModel.sharded_state_dict`` (Megatron-Core 0.16.1 and 0.19.2). The same
parameter of all layers is one stacked tensor, with the layer as first index. For a mixture's
experts the second index is the expert. A norm before a linear layer has a key of Transformer
Engine's fused layer, such as ``linear_qkv.layer_norm_weight``, even in a model built of torch's
layers. The norm before a mixture of experts has the key ``pre_mlp_layernorm.weight`` in a model of
Transformer Engine's layers, and ``mlp.linear_fc1.layer_norm_weight`` in one of torch's layers. Every
stored tensor is whole, so that any topology loads it. Rows lie as on a single tensor-parallel rank:
q, k, v by query group, gate's rows before up's.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron_rl.checkpoint.folder import LATEST, DamagedCheckpoint, name_of
from megatron_rl.checkpoint.torch_dist import TorchDistReader
from megatron_rl.errors import ConfigError, quoted
from megatron_rl.json_text import read_bytes
from megatron_rl.weights.entry import Entry, Layout
from megatron_rl.weights.families.register import stacking
from megatron_rl.weights.mapping import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    layer_entries,
    merge_shards,
    own_experts,
    shard_size,
)

if TYPE_CHECKING:
    from megatron_rl.storage.remote import RemotePath
from megatron_rl.weights.model_shape import ModelShape

RELEASE, HF_FOLDER = "release", "hf"
LAYERS = "decoder.layers."


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Locates a tensor in a checkpoint by its key and, within a stacked tensor, by its first indices.

    lead:  the tensor's first indices in the stacked tensor; () if it is not stacked.
    stack: the sizes of the dimensions that ``lead`` indexes.

    Example: layer 2 of 4: ``Place(key="decoder.layers.self_attention.linear_proj.weight",
    lead=(2,), stack=(4,))``.
    """

    key: str
    lead: tuple[int, ...] = ()
    stack: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Holds one tensor's description (an Entry of weights/mapping.py), and its name in a checkpoint.

    entry: the description, with the tensor's names in Hugging Face files (numbers of layer and expert
        included), its name in Megatron-Core, and the order of its rows.
    name: the key without ``decoder.layers.`` and the layer's number; the whole key if ``layer`` is
        None. An expert's name lacks the expert's number.
    aliases: other names under which Megatron-Core may store the same tensor.
    layer, expert: the tensor's numbers; None if it belongs to no layer, or to no expert.
    by_layer: True if each layer's tensor has a key of its own, with the layer's number, as in a model
        with both dense layers and mixtures of experts. False if all layers share one stacked tensor.
    """

    entry: Entry
    name: str
    aliases: tuple[str, ...] = ()
    layer: int | None = None
    expert: int | None = None
    by_layer: bool = False

    @property
    def lead(self) -> tuple[int, ...]:
        """Return the tensor's first indices, (layer, expert), in the stacked tensor to write; () if not stacked."""
        return tuple(x for x in (None if self.by_layer else self.layer, self.expert) if x is not None)

    def stack(self, shape: ModelShape) -> tuple[int, ...]:
        """Return the sizes of a stacked tensor's first axes, layers then experts; () if the tensor is not stacked.

        Example: for expert 3 of 8 in layer 2 of 4 it is (4, 8); ``lead``, the indices there, is (2, 3).
        """
        counts = (None if self.by_layer else self.layer, shape.num_layers), (self.expert, shape.num_experts)
        return tuple(count for number, count in counts if number is not None)

    def keys(self) -> tuple[str, ...]:
        """Return the keys under which this package writes the tensor, or the stacked tensor that holds it.

        The first key is made from ``name``, the others from ``aliases``.
        """
        prefix = "" if self.layer is None else f"{LAYERS}{self.layer}." if self.by_layer else LAYERS
        return tuple(prefix + x for x in (self.name, *self.aliases))

    def dtype(self, asked: torch.dtype | None) -> torch.dtype | None:
        """Return the dtype in which the tensor is written: float32 for a frozen buffer, else ``asked``.

        asked: the dtype that the caller wants for parameters; None keeps the source's dtype.
        """
        return torch.float32 if self.entry.frozen else asked

    def forms(self, shape: ModelShape) -> Iterator[Place]:
        """Yield each Place, a key and indices, at which Megatron-Core may have written the tensor.

        The first is in a stacked tensor. In the second each layer has its own key
        (``non_homogeneous_layers``). In the third each layer's expert has its own key too
        (``singleton_local_shards``). The same Places follow for each of ``aliases``.
        """
        experts = () if self.expert is None else (shape.num_experts,)
        expert = () if self.expert is None else (self.expert,)
        for name in (self.name, *self.aliases):
            if self.layer is None:
                yield Place(key=name)
                continue
            yield Place(key=LAYERS + name, lead=(self.layer, *expert), stack=(shape.num_layers, *experts))
            yield Place(key=f"{LAYERS}{self.layer}.{name}", lead=expert, stack=experts)
            if self.expert is not None:
                yield Place(
                    key=f"{LAYERS}{self.layer}.{name.replace('experts.experts.', f'experts.experts.{self.expert}.')}"
                )


def stored_layers(shape: ModelShape) -> Iterator[list[Stored]]:
    """Yield lists of Stored, which describe all tensors of the model and their names in a checkpoint.

    There is a list for the embedding, for each layer, for the final norm, and for an output matrix.
    They come in the order of a Hugging Face checkpoint.
    """
    yield [Stored(entry=EMBEDDING, name=EMBEDDING.megatron)]
    fused: ModelShape = dataclasses.replace(shape, layer_spec="transformer_engine")
    for layer in range(shape.num_layers):
        tensors = []
        for entry in layer_entries(fused, layer):
            # 0.16.1 and 0.19.2 gpt_layer_specs.py: the local spec maps pre_mlp_layernorm. to
            # mlp.linear_fc1.layer_norm_, experts or not
            aliases = ("mlp.linear_fc1.layer_norm_weight",) if entry.megatron == "pre_mlp_layernorm.weight" else ()
            tensors.append(Stored(entry=_of_layer(entry, layer), name=entry.megatron, aliases=aliases, layer=layer))
        tensors += _stored_experts(fused, layer)
        yield [dataclasses.replace(x, by_layer=shape.layers_differ) for x in tensors]
    yield [Stored(entry=FINAL_NORM, name=FINAL_NORM.megatron)]
    if not shape.tied_embeddings:
        yield [Stored(entry=HEAD, name=HEAD.megatron)]


def _stored_experts(shape: ModelShape, layer: int) -> Iterator[Stored]:
    """Yield one Stored (description and name) for each tensor of each expert of a layer.

    The order is expert by expert. If Hugging Face files stack a matrix of all experts in one tensor,
    the order is matrix by matrix: ``linear_fc1`` of every expert, then ``linear_fc2`` of every expert.
    """
    first = [entry for entries in own_experts(shape, shape.num_experts, layer) for entry in entries]
    kinds = [[entry] for entry in first] if stacking(shape.family) else [first]
    for kind in kinds if first else ():
        for expert in range(shape.num_experts):
            for local in kind:
                entry = dataclasses.replace(local, expert=expert).held_by(0, shape, 1)
                name = re.sub(r"experts\.(linear_fc\d\.(?:weight|bias))0$", r"experts.experts.\1", local.megatron)
                yield Stored(entry=_of_layer(entry, layer), name=name, layer=layer, expert=expert)


def _of_layer(entry: Entry, layer: int) -> Entry:
    return dataclasses.replace(entry, hf=tuple(f"model.layers.{layer}.{x}" for x in entry.hf))


def whole_size(entry: Entry, shape: ModelShape) -> tuple[int, ...]:
    """Return the shape of a Megatron parameter before it is split over tensor-parallel ranks.

    entry: the parameter's description by weights/mapping.py.
    """
    return shard_size(entry, shape, 1)


def extra_state_keys(shape: ModelShape) -> list[str]:
    """Return the keys of the ``_extra_state`` objects of linears, norms and attention: FP8 scales, empty without FP8.

    A model asks for these objects when it loads, and Megatron-Core raises if one is missing. The
    result includes some keys that no model asks for, which does no harm.
    """
    # The keys of torch's layers were tested in a run, those of Transformer Engine were read in its source.
    projections = ["qkv"]
    if shape.kv_lora_rank:
        projections = ["q_down_proj", "q_up_proj"] if shape.q_lora_rank else ["q_proj"]
        projections += ["kv_down_proj", "kv_up_proj"]
    modules = [
        *(f"self_attention.linear_{x}" for x in projections),
        *(["input_layernorm"] if shape.kv_lora_rank else []),
        "self_attention.linear_proj",
        "self_attention.core_attention",
        "pre_mlp_layernorm",
    ]
    modules += ["self_attention.q_layernorm", "self_attention.k_layernorm"] if shape.qk_norm else []
    linears = ("linear_fc1", "linear_fc2")
    layers = shape.num_layers
    keys = ["decoder.final_layernorm._extra_state/shard_0_1"]
    for layer in range(layers):
        experts = shape.num_experts if shape.has_mixture(layer) else 0
        own = [*modules, *([] if experts else [f"mlp.{x}" for x in linears])]
        own += [f"mlp.shared_experts.{x}" for x in linears] if experts and shape.shared_ffn_hidden_size else []
        own += ["self_attention.in_proj", "self_attention.out_proj"] if shape.has_delta_net(layer) else []
        if shape.layers_differ:  # each layer separately
            keys += [f"{LAYERS}{layer}.{x}._extra_state/shard_0_1" for x in own]
            prefixes = [f"{LAYERS}{layer}.mlp.experts.experts.{x}._extra_state/shard_" for x in linears]
            keys += [f"{prefix}{expert}_{experts}" for prefix in prefixes for expert in range(experts)]
            continue
        keys += [f"{LAYERS}{x}._extra_state/shard_{layer}_{layers}" for x in own]
        prefixes = [f"{LAYERS}mlp.experts.experts.{x}._extra_state/shard_{layer}" for x in linears]
        keys += [f"{prefix}.{expert}_{layers}.{experts}" for prefix in prefixes for expert in range(experts)]
    return keys


def find(stored: Stored, shape: ModelShape, keys: Collection[str], where: str) -> list[Place]:
    """Return where a checkpoint holds ``stored``: one Place (key and indices), or one each for gate and up.

    Gate and up lie apart, each under its own key, if the checkpoint was saved with Megatron-Core's
    ``singleton_local_shards``. Raises ConfigError, naming the tensor, if the checkpoint lacks it.

    keys: the keys of the checkpoint's tensors.
    where: the checkpoint's name for messages.
    """
    for form in stored.forms(shape):
        if form.key in keys:
            return [form]
        halves = [dataclasses.replace(form, key=f"{form.key}_{x}") for x in "wv"]
        if all(x.key in keys for x in halves):
            return halves
    missing = ", ".join(form.key for form in stored.forms(shape))
    raise ConfigError(
        f"{where} has none of {missing}, of which {', '.join(stored.entry.hf)} is made; the config is another model's"
    )


def check_sizes(stored: Stored, shape: ModelShape, reader: TorchDistReader) -> torch.dtype:
    """Check the size of ``stored`` in a checkpoint; return the dtype in which the checkpoint holds it.

    Raises ConfigError if the tensor is missing, or if its size is not the config's. An embedding
    may have any number of padding rows after the vocabulary's.
    """
    places = find(stored, shape, reader.tensors, str(reader.folder))
    wanted = whole_size(stored.entry, shape)
    if len(places) > 1:
        wanted = (wanted[0] // 2, *wanted[1:])
    for part in places:
        size, expected = reader.size(part.key), (*part.stack, *wanted)
        pads = stored.entry.layout is Layout.ROWS and size[0] >= shape.vocab_size and size[1:] == expected[1:]
        if size != expected and not pads:
            raise ConfigError(
                f"{part.key} in {reader.folder} has shape {size} and the config asks for {expected}; it is another "
                "model's"
            )
    return reader.dtype(places[0].key)


def read_stored(stored: Stored, shape: ModelShape, reader: TorchDistReader) -> list[tuple[str, torch.Tensor]]:
    """Read the tensor that ``stored`` describes; return it as its Hugging Face tensors: [(name, tensor)]."""
    parts = [reader.read(x.key, x.lead) for x in find(stored, shape, reader.tensors, str(reader.folder))]
    return merge_shards(stored.entry, shape, [parts[0] if len(parts) == 1 else torch.cat(parts)])


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronFolder:
    """Names one checkpoint of a Megatron-LM folder.

    folder: the Megatron-LM folder.
    name: the checkpoint's own folder in it, such as "release" or "iter_0000100".
    hf: the folder of the model's Hugging Face config and tokenizer; None if absent.
    """

    folder: pathlib.Path | RemotePath
    name: str
    hf: pathlib.Path | RemotePath | None

    @property
    def path(self) -> pathlib.Path | RemotePath:
        return self.folder / self.name


def iteration_name(iteration: int | None) -> str:
    """Return an iteration's folder name. Example: None → "release", 100 → "iter_0000100"."""
    return RELEASE if iteration is None else name_of(iteration)


def open_folder(folder: pathlib.Path | RemotePath, iteration: int | None = None) -> MegatronFolder:
    """Return the latest checkpoint of a Megatron-LM folder, or the checkpoint of ``iteration``.

    ``folder`` may also be a checkpoint's own folder. Raises ConfigError if there is no checkpoint,
    and DamagedCheckpoint if the file that names the latest cannot be read.
    """
    if (folder / "metadata.json").exists():
        folder, name = folder.parent, folder.name
    elif iteration is not None:
        name = iteration_name(iteration)
    elif (folder / LATEST).exists():
        content = read_bytes(folder / LATEST, "a number", most_bytes=64, error=DamagedCheckpoint)
        text = content.decode("ascii", "backslashreplace").strip()
        if text != RELEASE and not re.fullmatch("[0-9]{1,15}", text):
            raise ConfigError(
                f"{folder / LATEST} says {quoted(text)}, neither a number nor {RELEASE!r}; name an iteration with "
                "--iteration"
            )
        name = RELEASE if text == RELEASE else iteration_name(int(text))
    else:
        raise ConfigError(f"{folder} has no {LATEST} and no metadata.json: it is no Megatron-LM checkpoint")
    if not (folder / name).is_dir():
        present = (
            sorted(x.name for x in folder.iterdir() if x.name.startswith("iter_") or x.name == RELEASE)
            if folder.is_dir()
            else []
        )
        raise ConfigError(f"{folder} has no {name}; it holds {', '.join(present) or 'no checkpoint'}")
    hf = folder / HF_FOLDER
    return MegatronFolder(folder=folder, name=name, hf=hf if (hf / "config.json").exists() else None)
