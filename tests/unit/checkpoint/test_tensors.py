"""The memory that saving a distributed optimizer's state takes."""

import dataclasses
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_rl.checkpoint import tensors
from megatron_rl.checkpoint.tensors import MOMENTS, ParameterState, adam_to_save
from tests.patience import until


@dataclasses.dataclass
class Entry:
    """Stands for a sharded tensor of Megatron-Core."""

    key: str
    data: torch.Tensor
    replica_id: tuple[int, ...] = (0, 0, 0)


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_gathered_states_leave_the_device_one_by_one(alone, monkeypatch):
    """The device holds one gathered state at a time, and all are saved whole."""
    alive: list[weakref.ref] = []
    most = 0

    def take(whole: torch.Tensor) -> torch.Tensor:
        nonlocal most
        # gloo's own thread may hold a finished collective's tensors for a moment
        until(lambda: all(storage() is None for storage in alive), seconds=5.0)
        alive[:] = [*(storage for storage in alive if storage() is not None), weakref.ref(whole.untyped_storage())]
        most = max(most, len(alive))
        return whole.clone()

    monkeypatch.setattr(tensors, "on_host", take)
    group = dist.distributed_c10d._get_default_group()
    entries = [Entry(f"w{number}", torch.zeros(3, 4)) for number in range(5)]
    states = {}
    for number, entry in enumerate(entries):
        tensors_of = {kind: torch.full((12,), float(number)) for kind in MOMENTS}
        states[entry.data] = ParameterState(tensors=tensors_of, local=slice(0, 12), group=group)
    found = adam_to_save(entries, SimpleNamespace(of=states, kinds=lambda _: MOMENTS))
    assert most == 1 and len(found) == 5 * len(MOMENTS)
    assert [slot.key for slot in found[: len(MOMENTS)]] == [f"optimizer.state.{kind}.w0" for kind in MOMENTS]
    for number, slot in enumerate(found):
        assert torch.equal(slot.data, torch.full((3, 4), float(number // len(MOMENTS))))
