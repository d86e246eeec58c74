"""The reference policy's weights, swapped in or in a second model, are the kept copy while the policy trains on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rl.backend.reference_weights import DeviceCopy, HostCopy
from megatron_rl.trainer.reference_policy import ReferencePolicy
from tests.equality.rig import equal, equal_by_name, open_rig, ragged_advantages, sizes
from tests.pairwise import pairwise

SETTINGS = ("optimizer.lr=0.01", "optimizer.weight_decay=0.1")
OVERLAP = (
    "megatron.ddp.overlap_grad_reduce=true",
    "megatron.ddp.overlap_param_gather=true",
    "megatron.ddp.bucket_size=1000",
)


def swap(rank: int, world: int, tensor: int, pipeline: int, extra: tuple[str, ...]) -> dict[str, bool]:
    advantages, everyone = ragged_advantages(8), np.ones(8, dtype=bool)
    with open_rig("qwen2_tied", *sizes(tensor, pipeline), *SETTINGS, *extra, samples=8) as rig:
        backend = rig.backend
        first = backend.logprobs(rig.batch, everyone).flat
        backend.keep_reference()
        rig.step(advantages, drops=True)
        rig.ghost()
        trained = backend.logprobs(rig.batch, everyone).flat
        weights, state = rig.weights(), rig.optimizer_state()
        with backend.reference_weights():
            inside = backend.logprobs(rig.batch, everyone).flat
            exported = rig.weights()
        found = {
            "reference's log-probs": np.array_equal(inside, first),
            "training moved them": not np.array_equal(trained, first),
            "reference's export": all(
                torch.equal(x, rig.model.state_dict()[k].to(x.dtype)) for k, x in exported.items()
            ),
            "weights are back": equal_by_name(rig.weights(), weights),
            "log-probs are back": np.array_equal(backend.logprobs(rig.batch, everyone).flat, trained),
            "optimizer untouched": equal(rig.optimizer_state(), state),
        }
        try:
            with backend.reference_weights():
                raise KeyError("planted")
        except KeyError:
            found["weights are back after an error"] = equal_by_name(rig.weights(), weights)
        rig.step(advantages, drops=True)
        end = rig.weights()
    # The same run without ever looking at the reference.
    with open_rig("qwen2_tied", *sizes(tensor, pipeline), *SETTINGS, *extra, samples=8) as rig:
        rig.step(advantages, drops=True)
        rig.ghost()
        rig.step(advantages, drops=True)
        return found | {"training goes on as if nothing had been": equal_by_name(rig.weights(), end)}


SWAPPED = (
    (1, 1, 1, ()),
    (2, 1, 1, ("parallel.sequence_parallel=true",)),
    (1, 2, 1, ("parallel.virtual_pipeline=2",)),
    (1, 2, 2, ("model.dtype=bfloat16", "optimizer.distributed=true")),  # float32 masters live in the optimizer alone
    (2, 1, 1, ("model.dtype=bfloat16",)),
    (1, 1, 2, ("optimizer.distributed=true", *OVERLAP)),
    (1, 2, 2, ("model.dtype=bfloat16", "optimizer.distributed=true", *OVERLAP)),
)


@pytest.mark.parametrize(("layout", "placement"), pairwise(range(len(SWAPPED)), ["host", "device"], strength=1))
def test_reference_weights_come_and_go_bitwise(pool, layout, placement):
    """Copies without arithmetic: there is nothing to tolerate."""
    tensor, pipeline, data, extra = SWAPPED[layout]
    extra = (*extra, f"reference.placement={placement}")
    for found in pool.run(tensor * pipeline * data, swap, tensor, pipeline, extra, timeout_s=60):
        assert all(found.values()), found


def two_placements(rank: int, world: int, family: str, extra: tuple[str, ...]) -> dict[str, bool]:
    """Compare log-probs under a swapped copy and a second model, kept at the same moment, as the policy trains on."""
    advantages, everyone = ragged_advantages(8), np.ones(8, dtype=bool)
    with open_rig(family, *SETTINGS, *extra, samples=8) as rig:
        backend = rig.backend
        rig.step(advantages, drops=True)
        copy, second = HostCopy(backend), DeviceCopy(backend)
        copy.keep()
        second.keep()
        rig.step(advantages, drops=True)
        read = []
        for each in (copy, second):
            with each.reading():
                read.append(backend.logprobs(rig.batch, everyone).flat)
        now = backend.logprobs(rig.batch, everyone).flat
        in_optimizer = {id(p) for group in backend.optimizer.megatron.param_groups for p in group["params"]}
        return {
            "the same": np.array_equal(*read),
            "not the policy's": not np.array_equal(now, read[0]),
            "weights": equal(second.tensors, copy.tensors),
            "dtype": {x.dtype for x in second.tensors} == {p.dtype for p in backend.parameters()},
            "as many": len(second.tensors) == sum(p.requires_grad for p in backend.parameters()) > 0,
            "no gradient": not any(x.grad is not None for x in second.tensors)
            and not any(c.buffers or c.grad_accs for c in second.chunks),
            "not in the optimizer": not in_optimizer & {id(x) for x in second.tensors},
            "its own memory": not {x.data_ptr() for x in second.tensors} & {p.data_ptr() for p in backend.parameters()},
        }


LAYOUTS = {
    "TP2-SP": (2, "qwen3", (*sizes(2, 1), "parallel.sequence_parallel=true")),
    "PP2-tied": (2, "qwen2_tied", sizes(1, 2)),
    "DP2-sharded-overlap": (2, "llama", ("optimizer.distributed=true", *OVERLAP)),
    "PP2-VPP2": (2, "qwen2_untied", (*sizes(1, 2), "parallel.virtual_pipeline=2")),
    "CP2": (2, "llama3_rope", ("parallel.context=2",)),
    "EP2": (2, "qwen3_moe", ("parallel.expert=2",)),
    "PP2-router-bias": (2, "glm4_moe", sizes(1, 2)),
    "TP2-PP2": (4, "qwen2_tied", sizes(2, 2)),
    "TP2-adapters": (2, "qwen2_tied", (*sizes(2, 1), "lora.rank=4")),
    "PP2-adapters": (2, "qwen3", (*sizes(1, 2), "lora.rank=4")),
}


@pytest.mark.parametrize(("layout", "dtype"), pairwise(LAYOUTS, ["float32", "bfloat16"], strength=1))
def test_the_second_models_logprobs_are_the_swapped_copys_bitwise(pool, layout, dtype):
    """The same kernels on the same numbers: there is nothing to tolerate."""
    world, family, extra = LAYOUTS[layout]
    for found in pool.run(world, two_placements, family, (*extra, f"model.dtype={dtype}"), timeout_s=60):
        assert all(found.values()), found


def refreshed(rank: int, world: int, placement: str, extra: tuple[str, ...]) -> dict[str, bool]:
    """Take three rollouts of one step each, with the reference renewed after the second."""
    advantages, everyone = ragged_advantages(8), np.ones(8, dtype=bool)
    given = ("loss.kl_coefficient=0.1", "reference.refresh_every_rollouts=2", f"reference.placement={placement}")
    with open_rig("qwen2_tied", *SETTINGS, *extra, *given, samples=8) as rig:
        reference = ReferencePolicy(rig.backend.config, rig.backend)
        reference.keep()
        policy, read = [rig.weights()], []
        for index in range(3):
            rig.step(advantages, drops=True)
            reference.after_rollout(index, 8)  # before an export would gather the weights
            policy.append(rig.weights())
            with rig.backend.reference_weights():
                read.append(rig.weights())
        return {
            "the start": equal_by_name(read[0], policy[0]) and not equal_by_name(policy[0], policy[1]),
            "the policy of that moment": equal_by_name(read[1], policy[2]) and not equal_by_name(policy[2], policy[1]),
            "it stays": equal_by_name(read[2], policy[2]) and not equal_by_name(policy[3], policy[2]),
            "log-probs": not np.array_equal(
                reference.logprobs(rig.batch, everyone), rig.backend.logprobs(rig.batch, everyone).flat
            ),
        }


@pytest.mark.parametrize("placement", ["host", "device"])
@pytest.mark.parametrize(
    "extra", [("model.dtype=bfloat16", "optimizer.distributed=true", *OVERLAP), sizes(2, 1)], ids=["DP2", "TP2"]
)
def test_refresh_takes_the_policys_weights_of_that_moment_bitwise(pool, extra, placement):
    """Under overlap_param_gather too, where a step ends before its weights are gathered."""
    for found in pool.run(2, refreshed, placement, extra, timeout_s=60):
        assert all(found.values()), found


def offloaded(rank: int, world: int, extra: tuple[str, ...]) -> dict[str, object]:
    advantages, everyone = ragged_advantages(8), np.ones(8, dtype=bool)
    found: dict[str, object] = {}
    for placement in ("host", "device"):
        with open_rig("qwen2_tied", *SETTINGS, *extra, f"reference.placement={placement}", samples=8) as rig:
            backend = rig.backend
            backend.keep_reference()
            rig.step(advantages, drops=True)
            with backend.reference_weights():
                before = backend.logprobs(rig.batch, everyone).flat
            freed = backend.offload()
            with backend.reference_weights():
                found[f"{placement} reads meanwhile"] = np.array_equal(
                    backend.logprobs(rig.batch, everyone).flat, before
                )
            backend.restore()
            found[placement] = freed.total
            plan = rig.plan(advantages, drops=True)
            with backend.reference_weights():
                try:
                    rig.accumulate(advantages, plan)
                    found[f"{placement} refuses to train"] = placement == "host"
                except ValueError as error:
                    found[f"{placement} refuses to train"] = (
                        placement == "device" and "would train the reference" in str(error)
                    )
    return {k: v for k, v in found.items() if k not in ("host", "device")} | {
        "the same bytes": found["host"] == found["device"] > 0
    }


@pytest.mark.parametrize(
    "extra", [("optimizer.distributed=true", *OVERLAP), ("model.dtype=bfloat16",)], ids=["sharded-overlap", "bf16"]
)
def test_offload_leaves_the_second_model_alone_and_nothing_trains_it(pool, extra):
    for found in pool.run(2, offloaded, extra, timeout_s=60):
        assert all(found.values()), found
