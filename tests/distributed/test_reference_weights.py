"""The reference policy: inside ``reference_weights`` the model is the one that was kept, after it the one that was trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.distributed.pool import Pool
from tests.distributed.rig import equal, equal_by_name, open_rig, ragged_advantages, sizes

SETTINGS = ("optimizer.lr=0.01", "optimizer.weight_decay=0.1")
OVERLAP = ("megatron.ddp.overlap_grad_reduce=true", "megatron.ddp.overlap_param_gather=true", "megatron.ddp.bucket_size=1000")


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
            "reference's export": all(torch.equal(x, rig.model.state_dict()[k].to(x.dtype)) for k, x in exported.items()),
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


@pytest.mark.parametrize("placement", ["host", "device"])
@pytest.mark.parametrize(
    ("tensor", "pipeline", "data", "extra"),
    [
        (1, 1, 1, ()),
        (2, 1, 1, ("parallel.sequence_parallel=true",)),
        (1, 2, 1, ("parallel.virtual_pipeline=2",)),
        (1, 2, 2, ("model.dtype=bfloat16", "optimizer.distributed=true")),  # float32 masters live in the optimizer alone
        (2, 1, 1, ("model.dtype=bfloat16",)),
        (1, 1, 2, ("optimizer.distributed=true", *OVERLAP)),
        (1, 2, 2, ("model.dtype=bfloat16", "optimizer.distributed=true", *OVERLAP)),
    ],
)
def test_reference_weights_come_and_go_bitwise(
    pool: Pool, tensor: int, pipeline: int, data: int, extra: tuple[str, ...], placement: str
) -> None:
    """Copies, no arithmetic: nothing to tolerate. The first log-probs are the policy's own, so both placements have the same ones."""
    extra = (*extra, f"reference.placement={placement}")
    for found in pool.run(tensor * pipeline * data, swap, tensor, pipeline, extra, timeout_s=60):
        assert all(found.values()), found
