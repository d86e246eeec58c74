"""algorithm/signal.py: the samples that may be dropped, and every setting under which dropping is not exact."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithm.advantage import GroupRewards, advantages, reduction_weights
from megatron_rl.algorithm.policy_loss import policy_term
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
from tests.unit.algorithm.facts import make_facts

SETTINGS = settings(max_examples=80, deadline=None, derandomize=True, database=None)

# A value of each field at which it couples samples.
COUPLED = {
    "moe_router_force_load_balancing": True,
    "moe_input_jitter_eps": 0.01,
    "moe_expert_capacity_factor": 1.25,
    "moe_router_load_balancing_type": "sinkhorn",
    "dsa_indexer_loss_coeff": 0.01,
    "qk_clip": True,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "fp8": "hybrid",
    "fp4": "e2m1",
}
# Values of each field that no mode accepts.
UNCOUNTED = {
    "moe_aux_loss_coeff": (0.01, [0.0, 0.01]),
    "moe_z_loss_coeff": (1e-3,),
    "moe_router_enable_expert_bias": (True,),
    "mtp_num_layers": (1,),
}


def make_config(
    mode: str, *, loss: dict | None = None, skip: dict | None = None, transformer: dict | None = None
) -> Config:
    return Config(
        skip=SkipConfig(mode=mode, **(skip or {})),
        loss=LossConfig(**(loss or {})),
        megatron=MegatronConfig(transformer=transformer or {}),
    )


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
    """Assert every numbered invariant of algorithm/signal.py but the fourth.

    That one is ``test_exact_refuses``, over settings.
    """
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
    rows=st.lists(
        st.tuples(st.sampled_from([0.0, -0.0, 5e-324, -1e-12, 0.1, -0.1, 1.0, -3.0]), st.integers(0, 3)), max_size=12
    ),
    epsilon=st.sampled_from([0.0, 1e-9, 0.1]),
)
def test_invariants(rows: list[tuple[float, int]], epsilon: float) -> None:
    assert_invariants(np.array([r[0] for r in rows]), np.array([r[1] for r in rows], dtype=np.int64), epsilon)


def test_every_coupling_field_is_tested() -> None:
    assert set(COUPLED) == set(COUPLING_FIELDS)
    assert set(UNCOUNTED) == set(UNCOUNTED_FIELDS)


def test_coupling_fields_are_megatrons_and_its_defaults_are_known() -> None:
    """Coupling fields are Megatron's own, and every default that couples is known.

    A renamed field would let a coupled run pass; a default that couples must be one that model/build.py overrides.
    """
    from megatron_rl.distributed import platform  # noqa: F401  (before megatron.core)

    from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

    fields = {f.name: f.default for f in dataclasses.fields(TransformerConfig)}
    assert set(COUPLING_FIELDS) | set(UNCOUNTED_FIELDS) <= set(fields)
    assert not any(fields[name] for name in UNCOUNTED_FIELDS)
    coupled = {name for name, harmless in COUPLING_FIELDS.items() if fields[name] not in harmless}
    assert coupled == {"attention_dropout", "hidden_dropout"}  # 0.1 in Megatron-Core 0.16.1; model/build.py sets 0.0


@pytest.mark.parametrize(("term", "changes"), REFUSED, ids=[term for term, _ in REFUSED])
def test_exact_refuses(term: str, changes: dict) -> None:
    """skip.mode=exact refuses a setting that couples samples, and names it with both ways out.

    These are to take the setting back, or to choose another skip.mode.
    """
    assert coupling_terms(make_config("exact", **changes)) == (term,)
    with pytest.raises(ConfigError) as caught:
        signal_rule(make_config("exact", **changes))
    message = str(caught.value)
    key = term.split("=")[0]
    assert f" and {term} makes that untrue" in message
    assert f"either set {key}" in message or f"either set another {key}" in message
    assert "skip.mode=approximate" in message and "skip.mode=off" in message


@pytest.mark.parametrize(("term", "changes"), REFUSED, ids=[term for term, _ in REFUSED])
def test_approximate_says_what_it_approximates_and_off_drops_nothing(term: str, changes: dict) -> None:
    approximate = signal_rule(make_config("approximate", **changes))
    assert approximate.drops and approximate.approximated == (term,)
    off = signal_rule(make_config("off", **changes))
    assert not off.drops and not off.drops_logprob_passes and off.approximated == ()


def test_a_refusal_names_every_setting_at_once() -> None:
    """A refusal names every setting at once, since mending one after the other would cost a start each."""
    with pytest.raises(ConfigError) as caught:
        signal_rule(make_config("exact", loss={"kl_coefficient": 0.1, "policy": "dro", "denominator": "kept"}))
    for word in ("loss.kl_coefficient to its neutral value", "another loss.policy", "loss.denominator=original"):
        assert word in str(caught.value)


@pytest.mark.parametrize("name", sorted(COUPLING_FIELDS))
def test_exact_allows_neutral_values(name: str) -> None:
    for value in COUPLING_FIELDS[name]:
        assert signal_rule(make_config("exact", transformer={name: value})).drops


@pytest.mark.parametrize("mode", ["exact", "approximate", "off"])
@pytest.mark.parametrize(("name", "value"), [(name, value) for name in UNCOUNTED for value in UNCOUNTED[name]])
def test_uncounted_losses_are_refused_in_every_mode(name: str, value: object, mode: str) -> None:
    """The run and the library both refuse uncounted losses, in every mode.

    The message names key, value, reason and way out, and for exact that it could not hold.
    """
    config = make_config(mode, transformer={name: value})
    for refuse in (signal_rule, refuse_uncounted_losses):
        with pytest.raises(ConfigError) as caught:
            refuse(config)
        message = str(caught.value)
        assert f"megatron.transformer.{name}={value} is refused in every skip.mode" in message
        assert UNCOUNTED_FIELDS[name] in message and "remove it" in message
        assert ("dropping samples would change it too" in message) == (mode == "exact")


@pytest.mark.parametrize("name", sorted(UNCOUNTED))
def test_neutral_values_of_uncounted_losses_are_accepted(name: str) -> None:
    for value in (None, 0, 0.0, False, [0.0, 0.0]):
        assert signal_rule(make_config("exact", transformer={name: value})).drops


def test_the_library_refuses_uncounted_losses_too() -> None:
    """The library refuses uncounted losses before anything is joined or built.

    A user of MegatronBackend alone passes no ``signal_rule``.
    """
    from megatron_rl.backend import MegatronBackend

    with pytest.raises(ConfigError, match="moe_aux_loss_coeff=0.01 is refused in every skip.mode"):
        MegatronBackend(make_config("off", transformer={"moe_aux_loss_coeff": 0.01}))


def test_exact_is_the_default_and_drops() -> None:
    rule = signal_rule(Config())
    assert rule.drops and rule.drops_logprob_passes and rule.advantage_epsilon == 0.0 and rule.approximated == ()
    assert not signal_rule(make_config("exact", skip={"logprob_passes": False})).drops_logprob_passes


def test_first_loss_is_zero_and_signal_is_not() -> None:
    """The first loss is zero and its gradient is not (TRL #2869).

    On-policy, over whole groups under sequence_mean, Σ A = 0 makes the loss 0.
    """
    rewards, groups = np.array([1.0, 0.0, 0.0, 0.0, 1.0, 1.0]), np.array([0, 0, 0, 0, 1, 1])
    tokens = np.array([3, 5, 2, 8, 4, 4])
    values = advantages(GroupRewards(totals=rewards, groups=groups, included=np.ones(6, dtype=bool)), estimator="grpo")
    weights = reduction_weights("sequence_mean", make_facts(groups, tokens), np.arange(6), max_response_tokens=8)
    owner = np.repeat(np.arange(6), tokens)
    logprobs = torch.linspace(-3, -1, len(owner), dtype=torch.float64).requires_grad_()
    folded, plain = torch.from_numpy((weights * values)[owner]), torch.from_numpy(weights[owner])
    term = policy_term(logprobs, logprobs.detach(), folded, plain, torch.from_numpy(owner), 6, LossConfig())
    loss = term.loss.sum()
    loss.backward()
    assert abs(loss.item()) < 1e-14  # 26 additions of numbers below 1, in double
    assert (logprobs.grad[owner < 4].abs() > 1e-3).all()
    assert has_signal(values, tokens).tolist() == [True] * 4 + [False] * 2
