"""The models that a checkpoint may belong to."""

from __future__ import annotations

import pathlib
from types import SimpleNamespace

import pytest

from megatron_rl.checkpoint.manager import CheckpointManager
from megatron_rl.checkpoint.model_state import identity_of_shape
from megatron_rl.checkpoint.resume import check_identity
from megatron_rl.errors import CheckpointError
from megatron_rl.model.hf_config import read_shape
from tests.reference import tiny_config

FOLDER = pathlib.Path("step_00000001")
LATER = {"num_dense_layers", "dense_ffn_hidden_size", "shared_ffn_hidden_size", "post_norms", "lora_rank", "lora_alpha"}


def of(family: str) -> dict[str, object]:
    return identity_of_shape(read_shape(tiny_config(family), layer_spec="torch")) | {"frozen_weights": None}


@pytest.mark.parametrize("family", ["qwen2_tied", "qwen3_moe"])
def test_a_checkpoint_from_before_a_field_is_this_model_s_where_the_model_lacks_the_thing(family: str) -> None:
    own = of(family)
    assert own.keys() >= LATER
    check_identity(own, FOLDER, {name: value for name, value in own.items() if name not in LATER})


@pytest.mark.parametrize("family, field", [("olmo2", "post_norms"), ("glm4_moe", "num_dense_layers")])
def test_a_checkpoint_without_a_field_is_another_model_s_where_the_model_has_the_thing(family: str, field: str) -> None:
    own = of(family)
    with pytest.raises(CheckpointError, match=f"of another model: {field} (False|0) there and (True|1) here"):
        check_identity(own, FOLDER, {name: value for name, value in own.items() if name != field})


@pytest.mark.parametrize(("saved", "ranks"), [(5, 2), (4, 4), (2, 3), (3, 1)])
def test_every_saved_ranks_rollouts_are_taken_over_by_one_rank(saved: int, ranks: int) -> None:
    taken = []
    for rank in range(ranks):
        place = SimpleNamespace(backend=SimpleNamespace(topology=SimpleNamespace(rank=rank, world_size=ranks)))
        taken += CheckpointManager._own_files(place, FOLDER, {"world_size": saved})
    assert sorted(taken) == [FOLDER / f"rollouts_{rank}.npz" for rank in range(saved)]
