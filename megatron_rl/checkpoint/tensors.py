"""The saving and loading of weights and AdamW's states as sharded tensors of ``megatron.core.dist_checkpointing``.

Weights lie under the keys of ``GPTModel.sharded_state_dict``. AdamW's states lie under
``optimizer.state.{exp_avg,exp_avg_sq,fp32_param}.<key>``, as Megatron-Core names them. A matrix that
Muon steps has the one state ``momentum_buffer`` in place of AdamW's moments. Each state has its
parameter's global shape. So TP, PP, VPP, EP, DP and ``optimizer.distributed`` may change between a
save and a load.

The ``sharded_state_dict`` of Megatron-Core's optimizers is not used (tried with 0.16.1). For the
distributed optimizer it gathers every state on every rank, and loading fails under torch's AdamW
(KeyError 'step'). The nesting of its keys changes with EP.

The norm before a mixture of experts has two names: torch's layers and Transformer Engine's each
write their own (``MIXTURE_NORM``). A load takes the name that the checkpoint has.

Under a distributed optimizer each data-parallel rank writes about 1/DP of the parameters' states.
The states are gathered one parameter at a time. Loading reads at most LOAD_BYTES of tensors at a
time; a single process reads at least all tensors of one key (``_pieces``).
"""

from __future__ import annotations

import contextlib
import io
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.checkpoint.folder import DamagedCheckpoint
from megatron_rl.checkpoint.pickled import guarded
from megatron_rl.distributed.collectives import reduce_on_host
from megatron_rl.distributed.platform import HOST, on_host
from megatron_rl.errors import CheckpointError, StoreError, shortened

from megatron.core import dist_checkpointing  # isort: skip
from megatron.core.dist_checkpointing.core import CheckpointingException  # isort: skip
from megatron.core.dist_checkpointing.dict_utils import nested_values  # isort: skip
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory  # isort: skip
from megatron.core.distributed import DistributedDataParallel  # isort: skip
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # isort: skip
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params  # isort: skip

if TYPE_CHECKING:
    from megatron_rl.storage.remote import RemotePath

LOAD_BYTES = 1 << 30
MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "fp32_param"
# Megatron-Core 0.16.1 and 0.19.2 (gpt_layer_specs.py) write the norm before a mixture of experts under the first name
# from Transformer Engine's layers. Torch's write it under the second, as if it were part of a dense MLP.
MIXTURE_NORM = ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
# Raised by Megatron-Core and torch if .metadata, the same for every rank, is not as they expect.
OF_A_FALSE_INDEX = (AttributeError, IndexError, KeyError, TypeError, ValueError)


def weight_entries(chunks: Sequence[DistributedDataParallel]) -> list[ShardedBase]:
    """Return a list of Megatron-Core's sharded tensors, one for each parameter of this rank's model chunks.

    The ``data`` of a sharded tensor is the parameter itself.
    """
    entries = [x for chunk in chunks for x in nested_values(chunk.module.sharded_state_dict())]
    tensors = (ShardedTensor, ShardedTensorFactory)
    extra = [x.key for x in entries if isinstance(x, ShardedBase) and not isinstance(x, tensors) and _bytes_of(x.data)]
    assert not extra, f"{extra[:3]} are no tensors, and a checkpoint holds tensors and JSON alone"
    return [x for x in entries if isinstance(x, tensors)]


def _bytes_of(data: object) -> int:
    """Return the number of bytes of a ShardedObject's ``data``; 0 if it is empty.

    Transformer Engine's ``_extra_state`` is an empty buffer without FP8.
    """
    if isinstance(data, io.BytesIO):
        return data.getbuffer().nbytes
    return data.numel() if isinstance(data, torch.Tensor) else int(data is not None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParameterState:
    """Holds the optimizer's tensors of one parameter on this rank.

    tensors: kind of state ("exp_avg", "exp_avg_sq" or "fp32_param") → this rank's tensor.
    local: the slice of the flattened parameter that the tensors cover; None if they cover all of
        it.
    group: the data-parallel group of a distributed optimizer; None for any other optimizer.
    moments: the kinds of the parameter's moments on every rank: AdamW's two, or Muon's one.
    """

    tensors: Mapping[str, torch.Tensor]
    local: slice | None = None
    group: dist.ProcessGroup | None = None
    moments: tuple[str, ...] = MOMENTS


class AdamStates:
    """Holds AdamW's tensors of every parameter, over all optimizers in Megatron-Core's chained optimizer.

    of: parameter → its ParameterState.
    """

    def __init__(self, optimizer, *, moments: bool = True) -> None:
        """Find the states of Megatron-Core's optimizer.

        moments: whether AdamW has its moments, which its first step makes. False leaves the masters alone.
        """
        self.of: dict[torch.nn.Parameter, ParameterState] = {}
        for part in optimizer.chained_optimizers:
            if part.is_stub_optimizer:
                continue
            states_of = _distributed_states if isinstance(part, DistributedOptimizer) else _whole_states
            self.of.update(states_of(part, moments))

    def kinds(self, parameter: torch.nn.Parameter) -> tuple[str, ...]:
        """Return the kinds of a parameter's states: its moments, and "fp32_param" unless it is float32 itself.

        Every rank that holds the parameter gets the same result.
        """
        moments = self.of[parameter].moments
        return (*moments, MASTER) if parameter.dtype != torch.float32 else moments


def _moments_of(optimizer, parameter: torch.nn.Parameter, moments: bool) -> tuple[str, ...]:
    """Return the kinds of moments that a part of Megatron-Core's optimizer keeps of a parameter of the model."""
    if not moments:
        return ()
    inner = optimizer.optimizer
    return MOMENTS if isinstance(inner, torch.optim.Optimizer) else inner.moments_of(parameter) or MOMENTS  # Muon


def _whole_states(optimizer, moments: bool) -> Iterator[tuple[torch.nn.Parameter, ParameterState]]:
    halves = isinstance(optimizer, Float16OptimizerWithFloat16Params)
    for parameter in [p for group in optimizer.float16_groups for p in group] if halves else []:
        yield parameter, _state(optimizer, parameter, parameter.main_param, moments)
    for parameter in (
        [p for group in optimizer.fp32_from_fp32_groups for p in group] if halves else optimizer.get_parameters()
    ):
        yield parameter, _state(optimizer, parameter, parameter, moments)


def _state(optimizer, parameter: torch.nn.Parameter, main: torch.Tensor, moments: bool) -> ParameterState:
    kinds = _moments_of(optimizer, parameter, moments)
    tensors = {kind: optimizer.optimizer.state[main][kind] for kind in kinds}
    return ParameterState(tensors=tensors if main is parameter else {**tensors, MASTER: main}, moments=kinds)


def _distributed_states(optimizer, moments: bool) -> Iterator[tuple[torch.nn.Parameter, ParameterState]]:
    group = optimizer.data_parallel_group
    local = set(optimizer.model_param_group_index_map)
    for buffer in optimizer.buffers:
        for parameter in buffer.param_index_map:
            kinds = _moments_of(optimizer, parameter, moments)
            if parameter not in local:
                yield parameter, ParameterState(tensors={}, local=slice(0, 0), group=group, moments=kinds)
                continue
            span = optimizer._get_model_param_range_map(parameter)["param"]
            states = optimizer._get_main_param_and_optimizer_states(parameter)
            tensors = {kind: states[kind] for kind in kinds}
            if parameter.dtype != torch.float32:
                tensors[MASTER] = states["param"]
            part = slice(span.start, span.end)
            yield parameter, ParameterState(tensors=tensors, local=part, group=group, moments=kinds)


def weights_to_save(
    entries: Sequence[ShardedBase], *, prefix: str = "", values: Mapping[int, torch.Tensor] | None = None
) -> list[ShardedBase]:
    """Return Megatron-Core's sharded tensors to save, with ``prefix`` before each key.

    entries: the sharded tensors of a model's parameters.
    values: ``id(parameter)`` → the tensor to save in place of the parameter; None saves the
        parameters.
    """
    if not prefix and values is None:
        return list(entries)
    return [replace(x, key=prefix + x.key, data=x.data if values is None else values[id(x.data)]) for x in entries]


def adam_to_save(entries: Sequence[ShardedBase], states: AdamStates) -> list[ShardedBase]:
    """Return the sharded tensors of AdamW's current states, for this rank to save.

    A collective over the data-parallel group of each distributed optimizer. A distributed
    optimizer's states are gathered one by one, each on one rank of the group. That rank moves the
    state to the host at once, so that the device holds one whole state at a time.

    entries: the sharded tensors of the model's parameters.
    """
    saved: list[ShardedBase] = []
    for number, entry in enumerate(x for x in entries if x.data in states.of):
        state = states.of[entry.data]
        for kind in states.kinds(entry.data):
            whole, replica = _gathered(entry, state, kind, number)
            if whole is not None:
                saved.append(_slot(entry, kind, whole, replica))
    HOST.synchronize()  # wait for the copies to the host
    return saved


def _gathered(
    entry: ShardedBase, state: ParameterState, kind: str, number: int
) -> tuple[torch.Tensor | None, tuple | int]:
    """Return (the whole tensor of one AdamW state of a parameter, its replica id).

    With a distributed optimizer, only the rank that will write the state gets it; the others get
    (None, ()). A replica id is Megatron-Core's mark of which ranks hold the same tensor.

    entry, state: the parameter's sharded tensor and its AdamW states.
    kind: the kind of AdamW's state, such as "exp_avg".
    number: the parameter's index in the list to save; the ranks of the group take turns as writers.
    """
    if state.group is None:
        return state.tensors[kind].detach().view(entry.data.shape), entry.replica_id
    group, owner = state.group, number % state.group.size()
    whole = torch.zeros(entry.data.numel(), dtype=torch.float32, device=HOST.device)
    if kind in state.tensors:
        whole[state.local] = state.tensors[kind].detach().flatten().float()
    # Every other rank adds zeros, so that the sum is exact.
    dist.reduce(whole, dist.get_global_rank(group, owner), group=group)
    if group.rank() != owner:
        return None, ()
    return on_host(whole.view(entry.data.shape)), (*entry.replica_id[:-1], 0)


def _slot(entry: ShardedBase, kind: str, data: torch.Tensor, replica: tuple | int) -> ShardedBase:
    fields: dict = {"key": f"optimizer.state.{kind}.{entry.key}", "data": data, "replica_id": replica}
    if isinstance(entry, ShardedTensor):
        fields["dtype"] = data.dtype
    return replace(entry, **fields)


# ---- loading --------------------------------------------------------------------------------------------------------


def load_weights(entries: Sequence[ShardedBase], folder: pathlib.Path, *, prefix: str = "") -> dict[int, torch.Tensor]:
    """Return {``id(parameter)``: its tensor in host memory}, read from a checkpoint. A collective.

    entries: the sharded tensors of the model's parameters.
    prefix: the text before each key in the checkpoint.
    """
    tensors: dict[int, torch.Tensor] = {}
    sizes = [x.data.numel() * x.data.element_size() for x in entries]
    for batch in _batches(list(entries), [x.key for x in entries], sizes):
        wanted = [
            replace(x, key=prefix + x.key, data=torch.empty_like(x.data, device="cpu", requires_grad=False))
            for x in batch
        ]
        for entry, tensor in zip(batch, _read(wanted, folder), strict=True):
            tensors[id(entry.data)] = tensor
    return tensors


def load_adam(entries: Sequence[ShardedBase], states: AdamStates, folder: pathlib.Path) -> None:
    """Overwrite AdamW's tensors with the states in a checkpoint. A collective.

    AdamW makes its moments in its first step: if ``states`` has them, a step must have been taken before.

    entries: the sharded tensors of the model's parameters.
    """
    wanted = [(x, kind) for x in entries if x.data in states.of for kind in states.kinds(x.data)]
    keys = [f"{kind}.{x.key}" for x, kind in wanted]
    for batch in _batches(wanted, keys, [4 * x.data.numel() for x, _ in wanted]):
        slots = [_slot(x, kind, torch.empty(x.data.shape, dtype=torch.float32), x.replica_id) for x, kind in batch]
        for (entry, kind), whole in zip(batch, _read(slots, folder), strict=True):
            state = states.of[entry.data]
            if kind in state.tensors:
                part = whole if state.local is None else whole.flatten()[state.local]
                with torch.no_grad():
                    state.tensors[kind].copy_(part.view(state.tensors[kind].shape))


def _batches(items: Sequence, keys: Sequence[str], sizes: Sequence[int]) -> Iterator[list]:
    """Yield lists of ``items``, each of at most LOAD_BYTES in total or of one larger piece. A collective.

    keys: each item's key in the checkpoint.
    sizes: each item's size in bytes.

    Every rank yields the same number of lists. A rank with fewer lists yields empty lists at the
    end.
    """
    runs: list[list] = [[]]
    run_bytes = 0
    for piece in _pieces(keys):
        size = sum(sizes[i] for i in piece)
        if runs[-1] and run_bytes + size > LOAD_BYTES:
            runs.append([])
            run_bytes = 0
        runs[-1] += [items[i] for i in piece]
        run_bytes += size
    count = reduce_on_host(torch.tensor([len(runs)]), dist.ReduceOp.MAX)
    yield from runs + [[]] * (int(count.item()) - len(runs))


def _pieces(keys: Sequence[str]) -> list[list[int]]:
    """Return lists of indices of ``keys``; what a list names has to be read at once.

    One list per item, but in a single process one per key. The layers of a model share keys.
    Megatron-Core says of the layers that a process does not ask for that the next rank holds them
    (0.16.1 to 0.19.2, ``dist_checkpointing/strategies/torch.py``). A single process is its own
    next rank, and torch refuses a tensor that lacks some of its own shards.
    """
    if dist.get_world_size() > 1:
        return [[i] for i in range(len(keys))]
    by_key: dict[str, list[int]] = {}
    for i, key in enumerate(keys):
        by_key.setdefault(key, []).append(i)
    return list(by_key.values())


def _read(entries: Sequence[ShardedBase], folder: pathlib.Path) -> list[torch.Tensor]:
    try:
        with guarded(), _on_disk(folder) as path:
            asked = dict(enumerate(_as_stored(entries, path)))
            loaded = dist_checkpointing.load({"tensors": asked}, str(path), validate_access_integrity=False)
    except (CheckpointException, CheckpointingException, *OF_A_FALSE_INDEX) as error:  # all raised on every rank
        kind = CheckpointError if isinstance(_first(error), StoreError) else DamagedCheckpoint
        raise kind(f"{folder} cannot be loaded: {_reason(error)}") from error
    return [loaded["tensors"][i] for i in range(len(entries))]


def _as_stored(entries: Sequence[ShardedBase], path: pathlib.Path) -> list[ShardedBase]:
    """Return the sharded tensors to load, the norms of mixtures under the names that the checkpoint has for them.

    path: the checkpoint's folder on disk. Its index is read only if some entry may have another name.
    """
    if not any(x.key.endswith(MIXTURE_NORM) for x in entries):
        return list(entries)
    keys = FileSystemReader(path).read_metadata().state_dict_metadata
    found = []
    for entry in entries:
        for one, other in (MIXTURE_NORM, MIXTURE_NORM[::-1]):
            renamed = entry.key.removesuffix(one) + other
            if entry.key.endswith(one) and entry.key not in keys and renamed in keys:
                entry = replace(entry, key=renamed)
                break
        found.append(entry)
    return found


def _on_disk(folder: pathlib.Path | RemotePath) -> contextlib.AbstractContextManager[pathlib.Path]:
    """Return a context manager that yields the folder on disk from which Megatron-Core loads a checkpoint.

    For a checkpoint in an object store it yields a temporary folder with the checkpoint's small
    files. Tensors are then read from the store (remote_index.py).
    """
    if isinstance(folder, pathlib.Path):
        return contextlib.nullcontext(folder)
    from megatron_rl.checkpoint.remote_index import index_of

    return index_of(folder)


def _first(error: BaseException) -> BaseException:
    """Return the first failed rank's error that ``error`` holds; ``error`` itself if it holds none.

    The text of torch's CheckpointException quotes every rank's stack, which is too long for a
    message.
    """
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return next((cause for cause, _ in failures.values()), error)


def _reason(error: BaseException) -> str:
    """Return the class and the text of the first failed rank's error, in one line."""
    first = _first(error)
    return shortened(f"{type(first).__name__}: {' '.join(str(first).split())}", 500)
