"""The host as Megatron-Core sees it: CUDA with NCCL, or a CPU with gloo that is presented as CUDA.

Megatron-Core (0.16.1 and 0.19.2) asks for ``device="cuda"`` by name and opens streams. It asserts
on the CUDA names that ``Tensor.type()`` returns (``optimizer/clip_grads.py:167``,
``optimizer/distrib_optimizer.py:361``). So on a host with no GPU this module replaces torch's
functions under their names. A TorchFunctionMode would not do: it is not active inside backward. The
import of this module replaces them, once, and must come before any module of Megatron-Core. On a
CUDA host it changes nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil
import torch
import torch.utils._device as torch_device

from megatron_rl.distributed.requirements import check_megatron_core
from megatron_rl.errors import ConfigError

BF16_PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "B200": 2250e12,
}
HUGE_PAGES = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")

log = logging.getLogger(__name__)
_largest_taken = [0]  # bytes, the largest peak that ``take_peak_memory_bytes`` has reset


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Describes this process's device ("cuda" or "cpu") and torch.distributed's backend ("nccl" or "gloo")."""

    device_type: str
    backend: str

    @property
    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    @property
    def device(self) -> torch.device:
        """Return this process's device: the CPU, or the GPU of its LOCAL_RANK."""
        if not self.is_cuda:
            return torch.device("cpu")
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())

    def synchronize(self) -> None:
        """Wait until the device has finished its work; on a CPU there is nothing to wait for."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def peak_flops(self) -> float | None:
        """Return this GPU's dense bf16 FLOP/s by its data sheet; None for a CPU or an unlisted GPU."""
        if not self.is_cuda:
            return None
        name = torch.cuda.get_device_name()
        return next((flops for part, flops in BF16_PEAK_FLOPS.items() if part in name), None)

    def peak_memory_bytes(self) -> int:
        """Return the largest amount of device memory held so far; on a CPU host, the process's largest resident set."""
        if self.is_cuda:
            return max(_largest_taken[0], torch.cuda.max_memory_allocated())
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def take_peak_memory_bytes(self) -> int:
        """Return the largest amount of device memory held since the last call of this method.

        A CPU host's peak cannot be reset; there the current resident set is returned.
        """
        if not self.is_cuda:
            return psutil.Process().memory_info().rss
        peak = torch.cuda.max_memory_allocated()
        _largest_taken[0] = max(_largest_taken[0], peak)
        torch.cuda.reset_peak_memory_stats()
        return peak


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor on ``device``; it goes to a GPU through pinned memory, so that the host does not wait."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in host memory: the tensor itself if it is there already, else a copy in pinned memory.

    The copy does not block, and is complete after ``HOST.synchronize``. Later work on this stream
    does not change it.
    """
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


class _NoStream:
    """Stands in for a CUDA stream or event on a CPU, which runs all work in order anyway."""

    def __init__(self, *args, **kwargs): ...

    def wait_stream(self, *args): ...

    def wait_event(self, *args): ...

    def synchronize(self): ...

    def wait(self, *args): ...

    def record(self, *args): ...

    def record_event(self, *args):
        return self


_FACTORIES = (
    *("arange", "empty", "empty_like", "eye", "full", "full_like", "linspace", "ones", "ones_like"),
    *("rand", "randint", "randn", "randperm", "tensor", "zeros", "zeros_like", "as_tensor"),
)


def _on_cpu(factory):
    @functools.wraps(factory)
    def build(*args, **kwargs):
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = torch.device("cpu")
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return build


def _with_listed_splits(all_to_all_single):
    """Return gloo's all-to-all, extended to split sizes given as tensors.

    Megatron-Core's token dispatcher passes its split sizes as tensors.
    """

    @functools.wraps(all_to_all_single)
    def exchange(output, input, output_split_sizes=None, input_split_sizes=None, *args, **kwargs):
        sizes = [x.tolist() if isinstance(x, torch.Tensor) else x for x in (output_split_sizes, input_split_sizes)]
        return all_to_all_single(output, input, *sizes, *args, **kwargs)

    return exchange


def _all_gather_uneven(all_gather):
    """Return gloo's all-gather, extended to parts of unequal sizes, which NCCL's all-gather accepts.

    Experts that are split over tensor ranks gather a different number of tokens from each rank.
    """

    @functools.wraps(all_gather)
    def gather(tensor_list, tensor, group=None, async_op=False):
        if len({x.shape for x in tensor_list}) == 1:
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        assert not async_op, "Megatron-Core (0.16.1, 0.19.2) gathers uneven parts synchronously"
        _exchange_parts(tensor_list, [tensor] * len(tensor_list), group)
        return None

    return gather


def _reduce_scatter_uneven(reduce_scatter):
    """Return gloo's reduce-scatter, extended to parts of unequal sizes.

    Rank r gets the sum of all ranks' r-th parts, added in rank order.
    """

    @functools.wraps(reduce_scatter)
    def scatter(output, input_list, op=torch.distributed.ReduceOp.SUM, group=None, async_op=False):
        if len({x.shape for x in input_list}) == 1:
            return reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
        assert op == torch.distributed.ReduceOp.SUM and not async_op, (
            "Megatron-Core (0.16.1, 0.19.2) adds uneven parts synchronously"
        )
        parts = [torch.empty_like(output) for _ in input_list]
        _exchange_parts(parts, input_list, group)
        output.copy_(torch.stack(parts).sum(0))
        return None

    return scatter


def _exchange_parts(received, sent, group) -> None:
    """Send part i of ``sent`` to rank i, and fill ``received`` with the parts of all ranks, in rank order.

    Parts may differ only in their first dimension.
    """
    incoming = torch.cat([torch.empty_like(x) for x in received])
    torch.distributed.all_to_all_single(
        incoming, torch.cat(list(sent)).contiguous(), [len(x) for x in received], [len(x) for x in sent], group=group
    )
    for target, part in zip(received, incoming.split([len(x) for x in received]), strict=True):
        target.copy_(part)


def _sharing_devices(process_group_gloo):
    """Return a gloo class whose groups share one set of network devices per process.

    Torch (2.13, ``csrc/distributed/c10d/init.cpp``) gives each group a device of its own. A device is
    a thread that wakes a hundred times a second (gloo, ``transport/tcp/loop.cc``) while anything
    refers to its group. Megatron-Core makes about fifty groups per process, and on a CPU there are
    often as many processes as cores.
    """
    devices_of: dict[int, list] = {}  # by process id: a forked child has no threads of its parent

    def devices() -> list:
        if os.getpid() not in devices_of:
            interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
            devices_of[os.getpid()] = [process_group_gloo.create_device(interface=name) for name in interfaces] or [
                process_group_gloo.create_default_device()
            ]
        return devices_of[os.getpid()]

    class SharedDeviceGloo(process_group_gloo):
        def __init__(self, store, rank, size, timeout, **others):
            options = process_group_gloo._Options()
            options._devices, options._timeout = devices(), timeout
            for name, value in others.items():  # torch 2.14 adds enable_reconfigure
                setattr(options, name, value)
            options._threads = 2 * len(options._devices)  # torch's own rule
            super().__init__(store, rank, size, options)

    return SharedDeviceGloo


@contextlib.contextmanager
def _one_by_one(group=None, device=None, async_ops=False):
    """Take the place of ``torch.distributed._coalescing_manager``: issue the block's collectives one at a time.

    gloo's coalesced all-gather corrupts the heap. With torch 2.13 and two ranks, a loop of such
    calls alone dies within 5000 rounds in ``AsyncAllgatherCoalescedWork``. The plain all-gather does not.
    """
    c10d = torch.distributed.distributed_c10d
    state, group = c10d._world.pg_coalesce_state, group or c10d._get_default_group()
    collected = state[group] = []
    manager = c10d._CoalescingManager()
    try:
        yield manager
    finally:
        del state[group]
    for call in collected:
        arguments = [call.tensor] if call.dst_tensor is None else [call.dst_tensor, call.tensor]
        reduction = {} if call.redop is None else {"op": call.redop}
        work = call.op(*arguments, **reduction, group=group, async_op=async_ops)
        if async_ops:
            manager.append(work)


def _present_cpu_as_cuda() -> None:
    # ``with torch.device(...)`` recognises the factories by identity, in a set that is built once
    # (torch 2.13 ``utils/_device.py``). Build the set before they are replaced: otherwise it would
    # recognise none, and transformers' from_pretrained would leave rotary frequencies uninitialised.
    torch_device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))

    tensor_type = torch.Tensor.type

    def type_with_cuda_names(self, *args, **kwargs):
        type_name = tensor_type(self, *args, **kwargs)
        return type_name.replace("torch.", "torch.cuda.") if isinstance(type_name, str) else type_name

    torch.Tensor.type = type_with_cuda_names
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = lambda self, *args, **kwargs: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.empty_cache = lambda: None
    torch.cuda.Stream = torch.cuda.Event = _NoStream
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *args, **kwargs: _NoStream()
    torch.cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()
    torch.distributed.all_to_all_single = _with_listed_splits(torch.distributed.all_to_all_single)
    torch.distributed.all_gather = _all_gather_uneven(torch.distributed.all_gather)
    torch.distributed.reduce_scatter = _reduce_scatter_uneven(torch.distributed.reduce_scatter)
    torch.distributed._coalescing_manager = _one_by_one
    c10d = torch.distributed.distributed_c10d
    c10d.ProcessGroupGloo = _sharing_devices(c10d.ProcessGroupGloo)
    # With Transformer Engine installed and no GPU, Megatron-Core would choose its kernels and die with
    # a CUDA driver error. With this None its import fails, and find_spec reports it as absent.
    sys.modules["transformer_engine"] = None


def choose_device(
    environment: Mapping[str, str], *, driver_loaded: bool, is_available: Callable[[], bool], reason: Callable[[], str]
) -> str:
    """Return "cuda" if CUDA works, and "cpu" if there is no GPU or the user asks for the CPU.

    environment: MEGATRON_RL_DEVICE=cpu asks for the CPU. So does CUDA_VISIBLE_DEVICES, if it is
        empty or -1.
    driver_loaded: whether the host has NVIDIA's driver.
    is_available: a function that returns whether CUDA works in torch.
    reason: a function that returns torch's message about why CUDA does not work.

    Raises ConfigError if the host has a GPU but CUDA does not work: a run must not silently use the
    CPU instead.
    """
    wanted = environment.get("MEGATRON_RL_DEVICE", "").strip().lower()
    if wanted not in ("", "cpu", "cuda"):
        raise ConfigError(f"MEGATRON_RL_DEVICE={wanted!r} is no device; set it to cpu or cuda, or unset it")
    if wanted == "cpu" or environment.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return "cpu"
    if is_available():
        return "cuda"
    if driver_loaded or wanted == "cuda":
        raise ConfigError(
            f"this host has an NVIDIA driver and CUDA does not work in torch {torch.__version__}: {reason()}. "
            "python -m megatron_rl.doctor says more; set MEGATRON_RL_DEVICE=cpu to run on the CPU"
            if driver_loaded
            else f"MEGATRON_RL_DEVICE=cuda, and CUDA does not work here in torch {torch.__version__}: {reason()}"
        )
    return "cpu"


def _cuda_fault() -> str:
    try:
        torch.cuda.init()
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0].rstrip(".")
    return "torch.cuda.is_available() is False"


def _detect() -> Host:
    device = choose_device(
        os.environ,
        driver_loaded=os.path.exists("/proc/driver/nvidia/version"),
        is_available=torch.cuda.is_available,
        reason=_cuda_fault,
    )
    if device == "cuda":
        return Host(device_type="cuda", backend="nccl")
    if os.environ.get("MEGATRON_RL_DEVICE"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # other code that asks torch for CUDA must find none, too
    if "megatron.core" in sys.modules:
        raise ImportError(
            "megatron.core was imported before megatron_rl on a host with no GPU, so it already looks for CUDA; "
            "import megatron_rl.distributed.platform (or anything of megatron_rl) first"
        )
    _present_cpu_as_cuda()
    if huge_pages_on_request(HUGE_PAGES):
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read at torch's first allocation of 2 MiB or more
    return Host(device_type="cpu", backend="gloo")


def huge_pages_on_request(setting: pathlib.Path) -> bool:
    """Return whether the kernel gives a process memory in pages of 2 MiB where it asks for them.

    Large tensors live for one operation or one micro-batch. In pages of 4 KiB their first touch takes as long as an
    exponential of each element.

    setting: the kernel's file, absent where there are no such pages.
    """
    try:
        return "[never]" not in setting.read_text(encoding="ascii")
    except OSError:
        return False


def _transformer_engine_fault(error: Exception) -> str:
    from megatron_rl.distributed.import_faults import error_text, fault_of

    fault = fault_of(error_text(error), "transformer_engine", torch.version.cuda)
    way_out = f"{fault.mend}; " if fault.mend else ""
    return f"Transformer Engine {fault.state} ({error_text(error)}); {way_out}python -m megatron_rl.doctor says more"


def check_transformer_engine() -> None:
    """Raise ImportError if the installed Transformer Engine would make Megatron-Core's import fail.

    If ``import transformer_engine`` raises ImportError, Megatron-Core (0.16.1 and 0.19.2,
    ``fp8_utils.py``) does without Transformer Engine. Otherwise it imports
    ``transformer_engine.pytorch`` next, and an error of that import makes its own import fail.
    """
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:  # a RuntimeError or AssertionError of its own, or a library's OSError
        if isinstance(error, ImportError) and "transformer_engine" not in sys.modules:
            return
        raise ImportError(f"Megatron-Core cannot be imported: {_transformer_engine_fault(error)}") from error


check_megatron_core()  # before megatron.core is imported: in an unknown release that may fail with another error
HOST = _detect()
if HOST.is_cuda:
    check_transformer_engine()


@functools.cache
def transformer_engine_importable() -> bool:
    """Return whether there is a GPU and Transformer Engine imports; if it is installed but fails, log why, once."""
    if not HOST.is_cuda:
        return False
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, OSError, AttributeError) as error:  # OSError: a library does not load
        if importlib.util.find_spec("transformer_engine") is not None:
            log.warning("%s", _transformer_engine_fault(error))
        return False
    return True
