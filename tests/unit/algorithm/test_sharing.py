"""Checks algorithm/sharing.py: prompts run once only where every number stays that of the sample alone."""

import pytest

from megatron_rl.algorithm.sharing import shares_prompts, sharing_refusal, token_coupling
from megatron_rl.config import Config, PlanConfig, load_config
from megatron_rl.errors import ConfigError

CAPACITY = ("skip.mode=approximate", "megatron.transformer.moe_expert_capacity_factor=1.5")
ENGINE = "transformer_engine"


def config_of(*overrides: str) -> Config:
    return load_config(None, list(overrides))


@pytest.mark.parametrize(("layer_spec", "overrides", "named"), [
    ("torch", (), None),
    ("torch", ("parallel.context=2",), None),
    ("torch", CAPACITY, "moe_expert_capacity_factor=1.5 makes a token's numbers depend on the others"),
    (ENGINE, (), None),
    (ENGINE, ("megatron.transformer.apply_rope_fusion=false",), None),
    (ENGINE, ("megatron.transformer.apply_rope_fusion=true",), "apply_rope_fusion=true: its kernel"),
    (ENGINE, ("parallel.context=2",), "parallel.context=2: Transformer Engine splits whole sequences"),
])
def test_each_refusal_names_its_setting(layer_spec: str, overrides: tuple[str, ...], named: str | None) -> None:
    """null shares where nothing refuses, true says why it cannot, false is the reference."""
    config = config_of(*overrides)
    refusal = sharing_refusal(config.parallel, config.megatron, layer_spec)
    assert refusal is None if named is None else named in refusal
    rest = config.parallel, config.megatron, layer_spec
    assert shares_prompts(PlanConfig(share_prompts=None), *rest) is (named is None)
    assert shares_prompts(PlanConfig(share_prompts=False), *rest) is False
    if named is None:
        assert shares_prompts(PlanConfig(share_prompts=True), *rest) is True
    else:
        with pytest.raises(ConfigError, match="plan.share_prompts=true"):
            shares_prompts(PlanConfig(share_prompts=True), *rest)


def test_the_setting_that_couples_tokens_is_named() -> None:
    assert token_coupling(config_of().megatron) is None
    assert token_coupling(config_of(*CAPACITY).megatron) == "megatron.transformer.moe_expert_capacity_factor=1.5"
