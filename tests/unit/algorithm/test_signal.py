"""algorithm/signal.py: the samples that may be dropped, and every setting under which dropping is not exact."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithm.signal import (
    COUPLING_FIELDS,
    UNCOUNTED_FIELDS,
    coupling_terms,
    has_signal,
    refuse_uncounted_losses,
    signal_rule,
)
from megatron_rl.config import Config, LossConfig, MegatronConfig, SkipConfig
from megatron_rl.errors import ConfigError, NonFiniteAdvantage

SETTINGS = settings(max_examples=50, deadline=None, derandomize=True, database=None)

# A value of each field at which it couples samples.
COUPLED = {"moe_router_force_load_balancing": True, "moe_input_jitter_eps": 0.01, "moe_expert_capacity_factor": 1.25,
           "moe_router_load_balancing_type": "sinkhorn", "dsa_indexer_loss_coeff": 0.01, "qk_clip": True,
           "attention_dropout": 0.1, "hidden_dropout": 0.1, "fp8": "hybrid", "fp4": "e2m1"}
# Values of each field that no mode accepts.
UNCOUNTED = {"moe_aux_loss_coeff": (0.01, [0.0, 0.01]), "moe_z_loss_coeff": (1e-3,),
             "moe_router_enable_expert_bias": (True,), "mtp_num_layers": (1,)}


def make_config(mode: str, *, loss: dict | None = None, skip: dict | None = None, **megatron: dict) -> Config:
    skip, loss = SkipConfig(mode=mode, **(skip or {})), LossConfig(**(loss or {}))
    return Config(skip=skip, loss=loss, megatron=MegatronConfig(**megatron))


REFUSED = [
    ("loss.kl_coefficient=0.001", {"loss": {"kl_coefficient": 0.001}}),
    ("loss.entropy_coefficient=0.01", {"loss": {"entropy_coefficient": 0.01}}),
    ("loss.entropy_coefficient=-0.01", {"loss": {"entropy_coefficient": -0.01}}),
    ("loss.policy=dro", {"loss": {"policy": "dro"}}),
    ("loss.denominator=kept", {"loss": {"denominator": "kept"}}),
    ("skip.advantage_epsilon=0.1", {"skip": {"advantage_epsilon": 0.1}}),
    *[(f"megatron.transformer.{name}={value}", {"transformer": {name: value}}) for name, value in COUPLED.items()],
]


def assert_invariants(values: np.ndarray, tokens: np.ndarray, epsilon: float) -> None:
    """Assert every numbered invariant of algorithm/signal.py but the fourth, ``test_exact_refuses``, over settings."""
    found = has_signal(values, tokens, advantage_epsilon=epsilon)
    # 1: it depends on these alone
    assert np.array_equal(found, has_signal(values.copy(), tokens.copy(), advantage_epsilon=epsilon))
    # 1: it does not depend on a sign, and so on no sum
    assert np.array_equal(found, has_signal(-values, tokens, advantage_epsilon=epsilon))
    assert not found[tokens == 0].any()  # 2
    for value, count, signal in zip(values.tolist(), tokens.tolist(), found.tolist(), strict=True):  # 3
        assert signal == (count > 0 and (value > epsilon or value < -epsilon))
    for weight in (0.0, 0.25, 1.0, 2.0):
        weighed = has_signal(values * weight, tokens, advantage_epsilon=epsilon)
        assert np.array_equal(weighed, has_signal(values * weight, tokens, advantage_epsilon=epsilon))  # 3
        assert not weighed.any() if weight == 0 else weight != 1 or np.array_equal(weighed, found)  # 5
    for i, bad in enumerate([np.nan, np.inf, -1e39][: len(values)]):  # 6
        with pytest.raises(NonFiniteAdvantage, match=f"sample index {i} is "):
            has_signal(np.where(np.arange(len(values)) == i, bad, values), tokens)


@SETTINGS
@given(
    rows=st.lists(st.tuples(st.sampled_from([0.0, -0.0, 5e-324, -1e-12, 0.1, -0.1, 1.0, -3.0]), st.integers(0, 3)),
                  max_size=12),
    epsilon=st.sampled_from([0.0, 1e-9, 0.1]),
)
def test_invariants(rows: list[tuple[float, int]], epsilon: float) -> None:
    assert_invariants(np.array([r[0] for r in rows]), np.array([r[1] for r in rows], dtype=np.int64), epsilon)


def test_coupling_fields_are_megatrons_tested_and_neutral_under_exact_the_default() -> None:
    """A renamed field would let a coupled run pass; model/build.py overrides each default that couples."""
    from megatron_rl.distributed import platform  # noqa: F401  (before megatron.core)

    from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

    fields = {f.name: f.default for f in dataclasses.fields(TransformerConfig)}
    assert set(COUPLING_FIELDS) | set(UNCOUNTED_FIELDS) <= set(fields)
    assert not any(fields[name] for name in UNCOUNTED_FIELDS)
    coupled = {name for name, harmless in COUPLING_FIELDS.items() if fields[name] not in harmless}
    assert coupled == {"attention_dropout", "hidden_dropout"}  # 0.1 in Megatron-Core 0.16.1; model/build.py sets 0.0
    assert set(COUPLED) == set(COUPLING_FIELDS) and set(UNCOUNTED) == set(UNCOUNTED_FIELDS)
    neutral = COUPLING_FIELDS | dict.fromkeys(UNCOUNTED, (None, 0, 0.0, False, [0.0, 0.0]))
    for name, value in [(name, value) for name, values in neutral.items() for value in values]:
        assert signal_rule(make_config("exact", transformer={name: value})).drops, (name, value)
    rule = signal_rule(Config())
    assert rule.drops and rule.drops_logprob_passes and rule.advantage_epsilon == 0.0 and rule.approximated == ()
    assert not signal_rule(make_config("exact", skip={"logprob_passes": False})).drops_logprob_passes


@pytest.mark.parametrize(("term", "changes"), REFUSED, ids=[term for term, _ in REFUSED])
def test_exact_refuses(term: str, changes: dict) -> None:
    """It names the setting and both ways out: ``approximate`` says what it approximates, and ``off`` drops nothing."""
    assert coupling_terms(make_config("exact", **changes)) == (term,)
    with pytest.raises(ConfigError) as caught:
        signal_rule(make_config("exact", **changes))
    message = str(caught.value)
    key = term.split("=")[0]
    assert f" and {term} makes that untrue" in message
    assert f"either set {key}" in message or f"either set another {key}" in message
    assert "skip.mode=approximate" in message and "skip.mode=off" in message
    approximate, off = (signal_rule(make_config(mode, **changes)) for mode in ("approximate", "off"))
    assert approximate.drops and approximate.approximated == (term,)
    assert not off.drops and not off.drops_logprob_passes and off.approximated == ()


def test_a_refusal_names_every_setting_at_once_and_the_library_refuses_uncounted_losses_too() -> None:
    """Mending one after the other would cost a start each."""
    with pytest.raises(ConfigError) as caught:
        signal_rule(make_config("exact", loss={"kl_coefficient": 0.1, "policy": "dro", "denominator": "kept"}))
    for word in ("loss.kl_coefficient to its neutral value", "another loss.policy", "loss.denominator=original"):
        assert word in str(caught.value)
    # before anything is joined or built: a user of MegatronBackend alone passes no ``signal_rule``
    from megatron_rl.backend import MegatronBackend

    with pytest.raises(ConfigError, match="moe_aux_loss_coeff=0.01 is refused in every skip.mode"):
        MegatronBackend(make_config("off", transformer={"moe_aux_loss_coeff": 0.01}))


@pytest.mark.parametrize("mode", ["exact", "approximate", "off"])
@pytest.mark.parametrize(("name", "value"), [(name, value) for name in UNCOUNTED for value in UNCOUNTED[name]])
def test_uncounted_losses_are_refused_in_every_mode(name: str, value: object, mode: str) -> None:
    """By the run and by the library: key, value, reason and way out, and for exact that it could not hold."""
    config = make_config(mode, transformer={name: value})
    for refuse, sections in (signal_rule, (config,)), (refuse_uncounted_losses, (config.megatron, config.skip)):
        with pytest.raises(ConfigError) as caught:
            refuse(*sections)
        message = str(caught.value)
        assert f"megatron.transformer.{name}={value} is refused in every skip.mode" in message
        assert UNCOUNTED_FIELDS[name] in message and "remove it" in message
        assert ("dropping samples would change it too" in message) == (mode == "exact")
