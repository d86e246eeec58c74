"""Measures the tensor memory that a piece of code allocates: the peak of all storages alive that it has made."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocationMeter(TorchDispatchMode):
    """Measures in ``with meter: …``, as often as wanted, into ``meter.peak_bytes``.

    A storage counts from the operation that returns it until its last reference is gone; not what one frees within.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in given:
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {
            key: (reference, size) for key, (reference, size) in self._alive.items() if not reference.expired()
        }
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))
        return result
