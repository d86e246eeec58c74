"""The conversion between Hugging Face directories and Megatron-LM checkpoints, in both directions.

At most one layer's files are memory-mapped, and one tensor is held at a time. Both directions take
the tensors in the order of a Hugging Face checkpoint. The written folder appears complete or
not at all: it is filled under another name in the same parent folder and renamed at the end.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron_rl.checkpoint.folder import LATEST
from megatron_rl.checkpoint.megatron_lm import (
    HF_FOLDER,
    MegatronFolder,
    Stored,
    check_sizes,
    extra_state_keys,
    find,
    iteration_name,
    read_stored,
    stored_layers,
    whole_size,
)
from megatron_rl.checkpoint.torch_dist import TorchDistReader, TorchDistWriter
from megatron_rl.distributed.atomic_file import replacing_folder
from megatron_rl.errors import ConfigError
from megatron_rl.json_text import read_object
from megatron_rl.weights.entry import Layout
from megatron_rl.weights.mapping import ADAPTER, EMBEDDING, hf_size, load_shard
from megatron_rl.weights.model_shape import ModelShape
from megatron_rl.weights.reader import HuggingFaceReader, check_finite, check_tensors, heads_differ, whole_tensors
from megatron_rl.weights.shards import Planned, ShardWriter
from megatron_rl.weights.side_files import copy_side_files, drop_fields
from megatron_rl.weights.stacked import joined_plan
from megatron_rl.weights.text_part import write_text_config

if TYPE_CHECKING:
    from megatron_rl.storage.remote import RemotePath

# keys of a GPTModel; other keys are an optimizer's, or another model's
MODEL_KEYS = ("embedding.", "decoder.", "output_layer.", "mtp.")

CONFIG = "config.json"
WIDER = "choose a wider one with --dtype"

Progress = Callable[[int], None]
"""A function that is called after each tensor with the number of bytes written for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Holds the degrees of parallelism by which an imported checkpoint is divided into chunks and files.

    The files are those that ranks with these degrees would save; a run with other degrees can load
    them too. Each tensor-parallel rank's shard is written as chunks of its own, so that a rank with
    the same degrees reads only those. There are tensor · expert · pipeline files.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    def check(self, shape: ModelShape) -> None:
        """Raise ConfigError if the model cannot be divided by these degrees.

        ``tensor`` must divide the numbers of heads and the MLP's sizes, ``expert`` the number of
        experts. ``pipeline`` may be at most the number of layers.
        """
        heads = {
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "intermediate size": shape.ffn_hidden_size,
            "dense intermediate size": shape.dense_ffn_hidden_size or self.tensor,
            "shared experts' size": shape.shared_ffn_hidden_size or self.tensor,
        }
        split = [("--tp", self.tensor, name, count) for name, count in heads.items()]
        if self.expert > 1:
            split.append(("--ep", self.expert, "num_experts", shape.num_experts))
        for option, degree, name, count in split:
            if degree < 1 or count % degree or not count:
                raise ConfigError(
                    f"{option} {degree} does not divide {name}={count}; use a divisor (any topology loads any cut)"
                )
        if not 1 <= self.pipeline <= shape.num_layers:
            raise ConfigError(f"--pp {self.pipeline} must be 1 to num_hidden_layers={shape.num_layers}")

    def file_rank(self, stored: Stored, shape: ModelShape, tensor_rank: int) -> int:
        """Return the number of the file that holds one tensor-parallel rank's shard of ``stored``.

        Files are numbered by pipeline stage, then by expert rank, then by tensor rank.
        """
        last = self.pipeline - 1 if stored.entry is not EMBEDDING else 0
        stage = last if stored.layer is None else stored.layer * self.pipeline // shape.num_layers
        expert_rank = 0 if stored.expert is None else stored.expert * self.expert // shape.num_experts
        return (stage * self.expert + expert_rank) * self.tensor + tensor_rank


@contextlib.contextmanager
def appearing(path: pathlib.Path | RemotePath, *, overwrite: bool) -> Iterator[pathlib.Path | RemotePath]:
    """Yield a new folder that replaces ``path`` when the ``with`` block ends; remove the folder if the block raises.

    In an object store the new folder is ``path`` itself, and counts as complete once it has a
    config.json. Raises ConfigError if ``path`` exists and ``overwrite`` is False.
    """
    if path.exists() and not overwrite:
        raise ConfigError(f"{path} exists; name another folder, or pass --overwrite")
    if isinstance(path, pathlib.Path):
        opened = replacing_folder(path)
    else:
        from megatron_rl.weights.store_folder import filled

        opened = filled(path, CONFIG)
    with opened as partial:
        yield partial


@contextlib.contextmanager
def side_folder(partial: pathlib.Path | RemotePath) -> Iterator[pathlib.Path]:
    """Yield a folder on disk for the files beside the weights: ``partial`` if it is on a disk, else a temporary folder.

    The files of the temporary folder are uploaded to ``partial`` when the ``with`` block ends.
    """
    if isinstance(partial, pathlib.Path):
        yield partial
        return
    from megatron_rl.weights.store_folder import upload

    with tempfile.TemporaryDirectory() as local:
        yield pathlib.Path(local)
        upload(pathlib.Path(local), partial, CONFIG)


def check_source(reader: HuggingFaceReader, shape: ModelShape) -> None:
    """Raise ConfigError unless a Hugging Face folder holds the tensors that its config.json describes.

    The same error is raised for a tied model whose files hold an output matrix that differs from
    the embedding.
    """
    check_tensors(reader, shape)
    if shape.tied_embeddings and heads_differ(reader):
        raise ConfigError(
            f"tie_word_embeddings=true in {reader.path}, but its lm_head.weight is not its model.embed_tokens.weight; "
            "set tie_word_embeddings to false in config.json, or remove lm_head.weight"
        )
    reader.close()


def import_size(shape: ModelShape, reader: HuggingFaceReader, dtype: torch.dtype | None) -> int:
    """Return how many bytes ``import_weights`` will report to its ``progress`` in all."""
    tensors = [(x.entry, x.dtype(dtype)) for layer in stored_layers(shape) for x in layer]
    return sum(math.prod(whole_size(x, shape)) * (kind or reader.dtype(x.hf[0])).itemsize for x, kind in tensors)


def import_weights(
    reader: HuggingFaceReader,
    shape: ModelShape,
    folder: pathlib.Path,
    *,
    cut: Cut,
    dtype: torch.dtype | None,
    iteration: int | None,
    progress: Progress,
) -> int:
    """Fill ``folder`` with a torch_dist checkpoint of the model's weights; return the number of bytes written.

    Raises ConfigError if a tensor is missing, has a shape other than the config's, or holds numbers
    that are not finite. The same error is raised for a tensor that weights/mapping.py does not name.

    reader: the reader of the Hugging Face files.
    shape: the model's shape, whose ``padded_vocab_size`` must be a multiple of ``cut.tensor``.
    cut: how the checkpoint is divided into chunks and files.
    dtype: the dtype of the written parameters; None keeps the dtypes of the files.
    iteration: the iteration that the checkpoint states; None states 0.
    progress: a function that is called after each tensor with the number of its bytes.
    """
    cut.check(shape)
    check_source(reader, shape)
    writer = TorchDistWriter(folder)
    try:
        for layer in stored_layers(shape):
            for stored in layer:
                progress(_import_one(stored, reader, shape, writer, cut, dtype))
            reader.close()
        writer.add_objects(extra_state_keys(shape), [None])
        writer.finish({"iteration": iteration or 0, "checkpoint_version": 3.0})
    finally:
        writer.abandon()
    return writer.bytes_written


def _import_one(
    stored: Stored,
    reader: HuggingFaceReader,
    shape: ModelShape,
    writer: TorchDistWriter,
    cut: Cut,
    dtype: torch.dtype | None,
) -> int:
    """Write the tensor that ``stored`` describes, one shard for each tensor-parallel rank; return the shards' bytes."""
    entry, dtype = stored.entry, stored.dtype(dtype)
    dtypes = {reader.dtype(name) for name in entry.hf}
    if len(dtypes) > 1 and dtype is None:
        raise ConfigError(
            f"{', '.join(entry.hf)} in {reader.path} are of {len(dtypes)} dtypes and become one tensor; choose one "
            "with --dtype"
        )
    # the stacked tensor's whole size
    size = (*stored.stack(shape), *whole_size(entry, shape))
    split = entry.layout is not Layout.REPLICATED
    total = 0
    for rank in range(cut.tensor if split else 1):
        shard = load_shard(entry, shape, reader.read, rank, cut.tensor if split else 1)
        shard = shard if dtype is None else shard.to(dtype)
        check_finite(shard, functools.partial(whole_tensors, entry, shape, reader), WIDER)
        # Two chunks for a rank's gate and up, as in Megatron-Core (0.16.1 transformer/mlp.py
        # apply_swiglu_sharded_factory).
        parts = 2 if entry.joined or entry.layout is Layout.INTERLEAVED else len(entry.hf)
        halves = shard.chunk(parts) if entry.layout in (Layout.GATE_UP, Layout.INTERLEAVED) else (shard,)
        for half, part in enumerate(halves):
            offsets = [0] * part.dim()
            if entry.layout in (Layout.COLUMNS, Layout.TRANSPOSED):
                offsets[1] = rank * part.shape[1]
            elif split:
                offsets[0] = (half * cut.tensor + rank) * part.shape[0]
            part = part.view(*[1] * len(stored.lead), *part.shape)
            writer.add_chunk(cut.file_rank(stored, shape, rank), stored.keys(), size, (*stored.lead, *offsets), part)
        total += shard.nbytes
    return total


def import_folder(
    source: pathlib.Path,
    shape: ModelShape,
    target: pathlib.Path,
    *,
    cut: Cut,
    dtype: torch.dtype | None = None,
    iteration: int | None = None,
    overwrite: bool = False,
    progress: Progress = lambda _: None,
) -> pathlib.Path:
    """Convert a Hugging Face directory into a checkpoint in a Megatron-LM folder; return the checkpoint's own folder.

    Other iterations in ``target`` stay. ``target/hf`` is replaced by this model's config and
    tokenizer, and ``latest_checkpointed_iteration.txt`` names the new checkpoint.

    iteration: the new checkpoint's number; None names its folder ``release``.
    overwrite: whether an existing checkpoint of this name is replaced.
    cut, dtype, progress: as for ``import_weights``.
    """
    reader = HuggingFaceReader(source)
    path = target / iteration_name(iteration)
    with appearing(path, overwrite=overwrite) as partial:
        import_weights(reader, shape, partial, cut=cut, dtype=dtype, iteration=iteration, progress=progress)
        with appearing(target / HF_FOLDER, overwrite=True) as side:
            copy_side_files(source, side)
            write_text_config(side / CONFIG)
            drop_fields(side / "config.json", ("quantization_config",))  # the written weights are full ones
    (target / LATEST).write_text("release" if iteration is None else str(iteration))
    return path


def plan_export(reader: TorchDistReader, shape: ModelShape, dtype: torch.dtype | None) -> list[Planned]:
    """Return a Planned (name, shape and dtype) of each Hugging Face tensor to write, in order.

    dtype: the dtype of the written parameters; None keeps the checkpoint's dtypes.

    Raises ConfigError if the checkpoint lacks a tensor, has it in another size, or holds a tensor
    that a model of this config does not have.
    """
    adapters = sorted(key for key in reader.tensors if key.startswith(MODEL_KEYS) and f"{ADAPTER}." in key)
    if adapters:
        raise ConfigError(
            f"{reader.folder} holds adapters (lora.rank), {adapters[0]} the first, and not the weights that they "
            "belong to; the run merges the two itself, in checkpoints/step_<n>/hf (train.export_last, "
            "train.export_every_rollouts)"
        )
    planned, known = [], set()
    for layer in stored_layers(shape):
        for stored in layer:
            own = check_sizes(stored, shape, reader)
            kind = stored.dtype(dtype) or own
            planned += [Planned(name=name, shape=hf_size(shape, name), dtype=kind) for name in stored.entry.hf]
            known |= {place.key for place in stored.forms(shape)} | {
                x.key for x in find(stored, shape, reader.tensors, str(reader.folder))
            }
    unknown = sorted(key for key in reader.tensors if key.startswith(MODEL_KEYS) and key not in known)
    if unknown:
        raise ConfigError(
            f"{reader.folder} holds {len(unknown)} tensors of which the config's model has no part, "
            f"{unknown[0]} the first; it is another model's config (tie_word_embeddings, attention_bias?), or the "
            "model has parts that no table names"
        )
    return joined_plan(planned, shape.family)


def export_folder(
    source: MegatronFolder,
    shape: ModelShape,
    hf: pathlib.Path,
    target: pathlib.Path | RemotePath,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
    progress: Progress = lambda _: None,
) -> list[str]:
    """Convert a Megatron-LM checkpoint into a Hugging Face directory; return the names of its files.

    Only the weights are converted. Raises ConfigError, and leaves no folder, if a tensor holds
    numbers that are not finite.

    hf: a directory, whose config and tokenizer are copied.
    dtype: the dtype of the written parameters; None keeps the checkpoint's dtypes.
    shard_bytes: the most bytes of a file of weights; a larger tensor has a file of its own.
    overwrite: whether an existing ``target`` is replaced.
    progress: a function that is called after each tensor with the number of its bytes.
    """
    reader = TorchDistReader(source.path)
    planned = plan_export(reader, shape, dtype)
    with appearing(target, overwrite=overwrite) as partial:
        writer = ShardWriter(partial, planned, shard_bytes)
        try:
            for layer in stored_layers(shape):
                for stored in layer:
                    for name, tensor in read_stored(stored, shape, reader):
                        stored_as = (f"{name} of {source.path}", tensor)
                        kind = stored.dtype(dtype)
                        tensor = tensor if kind is None else tensor.to(kind)
                        check_finite(tensor, functools.partial(iter, [stored_as]), WIDER)
                        writer.add(name, tensor)
                        progress(tensor.nbytes)
            names = writer.finish()
        finally:
            writer.abandon()
            reader.close()
        frozen = {name for layer in stored_layers(shape) for x in layer if x.entry.frozen for name in x.entry.hf}
        with side_folder(partial) as side:
            names += copy_side_files(hf, side)
            write_text_config(side / CONFIG)
            drop_fields(side / CONFIG, ("quantization_config",))
            _say_dtype(side / CONFIG, {each.dtype for each in planned if each.name not in frozen})
    return names


def _say_dtype(config: pathlib.Path, kinds: set[torch.dtype]) -> None:
    """Write the weights' dtype into config.json: as ``dtype``, or ``torch_dtype`` before transformers 5.

    kinds: the dtypes of the written weights. If there are several, nothing is changed.
    """
    fields = read_object(config)
    for key in ("dtype", "torch_dtype"):
        if key in fields and len(kinds) == 1 and fields[key] != (name := str(next(iter(kinds))).removeprefix("torch.")):
            fields[key] = name
            config.write_text(json.dumps(fields, indent=2) + "\n")
