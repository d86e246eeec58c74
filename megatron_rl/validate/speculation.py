"""The checks of speculative decoding: only what is known to sample from the model's own distribution is allowed.

In vLLM a drafter proposes tokens, and vLLM's rejection sampling keeps or replaces each, so that the tokens have
the distribution of the model alone (Leviathan et al. 2023, arXiv:2211.17192). Some of vLLM's settings
change that distribution. The log-prob gap between engine and trainer does not show it: it compares the
log-probs of the tokens that came, not how often they come. So the settings below are a list of those
that are allowed, and any other is refused, one of a later release too.

The fields are those of vLLM 0.32.0, ``config/speculative.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron_rl.config.rollout import WEIGHT_DRAFTERS
from megatron_rl.errors import quoted

if TYPE_CHECKING:
    from megatron_rl.config import RolloutConfig

KEY = "rollout.vllm.speculative_config"
# Methods that draft from tokens alone.
WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")
# Fields that decide which tokens are drafted, and how many, but not which are kept.
ALLOWED = frozenset(
    (
        *("method", "num_speculative_tokens", "num_speculative_tokens_per_batch_size"),
        *("prompt_lookup_max", "prompt_lookup_min", "disable_padded_drafter_batch"),
        *("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests"),
        *("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
    )
)
# Such fields of a drafter with weights. ``model`` is its folder, except of mtp, whose heads lie in the policy's folder.
OF_WEIGHTS = frozenset(("model", "draft_sample_method"))
SAMPLE_METHODS = ("greedy", "probabilistic")
# Fields that decide which tokens are kept → why another value than vLLM's default is refused.
VERIFYING = {
    **dict.fromkeys(
        ("rejection_sample_method", "synthetic_acceptance_rates", "synthetic_acceptance_length"),
        "any but standard rejection sampling was not shown to keep the model's distribution, and synthetic does not: "
        "training would go on with samples of another policy, and no gap of log-probs would show it",
    ),
    "enable_adaptive_verification": "it was not shown to keep the model's distribution",
}
DEFAULTS = {"rejection_sample_method": "standard", "enable_adaptive_verification": False}
REASONS = {
    **VERIFYING,
    **dict.fromkeys(
        ("model", "draft_sample_method"),
        f"a drafter with weights is named by rollout.speculation, one of {', '.join(WEIGHT_DRAFTERS)}, and mtp takes "
        "no model",
    ),
    "draft_load_config": "a drafter's weights come from the safetensors files of its folder",
    **dict.fromkeys(
        ("quantization", "parallel_drafting", "use_heterogeneous_vocab"),
        "drafters were run only with the policy's dtype and vocabulary, one token after the other",
    ),
}


def drafts_beside(rollout: RolloutConfig) -> str | None:
    """Return an error message if ``rollout.speculation`` is set beside a setting that excludes it, else None."""
    excluding = (
        (rollout.engine == "transformers" and rollout.speculation != "history", "rollout.engine=transformers",
         "rollout.speculation=history", "the method is vLLM's"),
        (bool(rollout.servers), "rollout.servers", "leave rollout.servers empty",
         "a server drafts as --speculative-config said at its start"),
        (rollout.bitwise, "rollout.bitwise=true", "rollout.bitwise=false",
         "a pass over several tokens rounds otherwise than a pass over one"),
        (rollout.routing_replay == "rollout", "rollout.routing_replay=rollout", "rollout.routing_replay=old_logprobs",
         "a pass's records of experts would hold those of rejected tokens"),
    )  # fmt: skip
    for excludes, setting, way_out, why in excluding:
        if excludes:
            return (
                f"rollout.speculation={rollout.speculation} does not work with {setting}: {why}; set "
                f"rollout.speculation=off, or {way_out}"
            )
    return None


def _is_default(name: object, value: object) -> bool:
    return name in VERIFYING and value == DEFAULTS.get(str(name))


def lossy(fields: Mapping[str, object]) -> str | None:
    """Return "field=value is refused: reason" for a field that lets vLLM keep other tokens, else None.

    fields: those of vLLM's SpeculativeConfig that a server is started with. A server loads its own
        weights, and a drafter's with them, so any method is allowed there.
    """
    for name, value in fields.items():
        if name in VERIFYING and not _is_default(name, value):
            return f"{name}={quoted(value)} is refused: {VERIFYING[name]}; remove it"
    return None


def _field_of(name: str, value: object, drafter: str) -> str | None:
    """Return an error message if a field of ``rollout.vllm.speculative_config`` is not allowed, else None."""
    allowed = ALLOWED
    if drafter in WEIGHT_DRAFTERS:
        allowed |= OF_WEIGHTS - ({"model"} if drafter == "mtp" else set())
    if name not in allowed and not _is_default(name, value):
        reason = REASONS.get(name, "it was not shown to keep the distribution that samples are drawn from")
        return f"{KEY}.{name}={quoted(value)} is refused: {reason}; remove it"
    if name == "draft_sample_method" and value not in SAMPLE_METHODS:
        return f"{KEY}.draft_sample_method={quoted(value)} is none of {', '.join(SAMPLE_METHODS)}"
    if name == "model" and not (isinstance(value, str) and value):
        return f"{KEY}.model={quoted(value)} must be the local folder of the drafter, with config.json and weights"
    return None


def speculation(arguments: Mapping[str, object], drafter: str) -> str | None:
    """Return an error message unless ``rollout.vllm.speculative_config`` keeps the model's distribution, else None.

    arguments: ``rollout.vllm``, arguments by name.
    drafter: ``rollout.speculation``, which names the method unless it is "off".

    Example: ``{"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}`` → None.
    """
    given = arguments.get("speculative_config")
    if given is not None and not isinstance(given, Mapping):
        return f"{KEY}={quoted(given)} must be a mapping of fields, as in {{method: ngram, num_speculative_tokens: 3}}"
    for name, value in (given or {}).items():
        if error := _field_of(str(name), value, drafter):
            return error
    if drafter in WEIGHT_DRAFTERS and drafter != "mtp" and "model" not in (given or {}):
        return f"rollout.speculation={drafter} needs its weights: set {KEY}.model to the drafter's local folder"
    if given is None:
        return None
    method = given.get("method")
    if drafter != "off":
        if method in (None, drafter):
            return None
        return (
            f"{KEY}.method={quoted(method)} beside rollout.speculation={drafter}: one key names the method; remove the "
            "former"
        )
    if method not in WITHOUT_WEIGHTS:
        reason = REASONS["model"] if method is not None else "vLLM would guess the method"
        return f"{KEY}.method={quoted(method)} is refused: {reason}; take one of {', '.join(WITHOUT_WEIGHTS)}"
    return None
