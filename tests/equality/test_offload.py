"""Gradients and optimizer state leave the device between steps and come back.

The steps are the same to the bit, storages have 0 bytes meanwhile, and wrong uses are refused. On the CPU the storages
are really released and filled again. NOT RUN: pinned memory, copies that do not block, CUDA's caching allocator.
"""

import contextlib
import gc
import pathlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from megatron_rl.backend import offload
from megatron_rl.backend.offload import Offload
from megatron_rl.checkpoint import model_state
from megatron_rl.types import StepKind
from tests.equality.layouts import BF16, GATHER, MOVING, PLAIN, SHARDED
from tests.equality.rig import Rig, equal, equal_by_name, open_rig, ragged_advantages
from tests.equality.rows import assert_all
from tests.pairwise import quick

ADVANTAGES = ragged_advantages(8)
LAYOUTS = (
    *("plain qwen2_tied", "plain-bf16 qwen2_tied", "DP2-sharded-gather qwen2_tied"),
    *("PP2-VPP2-sharded-bf16 qwen2_tied", "EP2-sharded-bf16 qwen3_moe", "DP2-plain-bf16 qwen2_tied"),
    *("DP2-sharded qwen2_tied", "DP2-sharded-bf16 qwen2_tied", "DP2-sharded-bf16-overlap qwen2_tied"),
    *("DP2-sharded-bf16-gather qwen2_tied", "TP2-plain llama", "TP2-sharded-bf16 llama", "PP2-plain-bf16 qwen2_tied"),
    *("PP2-DP2-sharded-bf16-gather qwen2_tied", "DP2-sharded-bf16-muon qwen2_tied"),
)
QUICK = LAYOUTS[:5]  # each dtype plain and sharded, an overlap, and experts; all of them are in the long part
ADAPTERS = ("DP2-LoRA-sharded-bf16 qwen2_tied", "DP2-LoRA-plain-bf16 qwen2_tied")
RESUMED = {"bf16": (*PLAIN, *BF16), "sharded": SHARDED, "sharded-bf16-overlap": (*SHARDED, *BF16, *GATHER)}


def moving(layout: tuple[str, ...], family: str = "qwen2_tied"):
    return open_rig(family, *MOVING, *layout, samples=8, total_steps=6)


@contextlib.contextmanager
def offloaded(rig: Rig, really: bool) -> Iterator[None]:
    if really:
        rig.backend.offload()
    yield
    if really:
        rig.backend.restore()


def several_steps(layout: tuple[str, ...], family: str, really: bool) -> dict[str, object]:
    """Take ghosts and real steps, each after each, then a fresh AdamW and two more; before each as in a rollout."""
    kinds = "GGRRGR", "RG"
    with moving(layout, family) as rig:
        exported, logprobs, norms = [], [], []
        for number, kind in enumerate("".join(kinds)):
            if number == len(kinds[0]):
                rig.backend.reset_optimizer(total_steps=4)
            with offloaded(rig, really):
                exported.append(rig.weights())
                logprobs.append(torch.from_numpy(rig.logprobs()))
            (result,) = rig.step(np.roll(ADVANTAGES, number) if kind == "R" else np.zeros(8), drops=True)
            assert result.kind is (StepKind.REAL if kind == "R" else StepKind.GHOST)
            norms.append(torch.tensor(result.grad_norm, dtype=torch.float64))
        exported.append(rig.weights())
        return {"exported": exported, "logprobs": logprobs, "norms": norms, "state": rig.optimizer_state()}


def with_and_without(rank: int, world: int, family: str, layout: tuple[str, ...]) -> dict[str, bool]:
    found, wanted = (several_steps(layout, family, really) for really in (True, False))
    pairs = zip(found["exported"], wanted["exported"], strict=True)
    return {
        "exported weights": all(equal_by_name(a, b) for a, b in pairs),
        **{key: equal(found[key], wanted[key]) for key in ("logprobs", "norms", "state")},
        # the last steps are of a fresh AdamW: its state is not empty, and weights move or the equalities prove nothing
        "moved": not equal_by_name(wanted["exported"][-2], wanted["exported"][-1]) and len(wanted["state"]) > 4,
        "norms are not zero": sum(float(x) > 0 for x in wanted["norms"]) == 4,
    }


@pytest.mark.parametrize("name", quick((*LAYOUTS, *ADAPTERS), *QUICK, ADAPTERS[0]))
def test_steps_with_offload_between_equal_steps_without(pool, name):
    """To the bit: weights as exported while offloaded, log-probs, norms, and AdamW's moments, masters and counts."""
    assert_all(pool, name, with_and_without)


def live_storages(but: list[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return all storages under any tensor that Python still holds, except those of ``but``, by their addresses.

    Who keeps what is returned keeps them all alive: torch's threads let go of those of a step's collectives when they
    like, and a difference of two readings would count that.
    """
    gc.collect()
    apart = {x.untyped_storage()._cdata for x in but}
    found = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):  # isinstance would ask lazy modules for their class, and import them
            storage = each.untyped_storage()
            found[storage._cdata] = storage
    return {place: storage for place, storage in found.items() if place not in apart}


def sizes_of(storages: dict[int, torch.UntypedStorage]) -> dict[int, int]:
    return {place: storage.nbytes() for place, storage in storages.items()}


def places_of(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    return [(x.data_ptr(), x.untyped_storage().nbytes()) for x in tensors]


def host_pointers(rig: Rig) -> list[int]:
    return [x.data_ptr() for x in rig.backend.optimizer._offload.host.blocks]


def adam_tensors(rig: Rig, bf16: bool) -> list[torch.Tensor]:
    """Return AdamW's moments, and in half precision the masters: in float32 they are the model's own."""
    found = []
    for part in rig.backend.optimizer.megatron.chained_optimizers:
        for group in part.optimizer.param_groups:
            for master in group["params"]:
                kinds = ("exp_avg", "exp_avg_sq", "momentum_buffer")
                state = part.optimizer.state[master]
                found += [state[kind] for kind in kinds if kind in state] + [master] * bf16
    return found


def away_and_back(rank: int, world: int, family: str, layout: tuple[str, ...]) -> dict[str, object]:
    with moving(layout, family) as rig:
        backend = rig.backend
        before_any_step = backend.offload()
        backend.restore()
        first_hosts = host_pointers(rig)
        rig.step(ADVANTAGES, drops=True)
        adam = adam_tensors(rig, "model.dtype=bfloat16" in layout)
        buffers = [x for chunk in backend.chunks for x in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        weights = backend.parameters()
        gradients = [p.main_grad for p in weights]
        moved, state = [x.detach().clone() for x in adam], rig.optimizer_state()
        gradient_bytes = sum(x.numel * x.grad_data.element_size() for x in buffers)
        adam_bytes = sum(x.numel() * x.element_size() for x in adam)
        hosts = backend.optimizer._offload.host.blocks  # a list that grows in place
        held = live_storages(but=hosts)
        places, before = places_of(weights), sizes_of(held)
        released = backend.offload()
        died = sum(before.values()) - sum(sizes_of(held).values())
        gone = {x.untyped_storage().nbytes() for x in (*adam, *gradients, *(b.grad_data for b in buffers))}
        first = before_any_step
        found: dict[str, object] = {
            "bytes": (released.gradients, released.optimizer) == (gradient_bytes, adam_bytes),
            "no more and no less died": died == released.total == gradient_bytes + adam_bytes > 0,
            "nothing is held anew": live_storages(but=hosts).keys() <= held.keys(),
            "0 bytes": gone == {0},
            "weights stay": places_of(weights) == places,
            "again": backend.offload() == released,
            "before": first.gradients == released.gradients and first.optimizer < released.optimizer,
        }
        pointers = host_pointers(rig)
        backend.restore()
        backend.restore()
        again = adam_tensors(rig, "model.dtype=bfloat16" in layout)
        found["the same tensors"] = all(a is b for a, b in zip(again, adam, strict=True))
        found["the same views"] = all(p.main_grad is x for p, x in zip(weights, gradients, strict=True))
        found["the same values"] = (equal(adam, moved) and equal(rig.optimizer_state(), state)
                                    and any(map(torch.any, moved)))
        found["gradients of zero"] = not any(bool(x.any()) for x in (*gradients, *(b.grad_data for b in buffers)))
        found["all is back"] = sizes_of(held) == before and live_storages(but=hosts).keys() <= held.keys()
        assert backend.offload() == released
        same_hosts = host_pointers(rig) == pointers and pointers[: len(first_hosts)] == first_hosts
        backend.restore()
        return found | {"the same host memory": same_hosts and len(pointers) > 0}


@pytest.mark.parametrize("name", quick(LAYOUTS, *QUICK))
def test_released_bytes_are_those_of_gradients_and_adam(pool, name):
    """Compared with the naive sum, with every live tensor of the process, and storage by storage."""
    assert_all(pool, name, away_and_back)


def test_shared_storages_move_once_and_those_of_weights_stay():
    weights = torch.arange(40, dtype=torch.float32)
    shared = torch.arange(50, dtype=torch.int32).view(torch.float32)  # denormals, as bits
    odd, nan = torch.arange(7, dtype=torch.uint8), torch.tensor([float("nan"), -0.0])
    zeros, empty, step = torch.zeros(12), torch.empty(0), torch.tensor(3.0)
    state = [weights[3:9], shared[:20], shared[10:], odd, nan, shared.view(5, 10), empty, step]
    wanted = [x.clone() for x in state]
    memory = Offload(block_bytes=64)  # so that storages straddle blocks, and blocks hold several
    for _ in range(2):
        released = memory.release(zeros=[zeros[:4], zeros[2:]], state=state, staying=[weights])
        assert (released.gradients, released.optimizer) == (12 * 4, 50 * 4 + 7 + 2 * 4)
        assert [x.untyped_storage().nbytes() for x in (zeros, *state)] == [0, 160, 0, 0, 0, 0, 0, 0, 4]
        assert len(memory.host.blocks) == 4  # ⌈215 / 64⌉
        memory.restore()
        bits = [(a.view(torch.uint8), b.view(torch.uint8))
                for a, b in zip(state, wanted, strict=True)
                if a.dim() and a.numel()]
        assert all(torch.equal(a, b) for a, b in bits) and len(bits) == 6 and float(step) == 3.0
        assert zeros.tolist() == [0.0] * 12 and weights.tolist() == list(range(40))


def test_a_host_without_memory_is_named_and_nothing_has_left(monkeypatch):
    state, memory = torch.arange(100.0), Offload(block_bytes=64)
    true_empty, given = torch.empty, []

    def scarce(*args, **kwargs):
        given.append(args)
        if len(given) > 3:
            raise RuntimeError("CUDA error: out of memory")
        return true_empty(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(offload.torch, "empty", scarce)
        with pytest.raises(MemoryError, match=r"400 bytes .* gave 192; .*optimizer\.distributed=true"):
            memory.release(zeros=[], state=[state], staying=[])
    assert memory.released is None and state.tolist() == list(range(100))


def refused(action) -> str:
    with pytest.raises(ValueError) as caught:
        action()
    return str(caught.value)


def wrong_uses(rank: int, world: int, layout: tuple[str, ...], root: str) -> dict[str, object]:
    folder = pathlib.Path(root)
    with moving(layout) as rig:
        backend = rig.backend
        rig.step(ADVANTAGES, drops=True)
        plan = rig.plan(ADVANTAGES, drops=True)
        before, weights = rig.optimizer_state(), rig.weights()
        kept, model, rate = model_state.numbers(backend), model_state.identity(backend), backend.optimizer.learning_rate
        saved = model_state.save(backend, folder, 7, {"state.json": "{}"}).finish()
        backend.offload()
        said = {"forward_backward": refused(lambda: rig.accumulate(ADVANTAGES, plan)),
                "optim_step": refused(lambda: backend.optim_step(StepKind.REAL)),
                "a ghost": refused(lambda: backend.optim_step(StepKind.GHOST)),
                "zero_grad": refused(backend.zero_grad),
                "gradient": refused(backend.gradient),
                "reset_optimizer": refused(lambda: backend.reset_optimizer(total_steps=4)),
                "save": refused(lambda: model_state.save(backend, folder, 8, {"state.json": "{}"})),
                "load": refused(lambda: model_state.load(backend, saved, kept, model))}
        found: dict[str, object] = {key: "restore()" in message and "bytes" in message for key, message in said.items()}
        found["steps by their name"] = all(said[key].startswith("optim_step()") for key in ("optim_step", "a ghost"))
        backend.keep_reference()
        with backend.reference_weights():
            found["the reference policy"] = equal_by_name(rig.weights(), weights)
        same = kept | {"has_reference": True}
        found["numbers"] = model_state.numbers(backend) == same and backend.optimizer.learning_rate == rate
        backend.restore()
        found["nothing moved"] = equal(rig.optimizer_state(), before) and equal_by_name(rig.weights(), weights)
        rig.accumulate(ADVANTAGES, rig.plan(ADVANTAGES, drops=True))
        said = refused(backend.offload)
        found["an accumulated gradient"] = "accumulated" in said and backend.optimizer._offload.released is None
        backend.zero_grad()
        backend.chunks[0].ddp_config.nccl_ub = True
        found["registered buffers"] = "megatron.ddp.nccl_ub=false" in refused(backend.offload)
        backend.chunks[0].ddp_config.nccl_ub = False
        return found


@pytest.mark.parametrize("layout", quick([(*PLAIN, *BF16), (*SHARDED, *GATHER)], (*SHARDED, *GATHER)),
                         ids=["bf16", "sharded-overlap"])
def test_what_needs_gradients_or_adam_is_refused_while_they_are_away(pool, tmp_path, layout):
    for found in pool.run(2, wrong_uses, layout, str(tmp_path), timeout_s=60):
        assert all(found.values()), found


def resumed(rank: int, world: int, layout: tuple[str, ...], root: str, really: bool) -> list[dict[str, torch.Tensor]]:
    """Return exported weights of a backend that goes on after its save, and of another that loads it and goes on."""
    folder, found = pathlib.Path(root), []
    with moving(layout) as rig:
        rig.step(ADVANTAGES, drops=True)
        with offloaded(rig, really):
            pass
        pending = model_state.save(rig.backend, folder, 1 + really, {"state.json": "{}"})
        kept, model = model_state.numbers(rig.backend), model_state.identity(rig.backend)
        with offloaded(rig, really):  # while the thread writes
            found.append(rig.weights())
        rig.step(ADVANTAGES, drops=True)
        found.append(rig.weights())
        path = pending.finish()
    with moving(layout) as rig:
        model_state.load(rig.backend, path, kept, model)
        with offloaded(rig, really):
            found.append(rig.weights())
        rig.step(ADVANTAGES, drops=True)
        return [*found, rig.weights()]


@pytest.mark.parametrize("name", quick(RESUMED, "bf16", "sharded-bf16-overlap"))
def test_saved_and_loaded_with_offload_between_equals_without(pool, tmp_path, name):
    """The second offload comes while the checkpoint's thread still writes: what it writes are copies."""
    runs = [pool.run(2, resumed, RESUMED[name], str(tmp_path), really, timeout_s=60) for really in (True, False)]
    for found, wanted in zip(*runs, strict=True):
        assert all(equal_by_name(a, b) for a, b in zip(found, wanted, strict=True))
        assert equal_by_name(found[1], found[3]) and equal_by_name(found[0], found[2])
        assert not equal_by_name(found[0], found[1])
