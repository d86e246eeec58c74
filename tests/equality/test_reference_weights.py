"""The reference policy's weights, swapped in or in a second model, are the kept copy while the policy trains on."""

import numpy as np
import pytest

from megatron_rl.backend.reference_weights import DeviceCopy, HostCopy
from megatron_rl.trainer.reference_policy import ReferencePolicy
from tests.equality.rig import equal, equal_by_name, open_rig, ragged_advantages
from tests.equality.rows import assert_all
from tests.pairwise import pairwise, quick

SETTINGS = ("optimizer.lr=0.01", "optimizer.weight_decay=0.1")
ADVANTAGES, RENEWED = ragged_advantages(8), "DP2-bf16-sharded-gather"
SWAPPED = (*("one qwen2_tied", "TP2-SP qwen2_tied", "PP2-VPP2 qwen2_tied"),
           "PP2-DP2-bf16-sharded qwen2_tied",  # float32 masters live in the optimizer alone
           *("TP2-bf16 qwen2_tied", "DP2-sharded-gather qwen2_tied", "PP2-DP2-bf16-sharded-gather qwen2_tied"))
COMING = [("TP2-SP", "host"), ("PP2-VPP2", "device"), ("TP2-bf16", "host"), ("DP2-sharded-gather", "device")]
LAYOUTS = (
    *("TP2-SP qwen3", "DP2-sharded-gather-bf16 llama", "PP2-VPP2 qwen2_untied", "CP2 llama3_rope", "EP2 qwen3_moe"),
    *("PP2-bf16 glm4_moe", "TP2-LoRA-bf16 qwen2_tied"),
)
LONG = (*("TP2-SP-bf16 qwen3", "DP2-sharded-gather llama", "PP2-VPP2-bf16 qwen2_untied", "CP2-bf16 llama3_rope"),
        *("EP2-bf16 qwen3_moe", "PP2 glm4_moe", "TP2-LoRA qwen2_tied", "PP2 qwen2_tied", "PP2-bf16 qwen2_tied"),
        *("TP2-PP2 qwen2_tied", "TP2-PP2-bf16 qwen2_tied", "PP2-LoRA qwen3", "PP2-LoRA-bf16 qwen3"))


def opened(family: str, *given: str):
    return open_rig(family, *SETTINGS, *given, samples=8)


def swap(rank: int, world: int, family: str, settings: tuple[str, ...], placement: str) -> dict[str, bool]:
    layout = (*settings, placement)
    with opened(family, *layout) as rig:
        backend, first = rig.backend, rig.logprobs()
        backend.keep_reference()
        rig.step(ADVANTAGES, drops=True)
        rig.ghost()
        trained, weights, state = rig.logprobs(), rig.weights(), rig.optimizer_state()
        with backend.reference_weights():
            inside, exported = rig.logprobs(), rig.weights()
        start = {name: rig.model.state_dict()[name].to(x.dtype) for name, x in exported.items()}
        found = {"reference's log-probs": np.array_equal(inside, first),
                 "training moved them": not np.array_equal(trained, first),
                 "reference's export": equal_by_name(exported, start),
                 "weights are back": equal_by_name(rig.weights(), weights),
                 "log-probs are back": np.array_equal(rig.logprobs(), trained),
                 "optimizer untouched": equal(rig.optimizer_state(), state)}
        try:
            with backend.reference_weights():
                raise KeyError("planted")
        except KeyError:
            found["weights are back after an error"] = equal_by_name(rig.weights(), weights)
        rig.step(ADVANTAGES, drops=True)
        end = rig.weights()
    # The same run without ever looking at the reference.
    with opened(family, *layout) as rig:
        rig.step(ADVANTAGES, drops=True)
        rig.ghost()
        rig.step(ADVANTAGES, drops=True)
        return found | {"training goes on as if nothing had been": equal_by_name(rig.weights(), end)}


@pytest.mark.parametrize(("name", "placement"),
                         pairwise(SWAPPED, ["host", "device"], kept=[(f"{x} qwen2_tied", y) for x, y in COMING]))
def test_reference_weights_come_and_go_bitwise(pool, name, placement):
    """Copies without arithmetic: there is nothing to tolerate."""
    assert_all(pool, name, swap, f"reference.placement={placement}")


def two_placements(rank: int, world: int, family: str, extra: tuple[str, ...]) -> dict[str, bool]:
    """Compare log-probs under a swapped copy and a second model, kept at the same moment, as the policy trains on."""
    with opened(family, *extra) as rig:
        backend = rig.backend
        rig.step(ADVANTAGES, drops=True)
        copy, second = HostCopy(backend), DeviceCopy(backend)
        copy.keep()
        second.keep()
        rig.step(ADVANTAGES, drops=True)
        read = []
        for each in (copy, second):
            with each.reading():
                read.append(rig.logprobs())
        now = rig.logprobs()
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


@pytest.mark.parametrize("name", quick((*LAYOUTS, *LONG), *LAYOUTS))
def test_the_second_models_logprobs_are_the_swapped_copys_bitwise(pool, name):
    """The same kernels on the same numbers: there is nothing to tolerate."""
    assert_all(pool, name, two_placements)


def refreshed(rank: int, world: int, family: str, extra: tuple[str, ...], placement: str) -> dict[str, bool]:
    """Take three rollouts of one step each, with the reference renewed after the second."""
    given = ("loss.kl_coefficient=0.1", "reference.refresh_every_rollouts=2", f"reference.placement={placement}")
    with opened(family, *extra, *given) as rig:
        settings = rig.backend.config
        reference = ReferencePolicy(settings.loss, settings.reference, rig.backend)
        reference.keep()
        policy, read = [rig.weights()], []
        for index in range(3):
            rig.step(ADVANTAGES, drops=True)
            reference.after_rollout(index, 8)  # before an export would gather the weights
            policy.append(rig.weights())
            with rig.backend.reference_weights():
                read.append(rig.weights())
        logprobs = reference.logprobs(rig.batch, rig.everyone)
        return {
            "the start": equal_by_name(read[0], policy[0]) and not equal_by_name(policy[0], policy[1]),
            "the policy of that moment": equal_by_name(read[1], policy[2]) and not equal_by_name(policy[2], policy[1]),
            "it stays": equal_by_name(read[2], policy[2]) and not equal_by_name(policy[3], policy[2]),
            "log-probs": not np.array_equal(logprobs, rig.logprobs()),
        }


@pytest.mark.parametrize(("layout", "placement"), [(RENEWED, "host"), (RENEWED, "device"), ("TP2", "host")])
def test_refresh_takes_the_policys_weights_of_that_moment_bitwise(pool, layout, placement):
    """Under overlap_param_gather too, where a step ends before its weights are gathered."""
    assert_all(pool, f"{layout} qwen2_tied", refreshed, placement)


def offloaded(rank: int, world: int, family: str, extra: tuple[str, ...]) -> dict[str, bool]:
    found, freed = {}, []
    for placement in ("host", "device"):
        with opened(family, *extra, f"reference.placement={placement}") as rig:
            backend, said = rig.backend, ""
            backend.keep_reference()
            rig.step(ADVANTAGES, drops=True)
            with backend.reference_weights():
                before = rig.logprobs()
            freed.append(backend.offload().total)
            with backend.reference_weights():
                found[f"{placement} reads meanwhile"] = np.array_equal(rig.logprobs(), before)
            backend.restore()
            plan = rig.plan(ADVANTAGES, drops=True)
            with backend.reference_weights():
                try:
                    rig.accumulate(ADVANTAGES, plan)
                except ValueError as error:
                    said = str(error)
            found[f"{placement} refuses to train"] = ("would train the reference" in said) == (placement == "device")
    return found | {"the same bytes": freed[0] == freed[1] > 0}


@pytest.mark.parametrize("layout", ["DP2-sharded-gather", "DP2-bf16"])
def test_offload_leaves_the_second_model_alone_and_nothing_trains_it(pool, layout):
    assert_all(pool, f"{layout} qwen2_tied", offloaded)
