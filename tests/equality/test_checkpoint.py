"""A checkpoint loaded under the same or another topology gives the same bits and the same next steps; adapters too."""

import pathlib
from unittest import mock

import pytest
import torch

from megatron_rl.checkpoint import model_state, tensors
from megatron_rl.checkpoint.convert import plan_export
from megatron_rl.checkpoint.folder import whole_checkpoints
from megatron_rl.checkpoint.torch_dist import TorchDistReader
from megatron_rl.errors import CheckpointError, ConfigError
from megatron_rl.model.hf_config import read_shape
from tests.equality.adapter_rig import ATTENTION
from tests.equality.layouts import BF16, PP2, SHARDED
from tests.equality.rows import row
from tests.equality.saved_steps import PLAIN, open_like, save_and_load, take_steps, tensors_of
from tests.pairwise import quick
from tests.reference import tiny_config

SAME = (
    *("DP2-plain qwen2_tied", "DP2-plain-bf16 qwen2_tied", "DP2-sharded qwen2_tied", "DP2-sharded-bf16 qwen2_tied"),
    *("DP2-sharded-gather qwen2_tied", "TP2-plain llama", "PP2-sharded qwen2_tied", "EP2-sharded qwen3_moe"),
    *("EP2-sharded-bf16 glm4_moe", "EP2-sharded-bf16 gpt_oss", "TP2-sharded-bf16 qwen3_5_text"),
    *("TP2-plain-muon llama", "EP2-sharded-muon qwen3_moe"),
)
LONG = ("DP2-sharded qwen2_tied", "TP2-plain llama", "EP2-sharded qwen3_moe", "EP2-sharded-bf16 gpt_oss", *SAME[-2:])
OTHER = (
    *("TP2-sharded to PP2-sharded phi3", "TP2-sharded to DP2-sharded olmo2", "TP2-sharded to PP2-sharded gemma3_text"),
    *("PP2-VPP2-plain to DP2-sharded qwen2_tied", "PP2-sharded to CP2-sharded llama"),
    *("EP2-sharded to TP2-SP-ETP1-sharded gpt_oss", "PP2-plain to EP2-sharded llama4_interleaved"),
    *("PP2-plain to EP2-sharded glm4_moe", "TP2-SP-sharded to EP2-sharded deepseek_v3"),
    *("TP2-plain-bf16 to DP2-sharded-bf16 llama", "TP2-SP-sharded to EP2-sharded qwen3_next"),
)
# a window or a norm of each head adds no tensor of another shape; the first and the last go to AdamW's own test
LONG_OTHER = (
    *("DP2-sharded to TP2-plain llama", "TP2-sharded to PP2-sharded qwen2_tied", "TP2-sharded to PP2-sharded qwen3"),
    *("DP2-sharded-muon to TP2-plain-muon llama", "EP2-sharded-muon to PP2-plain-muon qwen3_moe"),
    *("PP2-plain to DP2-sharded mistral_window", "TP2-sharded to PP2-sharded olmo3"),
    *("EP2-sharded to TP2-SP-sharded qwen3_moe", "DP2-plain to EP2-sharded mixtral"),
    *("PP2-sharded to TP2-sharded qwen3_5_text", "PP2-sharded to TP2-SP-sharded qwen3_5_moe_text"),
)
LORA = ("lora.rank=3", "lora.alpha=5")
ADAPTED = (
    *("DP2-sharded-bf16 qwen2_tied", "PP2-sharded qwen2_tied", "TP2-SP-ETP1-plain mixtral", "DP2-plain qwen2_tied"),
    *("TP2-SP-sharded qwen3", "TP2-PP2-plain llama", "EP2-sharded glm4_moe", "TP2-linears-sharded qwen3_5_text"),
)
ADAPTED_ELSEWHERE = (*("TP2-sharded to PP2-VPP2-sharded qwen2_tied", "EP2-sharded to TP2-SP-plain glm4_moe"),
                     *("DP2-sharded to TP2-SP-plain qwen3", "PP2-sharded to TP2-sharded llama"),
                     *("TP2-SP-EP2-ETP1-sharded to PP2-sharded qwen3_moe",
                       "TP2-linears-sharded to PP2-linears-sharded qwen3_5_text"))


@pytest.mark.parametrize(
    ("name", "steps"),
    [("DP2-sharded-bf16 qwen2_tied", 0)]
    + [pytest.param(x, 3, marks=[pytest.mark.long] if x in LONG else []) for x in SAME],
)
def test_the_same_topology_goes_on_to_the_bit(pool, tmp_path, name, steps):
    world, family, topology = row(name)
    for found in pool.run(world, save_and_load, str(tmp_path), topology, topology, family, steps, timeout_s=120):
        assert found["numbers"] and found["loaded"] and found["next"] and found["rate"], found
        assert found["export"] == found["reference"] == 0 and (found["moved"] > 1e-4) == (steps > 0), found
    assert whole_checkpoints(tmp_path) == [7]


def test_one_in_a_store_goes_on_to_the_bit(pool, tmp_path):
    """On memory://, which is one process's own; tests/s3 has two ranks and a real server."""
    store = f"memory://{tmp_path.name}"
    (found,) = pool.run(1, save_and_load, store, PLAIN, PLAIN, "qwen2_tied", 3, timeout_s=120)
    assert found["numbers"] and found["loaded"] and found["next"] and found["rate"] and found["reference"] == 0, found


def load_in_small_reads(rank, world, root: str, topology, family: str) -> dict[str, object]:
    with mock.patch.object(tensors, "LOAD_BYTES", 1):
        return save_and_load(rank, world, root, topology, topology, family, 3)


@pytest.mark.parametrize(
    ("world", "topology", "family"),
    [(1, PLAIN, "qwen2_tied"), (1, SHARDED + BF16, "qwen3_moe"), (2, (PP2,), "qwen2_tied")],
)
def test_one_larger_than_a_read_goes_on_to_the_bit(pool, tmp_path, world, topology, family):
    """Layers share keys: a single process must ask for all layers of a key at once, other ranks' layers are theirs."""
    for found in pool.run(world, load_in_small_reads, str(tmp_path), topology, family, timeout_s=120):
        assert found["loaded"] and found["next"] and found["export"] == found["reference"] == 0, found


def both(name: str, *more: str) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Return the settings of either topology of a row, and its model."""
    first, _, rest = name.partition(" to ")
    second, family = rest.split()
    return *((*row(f"{x} {family}")[2], *more) for x in (first, second)), family


@pytest.mark.parametrize("name", quick((*OTHER, *LONG_OTHER), *OTHER[:1], *OTHER[3:]))
def test_another_topology_goes_on_from_the_same_bits(pool, tmp_path, name):
    """The next steps are equal to rounding; half precision rounds at 2⁻⁸."""
    for found in pool.run(2, save_and_load, str(tmp_path), *both(name), 3, timeout_s=120):
        assert found["loaded"] and found["rate"] and found["reference"] == 0 and found["moved"] > 1e-4, found
        assert found["error"] < (5e-3 if "bf16" in name else 1e-5), found


def adam_sums(rank, world, root: str, first, second, family: str) -> None:
    """Save a backend's state, load it under another topology, and save it again."""
    folder = pathlib.Path(root)
    with open_like(first, family) as rig:
        take_steps(rig, 3)
        path = model_state.save(rig.backend, folder, 1, {}).finish()
        kept, model = model_state.numbers(rig.backend), model_state.identity(rig.backend)
    with open_like(second, family) as rig:
        model_state.load(rig.backend, path, kept, model)
        model_state.save(rig.backend, folder, 2, {}).finish()


@pytest.mark.parametrize("name", quick((LONG_OTHER[0], OTHER[3], LONG_OTHER[-1]), LONG_OTHER[0], LONG_OTHER[-1]))
def test_adam_is_the_same_to_the_bit_under_another_topology(pool, tmp_path, name):
    pool.run(2, adam_sums, str(tmp_path), *both(name), timeout_s=120)
    one, two = (tensors_of(tmp_path / f"iter_000000{n}") for n in (1, 2))
    assert set(one) == set(two) and any(key.startswith("optimizer.state.exp_avg_sq.") for key in one)
    for key in one:
        rows = min(len(one[key]), len(two[key]))  # the vocabulary of 99 is padded to a multiple of TP
        assert torch.equal(one[key][:rows], two[key][:rows]) and max(len(one[key]), len(two[key])) - rows <= 1, key


@pytest.mark.parametrize("name", quick(ADAPTED, *ADAPTED[:3]))
def test_adapters_go_on_to_the_bit_in_the_same_topology(pool, tmp_path, name):
    """The frozen weights are in no checkpoint: they come from the model."""
    world, family, topology = row(name)
    topology += LORA
    for found in pool.run(world, save_and_load, str(tmp_path), topology, topology, family, 3, timeout_s=120):
        assert found["loaded"] and found["next"] and found["export"] == found["reference"] == 0, found
        assert found["reference passes"] and found["moved"] > 1e-3, found
    keys = set(tensors_of(tmp_path / "iter_0000007"))
    assert keys and all("_adapter." in key for key in keys)
    assert any(key.startswith("optimizer.state.exp_avg_sq.") for key in keys)
    shape = read_shape(tiny_config(family), layer_spec="torch")
    with pytest.raises(ConfigError, match="holds adapters .*step_<n>/hf"):
        plan_export(TorchDistReader(tmp_path / "iter_0000007"), shape, None)


@pytest.mark.parametrize("name", quick(ADAPTED_ELSEWHERE, *ADAPTED_ELSEWHERE[:2]))
def test_adapters_go_on_from_the_same_bits_in_another_topology(pool, tmp_path, name):
    """The adapters are the same to the bit, their merged product and the next steps to rounding."""
    for found in pool.run(2, save_and_load, str(tmp_path), *both(name, *LORA), 3, timeout_s=120):
        assert found["loaded"] and max(found["export"], found["reference"]) < 1e-6 and found["moved"] > 1e-3, found
        assert found["error"] < 1e-4, found


def refusals(rank: int, world: int, root: str) -> dict[str, str]:
    """Return the words of the refusals of another model, other adapters, and other frozen weights."""
    with open_like(LORA, "llama") as rig:
        path = model_state.save(rig.backend, pathlib.Path(root), 1, {}).finish()
        kept, model = model_state.numbers(rig.backend), model_state.identity(rig.backend)
    said, rank_of_4 = {}, ("lora.rank=4", "lora.alpha=5")
    others = {"rank": (rank_of_4, "llama"), "targets": ((*LORA, ATTENTION), "llama"), "full": ((), "llama")}
    for name, (lora, family) in (others | {"family": (LORA, "qwen2_tied")}).items():
        with open_like(lora, family) as rig, pytest.raises(CheckpointError) as caught:
            model_state.load(rig.backend, path, kept, model)
        said[name] = str(caught.value)
    with open_like(LORA, "llama") as rig, pytest.raises(CheckpointError) as caught:
        with torch.no_grad():
            rig.backend.parameters()[0][0, 0] += 1.0
        model_state.load(rig.backend, path, kept, model)
    return said | {"weights": str(caught.value)}


def test_a_checkpoint_of_another_model_or_other_adapters_is_refused_by_name(pool, tmp_path):
    for said in pool.run(2, refusals, str(tmp_path), timeout_s=90):
        assert "another model" in said["family"] and "family llama there and qwen2 here" in said["family"], said
        assert "tied_embeddings False there and True" in said["family"], said
        assert "lora.rank 3 there and 4 here" in said["rank"] and "give the lora.rank" in said["rank"], said
        assert "'linear_fc1'" in said["targets"] and "lora.targets" in said["targets"], said
        assert "lora.rank 3 there and 0 here" in said["full"] and "null for 0" in said["full"], said
        assert "frozen_weights" in said["weights"] and "model.hf_path and model.dtype" in said["weights"], said
