"""The writing of a model's Hugging Face folder by all ranks at once: each rank writes files, the main rank the index.

weights/file_plan.py decides which rank writes which tensors. A rank collects one parameter at a
time, from its tensor ranks or from the ranks that share an expert. It writes the parameter before
it asks for the next.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import pathlib
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from megatron_rl.distributed.atomic_file import replacing_folder
from megatron_rl.distributed.collectives import gather_json, raise_on_all_ranks
from megatron_rl.distributed.topology import Topology
from megatron_rl.errors import ConfigError
from megatron_rl.weights.export import export_weights
from megatron_rl.weights.families.register import stacking
from megatron_rl.weights.file_plan import FilePlan, FileSizes, Piece, plan_files
from megatron_rl.weights.mapping import hf_parts, hf_size, is_copied, laid_out
from megatron_rl.weights.model_shape import ModelShape
from megatron_rl.weights.shards import INDEX, SINGLE, FileWriter, index_text

if TYPE_CHECKING:
    from megatron_rl.storage.remote import RemotePath

log = logging.getLogger(__name__)

CONFIG = "config.json"
SEEN_S = 10.0  # time for a network file system to show a new file to every host
TOKEN = ".written-by-all"
Chunks = Sequence[Mapping[str, torch.Tensor]]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Holds the parameters to write, with the model's shape and the run's topology.

    chunks: for each model chunk of this rank, {Megatron name: this rank's shard}. Shards must be
        gathered over data-parallel replicas before. A mapping may compute a tensor when it is asked
        for (a weight with its LoRA adapter merged in, say).
    """

    chunks: Chunks
    shape: ModelShape
    topology: Topology

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.chunks[0].values())).dtype


def save_hugging_face(
    parameters: Parameters,
    hf_config,
    tokenizer,
    path: pathlib.Path | RemotePath,
    *,
    source: str = "",
    tokenizer_source: str | None = None,
    limits: FileSizes | None = None,
) -> None:
    """Write a Hugging Face folder that appears whole or not at all. A collective over the world.

    Every rank writes the files that it owns into the folder. If some rank does not see the folder,
    the main rank alone writes all files. An error on one rank (a full disk) is raised on every
    rank.

    hf_config: transformers' config, saved as config.json.
    tokenizer: transformers' tokenizer, saved if no tokenizer files are copied.
    path: the folder. On a disk it is written under another name, and renamed when it is complete. In
        an object store it is whole if config.json is there (weights/store_folder.py).
    source: the directory that the model came from, whose generation_config.json, tokenizer and
        other side files are copied byte for byte; "" for none.
    tokenizer_source: the directory of another tokenizer; None for the tokenizer of ``source``.
    limits: the bounds for the files' sizes; None for the default ones.
    """
    is_main = parameters.topology.is_main
    plan = plan_files(parameters.shape, parameters.topology, parameters.dtype, limits or FileSizes())
    token = gather_json(uuid.uuid4().hex if is_main else "")[0]
    folder = path.with_name(f"{path.name}.partial") if isinstance(path, pathlib.Path) else path
    side = functools.partial(_write_side_files, hf_config, tokenizer, source, tokenizer_source)
    with contextlib.ExitStack() as opened:
        on_all_ranks(lambda: _begin(opened, path, token) if is_main else None)
        written_by_all = _seen_by_all(folder, token, is_main=is_main)
        if written_by_all:
            _write_own(parameters, plan, folder)
        else:
            _write_alone(parameters, hf_config, folder)

        def finish() -> None:
            (folder / TOKEN).unlink()
            if written_by_all and len(plan.files) > 1:
                (folder / INDEX).write_text(index_text([(file.name, file.tensors) for file in plan.files]))
            _finish(folder, side)
            opened.close()  # the folder gets its final name

        on_all_ranks(finish if is_main else None)


def on_all_ranks(action: Callable[[], Result] | None) -> Result | None:
    """Call ``action`` on this rank, return its result, and raise one rank's error on every rank. A collective.

    action: a callable without arguments. None: this rank has nothing to do, and None is returned.
    """
    result, error = None, None
    try:
        result = action() if action is not None else None
    except Exception as failed:  # noqa: BLE001 (raised below, on every rank)
        error = failed
    raise_on_all_ranks(error)
    return result


def _begin(opened: contextlib.ExitStack, path: pathlib.Path | RemotePath, token: str) -> None:
    if isinstance(path, pathlib.Path):
        folder = opened.enter_context(replacing_folder(path))
    else:
        from megatron_rl.weights.store_folder import filled

        folder = opened.enter_context(filled(path, CONFIG))
    (folder / TOKEN).write_text(token)


def _finish(folder: pathlib.Path | RemotePath, write_side: Callable[[pathlib.Path], None]) -> None:
    """Write config, tokenizer and other side files into the folder; in an object store config.json comes last.

    write_side: called with a folder on a disk; writes the side files into it.
    """
    if isinstance(folder, pathlib.Path):
        write_side(folder)
        return
    from megatron_rl.weights.store_folder import upload

    with tempfile.TemporaryDirectory() as local:
        write_side(pathlib.Path(local))
        upload(pathlib.Path(local), folder, CONFIG)


def _seen_by_all(folder: pathlib.Path | RemotePath, token: str, *, is_main: bool) -> bool:
    """Return whether every rank sees, within SEEN_S seconds, a file that the main rank wrote to ``folder``.

    A collective. A warning names a rank that does not see the file. Raises ConfigError on every
    rank if the folder is in an object store that not all ranks share (memory://).

    token: the content of the file, which is named ``TOKEN``.
    """
    file = folder / TOKEN
    until = time.monotonic() + SEEN_S
    while not (seen := _reads(file, token)) and time.monotonic() < until:
        time.sleep(0.1)
    blind = [rank for rank, sees in enumerate(gather_json(seen)) if not sees]
    if blind and not isinstance(folder, pathlib.Path):
        raise ConfigError(
            f"{folder} is not one store for all ranks: rank {blind[0]} does not see what rank 0 wrote there; name one "
            "that all hosts reach (memory:// is a process's own)"
        )
    if blind and is_main:
        log.warning(
            "%s is not seen by %d of %d ranks, rank %d the first: the main rank gathers the model in its host's "
            "memory and writes it alone; put run.dir on a file system that all hosts share",
            *(folder, len(blind), dist.get_world_size(), blind[0]),
        )
    return not blind


def _reads(file: pathlib.Path | RemotePath, token: str) -> bool:
    try:
        return file.is_file() and file.read_text() == token
    except OSError:  # a disk or store that this rank cannot read: the others must not wait for it
        return False


def _write_own(parameters: Parameters, plan: FilePlan, folder: pathlib.Path | RemotePath) -> None:
    """Write the files that this rank owns. A collective over the world.

    After an error a rank goes on exchanging shards, which the other ranks need. The error is raised
    on every rank at the end.
    """
    writer, error = FileWriter(folder, plan.of(parameters.topology.rank)), None
    for name, tensor in own_tensors(parameters, plan):
        if error is None:
            error = _error_of(lambda: writer.add(name, tensor.cpu()))  # noqa: B023 (called at once)
    error = error or _error_of(writer.finish)
    if error is not None:
        _error_of(writer.abandon)  # the first error is raised, not this one
    raise_on_all_ranks(error)


def _error_of(action: Callable[[], None]) -> Exception | None:
    try:
        action()
    except Exception as error:  # noqa: BLE001 (raised on every rank at the end)
        return error
    return None


@torch.no_grad()
def own_tensors(parameters: Parameters, plan: FilePlan) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, whole tensor) for each tensor that this rank writes, in the order of its files.

    A collective over the tensor group and the experts' group: all ranks run it to its end. In each
    round every rank of a group collects one parameter, and sends its own shards of the parameters
    that the other ranks collect.

    A tensor is valid until the next is asked for. Memory is allocated once: for the shards of the
    largest parameter that this rank collects, and for the largest tensor that it must put in order.
    """
    topology = parameters.topology
    own = plan.pieces.get(topology.rank, ())
    device = next(iter(parameters.chunks[0].values())).device
    gathered_bytes = max((_gathered_bytes(piece, topology) for piece in own), default=0)
    spare_bytes = max((_spare_bytes(piece, parameters.shape) for piece in own), default=0)
    memory = torch.empty(gathered_bytes + spare_bytes, dtype=torch.uint8, device=device)
    gathered, spare = memory[:gathered_bytes], memory[gathered_bytes:]
    for group, of_experts in ((topology.tensor_group, False), (topology.expert_group, True)):
        members = dist.get_process_group_ranks(group)
        collected = {rank: plan.collected(rank, of_experts=of_experts) for rank in members}
        rounds = max(map(len, collected.values()))
        if len(members) > 1 and rounds:  # NCCL makes a group's communicator in its first call, which needs all ranks
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        for number in range(rounds):
            wanted = {rank: pieces[number] for rank, pieces in collected.items() if number < len(pieces)}
            shards = _exchange(parameters, wanted, gathered, group)
            if (piece := wanted.get(topology.rank)) is not None:
                entry = piece.entry.held_by(piece.expert_rank or 0, parameters.shape, topology.expert_size)
                for name, parts in hf_parts(entry, parameters.shape, shards):
                    yield name, laid_out(parts, hf_size(parameters.shape, name), spare.view(piece.dtype))


def _gathered_bytes(piece: Piece, topology: Topology) -> int:
    """Return the bytes, rounded up to a multiple of 8, that this rank needs to collect all shards of ``piece``.

    0 if this rank holds the only shard itself.

    piece: one Megatron parameter.
    """
    if list(piece.sources(topology.rank, topology)) == [topology.rank]:
        return 0
    return _eights(piece.num_shards * math.prod(piece.size) * piece.dtype.itemsize)


def _spare_bytes(piece: Piece, shape: ModelShape) -> int:
    """Return the bytes of the buffer in which this rank puts a Hugging Face tensor of ``piece`` in order.

    They are rounded up to a multiple of 8; 0 if the tensor's elements are in order in the shards.

    piece: one Megatron parameter.
    """
    if not is_copied(piece.entry.layout, piece.num_shards):
        return 0
    return _eights(max(math.prod(hf_size(shape, name)) for name in piece.entry.hf) * piece.dtype.itemsize)


def _eights(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


def _exchange(
    parameters: Parameters, wanted: Mapping[int, Piece], memory: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Send this rank's shards of other ranks' pieces, and return the shards [num_shards, *shard] of its own piece.

    A piece is one Megatron parameter, whose shards one rank collects. All ranks of ``group`` call
    this with equal ``wanted``. The result is empty if this rank is not in ``wanted``.

    wanted: {collecting rank: the piece that it collects in this call}.
    memory: uint8, the buffer for the shards that come from other ranks.
    """
    topology, sent, transfers = parameters.topology, [], []
    shards = torch.empty(0)
    for rank, piece in wanted.items():
        sources = piece.sources(rank, topology)
        own = _shard(parameters, piece) if topology.rank in sources else None
        if rank != topology.rank:
            if own is not None:
                sent.append(own.contiguous())
                transfers.append(dist.P2POp(dist.isend, sent[-1], peer=rank, group=group))
            continue
        if list(sources) == [rank]:
            shards = own[None]
            continue
        num_bytes = piece.num_shards * math.prod(piece.size) * piece.dtype.itemsize
        shards = memory[:num_bytes].view(piece.dtype).view(piece.num_shards, *piece.size)
        for source, shard in zip(sources, shards, strict=True):
            if source == rank:
                shard.copy_(own)
            else:
                transfers.append(dist.P2POp(dist.irecv, shard, peer=source, group=group))
    for work in dist.batch_isend_irecv(transfers) if transfers else ():
        work.wait()
    return shards


def _shard(parameters: Parameters, piece: Piece) -> torch.Tensor:
    shard = parameters.chunks[piece.chunk][piece.entry.megatron].detach()
    assert (shard.dtype, tuple(shard.shape)) == (piece.dtype, piece.size), (
        f"{piece.entry.megatron} is {shard.dtype} {tuple(shard.shape)}, and its owner awaits {piece.dtype} {piece.size}"
    )
    return shard


def _write_alone(parameters: Parameters, hf_config: Any, folder: pathlib.Path) -> None:
    """Write the model as one file, by the main rank, from copies of all tensors in host memory. A collective."""
    from safetensors.torch import save_file

    tensors = export_weights(parameters.chunks, parameters.shape, parameters.topology)
    copies: dict[str, torch.Tensor] = {}
    if not parameters.topology.is_main:
        for _ in tensors:
            pass
    elif stacking(hf_config.model_type) is None:
        copies = {name: tensor.to("cpu", copy=True) for name, tensor in tensors}
    else:
        from megatron_rl.weights.stacked import copies as stacked_copies

        copies = stacked_copies(tensors, hf_config.model_type, parameters.shape.num_experts)
    write = None
    if parameters.topology.is_main:
        write = lambda: save_file(copies, folder / SINGLE, metadata={"format": "pt"})  # noqa: E731
    on_all_ranks(write)


def _write_side_files(
    hf_config: Any, tokenizer: Any, source: str, tokenizer_source: str | None, folder: pathlib.Path
) -> None:
    from megatron_rl.weights.side_files import copy_side_files, is_tokenizers

    other = pathlib.Path(tokenizer_source) if tokenizer_source else None
    names = copy_side_files(pathlib.Path(source), folder, tokenizer=other) if source else []
    if not any(is_tokenizers(folder / name) for name in names):
        tokenizer.save_pretrained(folder)
    hf_config.save_pretrained(folder)
