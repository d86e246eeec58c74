"""What ``model.provider=bridge`` says where megatron-bridge is missing or another release, and beside other settings.

Its models are tested where it is installed (tests/bridge).
"""

import importlib.metadata
import importlib.util
import types

import pytest
import torch

from megatron_rl.config import load_config
from megatron_rl.errors import ConfigError
from megatron_rl.model.bridge import family as bridge_family
from megatron_rl.model.bridge.build import check_frequencies
from megatron_rl.model.hf_config import read_shape
from megatron_rl.validate import models, validate_config
from megatron_rl.weights.families.family import Family
from megatron_rl.weights.families.register import FAMILIES, Families
from tests.reference import tiny_config


def test_a_missing_package_is_named_with_its_extra() -> None:
    if importlib.util.find_spec("megatron.bridge") is not None:
        pytest.skip("megatron-bridge is installed")
    with pytest.raises(ConfigError, match=r"not installed: pip install 'megatron_rl\[bridge\]'"):
        read_shape(tiny_config("gemma"), layer_spec="torch", provider="bridge")


def test_other_releases_are_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"megatron-bridge": "0.4.2", "megatron-core": "0.16.1"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", installed.__getitem__)
    with pytest.raises(ConfigError, match=r"megatron-bridge 0\.4\.2 and megatron-core 0\.16\.1"):
        bridge_family.check_releases()
    installed |= {"megatron-bridge": "0.6.2", "megatron-core": "0.19.2"}
    bridge_family.check_releases()


@pytest.mark.parametrize(
    "beside", ["lora.rank=4", "rollout.bitwise=true", "advantage.estimator=gae", "teacher.hf_path=another"]
)
def test_what_was_not_shown_beside_it_is_refused(beside: str) -> None:
    given = [beside, "advantage.estimator=distillation"] if beside.startswith("teacher") else [beside]
    validate_config(load_config(None, given), models.provider)
    with pytest.raises(ConfigError, match=f"model.provider=bridge was not tested with {beside.partition('=')[0]}"):
        validate_config(load_config(None, [*given, "model.provider=bridge"]), models.provider)


def test_other_rotary_frequencies_than_transformers_are_refused() -> None:
    own = torch.tensor([1.0, 0.1])
    model = types.SimpleNamespace(rotary_pos_emb=types.SimpleNamespace(inv_freq=own))
    check_frequencies(model, own.clone())
    for others in (own * 1.001, own[:1]):
        with pytest.raises(ConfigError, match="rotary frequencies differ from rope_parameters"):
            check_frequencies(model, others)


@pytest.mark.parametrize("family", ["qwen3_yarn", "olmo3"])
def test_rotary_scalings_that_the_provider_may_leave_out_are_refused(family: str) -> None:
    bridge_family.refuse_other_angles(tiny_config("llama3_rope"))
    with pytest.raises(ConfigError, match="rope_type=.* is not taken; default, linear, llama3 are"):
        bridge_family.refuse_other_angles(tiny_config(family))


def test_a_described_family_is_found_by_name_and_is_none_of_those_built_here() -> None:
    families = Families()
    families.describe(Family(model_type="bridge:qwen3", refuse=lambda _: None))
    assert families["bridge:qwen3"].model_type == "bridge:qwen3" and families["qwen3"] is FAMILIES["qwen3"]
    assert "bridge:qwen3" not in families and list(families) == list(FAMILIES)
    with pytest.raises(KeyError):
        families["bridge:gemma"]
