"""Muon over whole matrices equals a plain loop with a plain Newton–Schulz iteration in every layout.

Rows named muon of test_steps.py, test_checkpoint.py and test_offload.py hold ghosts, gradients that are not finite,
checkpoints and the offload.
"""

import pathlib

import pytest

from megatron_rl.checkpoint import model_state
from megatron_rl.config import load_config
from megatron_rl.errors import CheckpointError, ConfigError
from megatron_rl.validate import models, validate_config
from tests.equality.muon_rig import against_plain, critic_against_plain
from tests.equality.rows import measured, row
from tests.equality.saved_steps import open_like, save_and_load, take_steps, tensors_of
from tests.pairwise import quick

QUICK = ("TP2-sharded qwen2_untied", "DP2-sharded qwen2_tied", "EP2-sharded qwen3_moe", "TP2-SP phi3")
LARGE = (
    *("one qwen2_untied", "PP2 qwen2_tied", "TP2 qwen2_untied", "DP2 qwen2_tied", "CP2-sharded llama"),
    *("TP2-SP deepseek_v3", "TP2-SP-DP2-sharded qwen3_5_text", "PP2-VPP2 qwen2_tied", "TP2-SP-EP2-ETP1 qwen3_moe"),
    *("EP2 qwen3_5_moe_text", "TP2-SP-EP2-ETP1-sharded gpt_oss", "DP2-sharded-gather glm4_moe"),
    *("one qwen3_next", "DP4-sharded qwen2_tied"),
)


@pytest.mark.parametrize("name", quick((*QUICK, *LARGE), *QUICK))
def test_muon_equals_the_plain_loop(pool, name):
    """After four steps, the last a ghost. Newton–Schulz multiplies small singular values and rounding by up to 485."""
    found = measured(pool, name, against_plain)[0]
    assert len(found) == 3 and max(found["norm"], found["weights"]) < 1e-5 and found["movement"] < 2e-4, found


@pytest.mark.parametrize("name", quick(("TP2 qwen2_untied", "DP2-sharded qwen2_untied")))
def test_a_critics_muon_equals_the_plain_loop(pool, name):
    for found in measured(pool, name, critic_against_plain):
        assert found["weights"] < 1e-5 and found["movement"] < 2e-4, found


def test_muon_keeps_one_moment_of_a_matrix(pool, tmp_path):
    """It goes on to the bit too, as rows of test_checkpoint.py do."""
    world, family, layout = row("DP2-sharded-bf16-muon qwen2_tied")
    for found in pool.run(world, save_and_load, str(tmp_path), layout, layout, family, 3, timeout_s=120):
        assert found["numbers"] and found["loaded"] and found["next"] and found["rate"] and found["moved"] > 1e-4, found
    saved = tensors_of(tmp_path / "iter_0000007")
    keys = [key.split(".", 3)[2:] for key in saved if key.startswith("optimizer.state.")]
    by_muon = {name for kind, name in keys if kind == "momentum_buffer"}
    assert by_muon and all(("linear_" in name) and name.endswith("weight") for name in by_muon), by_muon
    assert not by_muon & {name for kind, name in keys if kind.startswith("exp_avg")}


def adam_for_muon(rank: int, world: int, root: str) -> str:
    """Return the words of the refusal of AdamW's checkpoint by a run of Muon."""
    with open_like((), "llama", 2) as rig:
        take_steps(rig, 1)
        path = model_state.save(rig.backend, pathlib.Path(root), 1, {}).finish()
        kept, model = model_state.numbers(rig.backend), model_state.identity(rig.backend)
    with open_like(("optimizer.algorithm=muon",), "llama", 2) as rig, pytest.raises(CheckpointError) as caught:
        model_state.load(rig.backend, path, kept, model)
    return str(caught.value)


def test_a_checkpoint_of_another_algorithm_is_refused_by_name(pool, tmp_path):
    (said,) = pool.run(1, adam_for_muon, str(tmp_path), timeout_s=60)
    assert "optimizer.algorithm=adam, and this run's is muon; set" in said


@pytest.mark.parametrize("beside", ("lora.rank=4", "model.provider=bridge"))
def test_what_is_no_whole_matrix_is_refused_by_name(beside):
    validate_config(load_config(None, [beside]), models.muon)
    with pytest.raises(ConfigError, match=f"optimizer.algorithm=muon .*{beside}"):
        validate_config(load_config(None, [beside, "optimizer.algorithm=muon"]), models.muon)
