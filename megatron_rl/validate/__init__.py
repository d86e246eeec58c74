"""Checks of the settings that only make sense together, before any weight is read. Not a collective."""

from megatron_rl.validate.relations import (
    check_critic_model,
    check_environment,
    check_lengths,
    check_overlong,
    check_own_parts,
    check_provider,
    check_reference,
    validate_config,
)

__all__ = [
    "check_critic_model",
    "check_environment",
    "check_lengths",
    "check_overlong",
    "check_own_parts",
    "check_provider",
    "check_reference",
    "validate_config",
]
