"""Exports of an earlier run do not stand beside a new one's; a checkpoint of another model is refused."""

import pathlib
from types import SimpleNamespace

import pytest

from megatron_rl.checkpoint.exports import exported_steps, exports_root_of, set_exports_aside, start_anew
from megatron_rl.checkpoint.loader import CheckpointLoader
from megatron_rl.checkpoint.resume import check_identity, identity_of_shape
from megatron_rl.errors import CheckpointError, ConfigError
from megatron_rl.model.hf_config import read_shape
from megatron_rl.storage.location import location
from megatron_rl.weights.side_files import copy_side_files
from tests.reference import tiny_config


def write(root: pathlib.Path, *names: str) -> None:
    for name in names:
        (root / name / "hf").mkdir(parents=True)


def test_exports_of_later_steps_are_set_aside(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "step_8", "step_16", "step_24", "stale_step_24", "iter_0000030", "step_x")
    (tmp_path / "step_24" / "hf" / "new").touch()
    assert exported_steps(tmp_path) == [8, 16, 24]
    set_exports_aside(tmp_path, 8)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["iter_0000030", "stale_step_16", "stale_step_24", "step_8", "step_x"]
    assert (tmp_path / "stale_step_24" / "hf" / "new").exists()


def test_exports_of_later_steps_in_a_store_stay_and_are_named(tmp_path: pathlib.Path, caplog) -> None:
    root = location(f"memory://{tmp_path.name}")
    for name in ("step_8/hf/config.json", "step_16/hf/config.json", "iter_0000002/state.json", "lock.json"):
        (root / name).write_text("{}")
    before = root.files()
    assert exports_root_of(root, tmp_path) == root
    assert exports_root_of(tmp_path / "elsewhere", tmp_path) == tmp_path / "checkpoints"
    assert exported_steps(root) == [8, 16] and exported_steps(root / "none") == []
    set_exports_aside(root, 8)
    assert root.files() == before
    (said,) = caplog.messages
    assert f"{root}/step_16 is from after the checkpoint at step 8: it stays until this run exports that step" in said


def test_a_new_run_sets_the_whole_folder_aside_but_not_its_own_model(tmp_path: pathlib.Path) -> None:
    root = tmp_path / "checkpoints"
    write(root, "step_8")
    for is_main in (True, False):
        with pytest.raises(ConfigError, match="step_8/hf is an export of an earlier run in .*give it another run.dir"):
            start_anew((root,), str(root / "step_8" / "hf"), is_main=is_main)
    start_anew((root,), "/models/other", is_main=False)
    assert exported_steps(root) == [8]
    start_anew((root,), "/models/other", is_main=True)
    assert exported_steps(root) == [] and exported_steps(tmp_path / "checkpoints.1") == [8]


def test_another_tokenizers_files_take_the_place_of_the_models(tmp_path: pathlib.Path) -> None:
    for folder, names in {
        "model": ["config.json", "generation_config.json", "tokenizer.json", "vocab.json", "chat_template.jinja"],
        "tokenizer": ["config.json", "tokenizer.json", "tokenizer_config.json", "spiece.model", "README.md"],
        "copy": [],
    }.items():
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text(folder)
    copied = copy_side_files(tmp_path / "model", tmp_path / "copy", tokenizer=tmp_path / "tokenizer")
    found = {path.name: path.read_text() for path in (tmp_path / "copy").iterdir()}
    assert sorted(copied) == sorted(found)
    of_tokenizer = dict.fromkeys(("tokenizer.json", "tokenizer_config.json", "spiece.model"), "tokenizer")
    assert found == {"config.json": "model", "generation_config.json": "model", **of_tokenizer}


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
        taken += CheckpointLoader._own_files(place, FOLDER, {"world_size": saved})
    assert sorted(taken) == [FOLDER / f"rollouts_{rank}.npz" for rank in range(saved)]
