"""The samples that have signal, and the settings under which dropping the others is exact (docs/semantics.md §2).

A sample has signal, and so may have a gradient, if one of its loss tokens has a non-zero advantage
(times its importance weight, if there is one).

Invariants (``assert_invariants`` in tests/unit/algorithm/test_signal.py):

1. Signal is decided on advantages and masks alone, never on a loss value.
2. A sample without loss token has no signal, whatever its advantage.
3. A sample with a loss token has signal if its largest |importance weight · advantage| is above
   ``skip.advantage_epsilon``.
4. ``skip.mode=exact`` is refused if another loss term could give a dropped sample a gradient.
5. A sample whose importance weights are all 0 has no signal, whatever its advantage; weights of 1
   change nothing.
6. An advantage that is not finite is an error, whether its sample has a loss token or not.

Some losses of Megatron-Core are not sums over tokens. Their size depends on how samples are divided
into micro-batches, even if none is dropped. ``refuse_uncounted_losses`` refuses them in every mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.algorithm.finite import require_epsilon, require_finite
from megatron_rl.config import Config, LossConfig, MegatronConfig, SkipConfig
from megatron_rl.errors import ConfigError
from megatron_rl.users_code import is_own

# Fields of Megatron-Core's TransformerConfig that couple samples or read every token (semantics
# §2), each with its harmless values. Under another value, dropping a sample changes the computation
# of other samples.
COUPLING_FIELDS: dict[str, tuple[object, ...]] = {
    "moe_router_force_load_balancing": (False, None),  # random routing, drawn batch by batch
    "moe_expert_capacity_factor": (None,),
    "moe_input_jitter_eps": (None, 0, 0.0),
    # sinkhorn balances over the batch
    "moe_router_load_balancing_type": ("none", "aux_loss", "seq_aux_loss", "global_aux_loss"),
    "dsa_indexer_loss_coeff": (None, 0, 0.0),
    "qk_clip": (False, None),
    "attention_dropout": (0, 0.0),
    "hidden_dropout": (0, 0.0),
    "fp8": (None, False),
    "fp4": (None, False),
}

# Reasons for fields whose names do not say them.
COUPLED_BY = {
    "fp8": "an FP8 scale is a maximum over all tokens, so without the dropped tokens the others round differently"
}

# Fields that no skip.mode accepts, each with the reason; the values 0, false and null are accepted.
# Read in Megatron-Core 0.16.1 and 0.19.2: transformer/moe/router.py (under calculate_per_token_loss
# the router multiplies its losses by the tokens of the micro-batch) and
# transformer/multi_token_prediction.py.
UNCOUNTED_FIELDS: dict[str, str] = {
    "moe_aux_loss_coeff": "the load-balancing loss is a product of two means over a micro-batch, times its tokens: "
    "its size depends on the cut into micro-batches, and the division that Megatron-Core expects afterwards has no "
    "place in a sum over tokens",
    "moe_z_loss_coeff": "the router's z loss is multiplied by the tokens of the micro-batch, pads and prompts among "
    "them: its size depends on the cut into micro-batches, and the division that Megatron-Core expects afterwards has "
    "no place in a sum over tokens",
    "moe_router_enable_expert_bias": "the bias would move by the token counts of whatever ran, which dropped "
    "samples and fillers change; where a checkpoint holds a bias (glm4_moe) it is used as it is, in every engine too",
    "mtp_num_layers": "the loss of the extra predictions runs over every token of a micro-batch, prompts too, and "
    "expects a division that a sum over tokens does not make; no Hugging Face checkpoint of these families holds "
    "those layers, so the rollout engine lacks them",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalRule:
    """Holds the rule by which a run drops samples.

    drops: whether samples are dropped at all; False under ``skip.mode=off``.
    advantage_epsilon: a sample is dropped if its largest |advantage| is at most this number.
    drops_logprob_passes: whether dropped samples are left out of log-prob passes too. False if the
        advantages are made from log-probs (a KL in the reward, a teacher): then the passes come
        before the drop.
    approximated: the settings, as ``key=value``, under which dropping a sample may change the
        result; () unless ``skip.mode=approximate``, which drops samples all the same.
    kl_in_reward: whether a KL to the reference policy is part of the reward.
    """

    drops: bool
    advantage_epsilon: float
    drops_logprob_passes: bool
    approximated: tuple[str, ...]
    kl_in_reward: bool


def refuse_uncounted_losses(megatron: MegatronConfig, skip: SkipConfig) -> None:
    """Raise ConfigError if Megatron-Core is set to add a loss or update that is not a sum over tokens.

    It does so in every ``skip.mode``. UNCOUNTED_FIELDS lists the fields that add one, such as a
    router's load-balancing loss, with the reasons.
    """
    for field, reason in UNCOUNTED_FIELDS.items():
        value = megatron.transformer.get(field)
        if not (any(value) if isinstance(value, list | tuple) else value):
            continue
        note = (
            "; dropping samples would change it too, so skip.mode=exact could not hold either"
            if skip.mode == "exact"
            else ""
        )
        raise ConfigError(
            f"megatron.transformer.{field}={value} is refused in every skip.mode: {reason}{note}; remove it, or set "
            "it to its neutral value (0, false or null)"
        )


def coupling_terms(config: Config) -> tuple[str, ...]:
    """Return the settings, each as ``key=value``, under which a sample of zero advantage may change the result."""
    terms = []
    if config.kl_in_loss:
        terms.append(f"loss.kl_coefficient={config.loss.kl_coefficient}")
    if config.loss.entropy_coefficient != 0:
        terms.append(f"loss.entropy_coefficient={config.loss.entropy_coefficient}")
    if config.loss.policy == "dro" or (is_own(config.loss.policy) and _trains_without_advantage(config.loss)):
        terms.append(f"loss.policy={config.loss.policy}")
    if config.loss.denominator == "kept":
        terms.append("loss.denominator=kept")
    if config.skip.advantage_epsilon > 0:
        terms.append(f"skip.advantage_epsilon={config.skip.advantage_epsilon}")
    for field, harmless in COUPLING_FIELDS.items():
        if field in config.megatron.transformer and config.megatron.transformer[field] not in harmless:
            terms.append(f"megatron.transformer.{field}={config.megatron.transformer[field]}")
    return tuple(terms)


def _trains_without_advantage(loss: LossConfig) -> bool:
    from megatron_rl.algorithm.own_policy_check import trains_without_advantage  # brings torch along

    return trains_without_advantage(loss)


def _neutral(term: str) -> str:
    """Return what the error message of ``signal_rule`` advises to set in place of ``term``.

    term: a ``key=value`` from ``coupling_terms``, under which a sample of zero advantage may change
        the result.

    Example: ``loss.denominator=kept`` → ``loss.denominator=original``.
    """
    key = term.split("=")[0]
    match key:
        case "loss.policy" | "megatron.transformer.moe_router_load_balancing_type":
            return f"another {key}"
        case "loss.denominator":
            return "loss.denominator=original"
    return f"{key} to its neutral value (0, false or null)"


def signal_rule(config: Config) -> SignalRule:
    """Return the run's rule for dropping samples.

    Raises ConfigError under ``skip.mode=exact`` if a dropped sample may change the result. The message
    names the settings that cause this and the ways out. Raises ConfigError also for the settings that
    ``refuse_uncounted_losses`` refuses.
    """
    refuse_uncounted_losses(config.megatron, config.skip)
    terms = coupling_terms(config)
    if config.skip.mode == "exact" and terms:
        changes = " and ".join(_neutral(term) for term in terms)
        why = "".join(f" ({COUPLED_BY[name]})" for name in COUPLED_BY if any(f".{name}=" in term for term in terms))
        raise ConfigError(
            f"skip.mode=exact drops samples whose gradient is provably zero, and {', '.join(terms)} makes that "
            f"untrue{why}; either set {changes}, or choose skip.mode=approximate (drop by advantage alone) or "
            "skip.mode=off (drop nothing)"
        )
    drops = config.skip.mode != "off"
    return SignalRule(
        drops=drops,
        advantage_epsilon=config.skip.advantage_epsilon,
        drops_logprob_passes=drops and config.skip.logprob_passes and not config.logprobs_make_advantages,
        approximated=terms if drops else (),
        kl_in_reward=config.kl_in_reward,
    )


def has_signal(
    advantages: np.ndarray,
    loss_tokens: np.ndarray,
    *,
    advantage_epsilon: float = 0.0,
    sample_ids: Sequence[str] = (),
    way_out: str = "look for non-finite rewards in its group",
) -> np.ndarray:
    """Return bool [S]: whether a sample has a loss token, and an |advantage| above ``advantage_epsilon``.

    advantages: [S], the advantage of each sample. If its tokens have advantages or importance
                weights of their own: the largest |weight · advantage| of its tokens
                (``Advantages.largest``).
    loss_tokens: int64 [S], the number of loss tokens of each sample.
    sample_ids: S names, for messages alone; if empty, messages give the index.
    way_out: what a message advises if an advantage is not finite.

    Raises NonFiniteAdvantage for an advantage that is not finite or is beyond float32. Raises
    ConfigError for an ``advantage_epsilon`` that is not a finite number.

    Example: advantages (0.0, 1.2, −0.7), loss tokens (5, 3, 0) → (False, True, False).
    """
    require_epsilon("skip.advantage_epsilon", advantage_epsilon)
    require_finite(advantages, "the advantage", sample_ids, way_out)
    return (np.abs(advantages) > advantage_epsilon) & (loss_tokens > 0)
