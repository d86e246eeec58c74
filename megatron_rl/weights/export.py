"""Weights in from Hugging Face files, each rank its own shard; and out under Hugging Face names, from any TP, PP and EP."""

from __future__ import annotations

import json
import math
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_rl import platform  # noqa: F401  (before megatron.core)
from megatron_rl.topology import Topology
from megatron_rl.types import ConfigError
from megatron_rl.weights.mapping import TIED_HEAD, Entry, Shape, hf_size, load_shard, merge_shards, shard_size, stage_buckets
from megatron_rl.weights.shards import DTYPE_NAMES, INDEX

DTYPE_OF_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class WeightReader(Protocol):
    def size(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, dimension: int, start: int, stop: int) -> torch.Tensor: ...


class MemoryReader:
    """The same slices, of tensors already in memory (random weights, tests)."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self.tensors = tensors

    def size(self, name: str) -> tuple[int, ...]:
        if name not in self.tensors:
            raise ConfigError(
                f"the weights given hold no tensor named {name}; names are those of checkpoint files, and a mixture's state_dict becomes "
                "them by megatron_rl.weights.fused.file_tensors"
            )
        return tuple(self.tensors[name].shape)

    def read(self, name: str, dimension: int, start: int, stop: int) -> torch.Tensor:
        return self.tensors[name].narrow(dimension, start, stop - start)


class HuggingFaceReader:
    """Slices of the safetensors files of a Hugging Face directory, sharded or not; never a whole file."""

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path)
        index = self.path / INDEX
        single = self.path / "model.safetensors"
        if index.exists():
            self.files = {k: self.path / v for k, v in json.loads(index.read_text())["weight_map"].items()}
        elif single.exists():
            with safe_open(single, framework="pt") as file:
                self.files = dict.fromkeys(file.keys(), single)
        else:
            raise ConfigError(
                f"model.hf_path={self.path} holds neither model.safetensors nor {INDEX}; "
                "save it with save_pretrained, or start from random weights with model.init=random"
            )
        self.open_files: dict[pathlib.Path, object] = {}

    def _slice(self, name: str):
        if name not in self.files:
            raise ConfigError(f"{self.path} holds no tensor named {name}; its config and its weights do not belong together")
        file = self.files[name]
        if file not in self.open_files:
            self.open_files[file] = safe_open(file, framework="pt")
        return self.open_files[file].get_slice(name)

    def size(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        kind = self._slice(name).get_dtype()
        if kind not in DTYPE_OF_NAME:
            raise ConfigError(f"{name} in {self.path} is {kind}; only {', '.join(DTYPE_OF_NAME)} are read: it may be quantised")
        return DTYPE_OF_NAME[kind]

    def close(self) -> None:
        """Unmaps the files, so that what was read of them is no longer resident; the next read maps them again."""
        self.open_files.clear()

    def read(self, name: str, dimension: int, start: int, stop: int) -> torch.Tensor:
        tensor = self._slice(name)
        return tensor[start:stop] if dimension == 0 else tensor[:, start:stop]


@torch.no_grad()
def load_weights(chunks: Sequence[torch.nn.Module], shape: Shape, topology: Topology, reader: WeightReader) -> None:
    """Fills this rank's chunks. Raises where a tensor is missing, has another shape, or a parameter is left over."""
    for number, chunk in enumerate(chunks):
        _load_chunk(chunk, number * topology.pipeline_size + topology.pipeline_rank, shape, topology, reader)


def _load_chunk(chunk: torch.nn.Module, stage: int, shape: Shape, topology: Topology, reader: WeightReader) -> None:
    parameters = dict(chunk.named_parameters())
    for bucket in stage_buckets(shape, stage, topology.pipeline_size * topology.virtual_size, topology.expert_size):
        for entry in (entry.held_by(topology.expert_rank, shape, topology.expert_size) for entry in bucket):
            for name in entry.hf:
                if reader.size(name) != hf_size(shape, name):
                    raise ConfigError(f"{name} has shape {reader.size(name)} and the config asks for {hf_size(shape, name)}")
            if entry.megatron not in parameters:
                raise RuntimeError(f"the model has no parameter {entry.megatron} for {entry.hf}; its layer spec is {shape.layer_spec}")
            rank, ranks = topology.tensor_rank, topology.tensor_size
            if entry.expert is not None:
                rank, ranks = topology.expert_tensor_rank, topology.expert_tensor_size
            shard = load_shard(entry, shape, reader.read, rank, ranks)
            parameters.pop(entry.megatron).copy_(shard)
    if parameters:
        raise RuntimeError(f"parameters that no Hugging Face tensor fills: {sorted(parameters)}; weights/mapping.py lacks them")


@torch.no_grad()
def export_weights(chunks: Sequence[Mapping[str, torch.Tensor]], shape: Shape, topology: Topology) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor under its Hugging Face name, whole, on every rank, one bucket's memory at a time (a layer, or an expert per rank).

    A collective over the model-parallel group: each stage in turn gathers a bucket over the ranks that hold its shards and hands it
    to all. chunks: this rank's parameters by Megatron name, chunk by chunk, or tensors of the same shapes (gradients).
    The iterator must be run to its end on all ranks. Parameters must be gathered before (backend.export does).
    """
    example = next(iter(chunks[0].values()))
    stages = topology.pipeline_size * topology.virtual_size
    for stage in range(stages):
        chunk, owner = divmod(stage, topology.pipeline_size)
        for bucket in stage_buckets(shape, stage, stages, topology.expert_size):
            if bucket == (TIED_HEAD,):
                continue
            of_expert = bucket[0].expert is not None
            ranks = topology.expert_tensor_size if of_expert else topology.tensor_size
            holders = ranks * topology.expert_size if of_expert else ranks
            sizes = [shard_size(entry, shape, ranks) for entry in bucket]
            flat = torch.empty(holders, sum(math.prod(x) for x in sizes), dtype=example.dtype, device=example.device)
            if owner == topology.pipeline_rank:
                local = torch.cat([chunks[chunk][entry.megatron].detach().reshape(-1) for entry in bucket])
                group = topology.expert_group if of_expert else topology.tensor_group
                if holders > 1:
                    dist.all_gather_into_tensor(flat.view(-1), local, group=group)
                else:
                    flat[0] = local
            if topology.pipeline_size > 1:
                dist.broadcast(flat, dist.get_global_rank(topology.pipeline_group, owner), group=topology.pipeline_group)
            # the expert group counts an expert's tensor ranks first: rows e·ranks to (e + 1)·ranks are expert-parallel rank e's
            for expert_rank, shards in enumerate(flat.split(ranks)):
                entries = [entry.held_by(expert_rank, shape, topology.expert_size) for entry in bucket]
                yield from _merge_bucket(entries, sizes, shards, shape)


def _merge_bucket(
    entries: Sequence[Entry], sizes: Sequence[tuple[int, ...]], shards: torch.Tensor, shape: Shape
) -> Iterator[tuple[str, torch.Tensor]]:
    """shards [ranks, elements of the bucket] → its Hugging Face tensors."""
    offset = 0
    for entry, size in zip(entries, sizes, strict=True):
        count = math.prod(size)
        yield from merge_shards(entry, shape, [x[offset : offset + count].view(size) for x in shards])
        offset += count


def save_hugging_face(tensors: Iterator[tuple[str, torch.Tensor]], hf_config, tokenizer, path: pathlib.Path) -> None:
    """Writes a Hugging Face directory (config, tokenizer, model.safetensors) that appears whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors}, partial / "model.safetensors", metadata={"format": "pt"})
    hf_config.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(path, ignore_errors=True)
    os.replace(partial, path)
