"""Presents a GPU that is not there to this process: tensors on "cuda" are FakeTensors, with shapes and no numbers.

Import it before anything of megatron_rl or Megatron-Core. The package then finds a CUDA host, and its own code runs as
on one. Wherever it reads a number off the device, torch's FakeTensorMode raises; where the host merely waits for the
device, ``QUESTIONS`` keeps the place. Torch's autograd engine wants a driver, so ``backward`` walks the graph itself.
"""

import collections
import contextlib
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

MODE = FakeTensorMode()
DEVICE = torch.device("cuda", 0)
QUESTIONS: collections.Counter[str] = collections.Counter()
"""How often the host waited for the device, by place: the module and function that asked, and how it asked."""

LAUNCHES: collections.Counter[str] = collections.Counter()
"""How often each operation ran that launches a kernel, by its name."""
NO_KERNEL = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh")

ANSWERS: dict[str, Callable[[torch.Tensor], list]] = {}
"""Numbers that a tensor is said to hold, by the function that reads them; nobody else may read."""

_ON_THE_WAY = ("torch", "tests.latest.fake_device", "contextlib", "concurrent")


def _asker() -> tuple[str, str]:
    """Return module and function of the innermost caller that is neither torch nor this file."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith(_ON_THE_WAY) or frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame.f_globals["__name__"], frame.f_code.co_name


def _ask(how: str) -> None:
    module, function = _asker()
    QUESTIONS[f"{module}.{function}: {how}"] += 1


class _Stream:
    """Stands for a CUDA stream or event. To order streams costs the host nothing, to wait for one is a question."""

    def __init__(self, *_, **__): ...

    def wait_stream(self, *_): ...

    def wait_event(self, *_): ...

    def wait(self, *_): ...

    def record(self, *_): ...

    def record_event(self, *_):
        return self

    def elapsed_time(self, _):
        return 1.0

    def synchronize(self):
        _ask("synchronize")

    def query(self):
        _ask("query")
        return True


class Watch(TorchDispatchMode):
    """Counts kernels, and the copies between host and device that the host waits for: those not ``non_blocking``."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        before = args[0].device if args and isinstance(args[0], torch.Tensor) else None
        result = function(*args, **kwargs)
        name = function.overloadpacket.__name__
        if function.namespace != "prim" and not function.is_view and name not in NO_KERNEL:
            LAUNCHES[name] += 1
        if name == "_to_copy" and before != result.device and not kwargs.get("non_blocking"):
            _ask(f"copy from {before.type} to {result.device.type}")
        if name == "copy_" and args[1].device != before and not (kwargs.get("non_blocking") or args[2:3] == (True,)):
            _ask(f"copy from {args[1].device.type} to {before.type}")
        return result


def _listed(tensor: torch.Tensor) -> list:
    """Answer ``tolist``. On a tensor of the device it is one question, however many numbers it holds."""
    _, function = _asker()
    if tensor.device.type != "cpu":
        _ask("tolist")
    if function not in ANSWERS:
        return [tensor[i].item() for i in range(len(tensor))]  # raises
    return ANSWERS[function](tensor)


def _moved(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Move a module's parameters, as ``Module.to`` does; torch's own cannot swap FakeTensors that are referred to."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.device != device:
                moved = torch.nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
                marks = {key: value for key, value in vars(parameter).items() if key not in vars(moved)}
                vars(moved).update(marks)
                part._parameters[name] = moved
        for name, buffer in part._buffers.items():
            part._buffers[name] = buffer if buffer is None else buffer.to(device)
    return module


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, out_dtype, out) -> torch.Tensor:
    """Stand for the product that is added to a total of another dtype, which torch 2.11 cannot do on FakeTensors."""
    assert out is total and total.dtype == out_dtype and total.device == left.device == right.device
    return total.add_((left @ right).to(out_dtype))


def _present_device() -> None:
    cuda = torch.cuda
    cuda._lazy_init = lambda: None
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.set_device = cuda.manual_seed = lambda *_, **__: None
    for place in (cuda, cuda.random):
        place.set_rng_state = lambda *_, **__: None
        place.get_rng_state = lambda *_, **__: torch.zeros(16, dtype=torch.uint8)
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = lambda *_: _Stream()
    cuda.stream = cuda.device = lambda *_: contextlib.nullcontext()
    cuda.synchronize = lambda *_: _ask("synchronize")
    torch.Tensor.record_stream = lambda *_: None
    torch.addmm = _add_product
    torch.compile = lambda function: function  # Megatron-Core's SwiGLU: its operations have shapes as they are
    torch.Tensor.pin_memory = lambda tensor, *_: MODE.from_tensor(tensor)
    torch.nn.Module.to = _moved
    FakeTensor.tolist = _listed
    FakeTensor.numpy = lambda tensor, *_, **__: np.array(_listed(tensor))
    new_group = dist.new_group
    dist.new_group = lambda *args, **kwargs: new_group(*args, **{**kwargs, "backend": "fake"})


@contextlib.contextmanager
def _cuda_found() -> Iterator[None]:
    hidden, is_available = os.environ.pop("CUDA_VISIBLE_DEVICES", None), torch.cuda.is_available
    torch.cuda.is_available = lambda: True
    yield
    torch.cuda.is_available = is_available  # FakeTensorMode asks, and touches the device where there is one
    if hidden is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = hidden


assert not torch.cuda.is_available(), "hide the host's GPUs: CUDA_VISIBLE_DEVICES="
_present_device()
with _cuda_found():
    from megatron_rl.distributed import collectives, platform  # isort: split
    from megatron.core.tensor_parallel import random as tensor_parallel_random

    from megatron_rl.model.logprob import kernels as logprob_kernels

assert platform.HOST.is_cuda
# Generators: nothing is drawn. Recomputation keeps their states, and fork compares real ones of the host.
tensor_parallel_random._get_cuda_rng_state = tensor_parallel_random._set_cuda_rng_state = lambda *_, **__: None
tensor_parallel_random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
# Triton's kernels write into tensors that they are given, and return nothing.
logprob_kernels.statistics = logprob_kernels.turn_into_gradient = lambda *_, **__: None
torch.autograd.backward = lambda *args, **kwargs: backward(*args, **kwargs)


def join_fake_world(rank: int, size: int) -> None:
    """Make this process rank ``rank`` of a world whose other ranks do not exist; its collectives change nothing."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    collectives._beside_nccl[:] = [dist.new_group()]


class InTurn:
    """Stands for the packing thread: packs at once, with real tensors. FakeTensorMode takes one thread at a time."""

    def submit(self, function, *args) -> Future:
        done: Future = Future()
        with unset_fake_temporarily():
            done.set_result(function(*args))
        return done

    def shutdown(self, **_): ...


@torch.no_grad()
def backward(outputs: torch.Tensor | Sequence[torch.Tensor],
             grad_tensors: torch.Tensor | Sequence[torch.Tensor] | None = None) -> None:
    """Run backward by calling each node of the graph after all that feed it; leaves get ``grad``. No hooks run."""
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    gradients = [grad_tensors] if grad_tensors is None or isinstance(grad_tensors, torch.Tensor) else list(grad_tensors)
    roots = [x.grad_fn for x in outputs if x.grad_fn is not None]
    arrived: dict[object, dict[int, torch.Tensor]] = collections.defaultdict(dict)
    for x, gradient in zip(outputs, gradients, strict=True):
        if x.grad_fn is not None:
            arrived[x.grad_fn][x.output_nr] = torch.ones_like(x) if gradient is None else gradient
    for node in _in_order(roots):
        found = arrived.pop(node, {})
        if hasattr(node, "variable"):
            if not found:  # added to main_grad, and nothing handed on
                continue
            leaf, gradient = node.variable, found[0]
            assert gradient.device == leaf.device and gradient.shape == leaf.shape, (gradient, leaf)
            leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
            continue
        for gradient, (following, number) in _given(node, found):
            if following is not None and gradient is not None:
                gradient = _fitted(gradient, following._input_metadata[number])
                before = arrived[following].get(number)
                arrived[following][number] = gradient if before is None else before + gradient


def _given(node, found: dict[int, torch.Tensor]) -> Iterator[tuple[torch.Tensor | None, tuple]]:
    """Yield a node's gradients, each with the node and the number of its value that it goes to.

    An autograd.Function gets zeros for an output without a gradient, as from torch's engine; all of an output's own
    shape here. It gives a gradient for every argument, and the graph goes on at those that need one.
    """
    width = len(node._input_metadata)
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        given = node(*[found.get(i) for i in range(width)])
        return zip(given if isinstance(given, tuple) else (given,), node.next_functions, strict=True)
    some = next(iter(found.values()))
    given = node.apply(*[found.get(i, torch.zeros_like(some)) for i in range(width)])
    given = given if isinstance(given, tuple) else (given,)
    needed = [gradient for gradient, needs in zip(given, node.needs_input_grad, strict=True) if needs]
    return zip(needed, [edge for edge in node.next_functions if edge[0] is not None], strict=True)


def _fitted(gradient: torch.Tensor, wanted) -> torch.Tensor:
    """Return a gradient in the shape and dtype of the value that it belongs to, as torch's engine hands it on."""
    assert gradient.device == wanted.device, f"a gradient on {gradient.device} of a tensor on {wanted.device}"
    return gradient.sum_to_size(wanted.shape).to(wanted.dtype)


def _in_order(roots: list) -> list:
    """Return the graph's nodes, each before those that its gradients go to."""
    order, seen = [], set()

    def visit(node) -> None:
        if node in seen:
            return
        seen.add(node)
        for following, _ in node.next_functions:
            if following is not None:
                visit(following)
        order.append(node)

    for root in roots:
        visit(root)
    return order[::-1]
