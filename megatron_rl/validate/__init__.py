"""Checks of combinations of settings, made before any weight is read. Each rank checks for itself.

table.py lists the refused combinations. For each one, a function in objective.py, models.py or
rollouts.py returns an error message, or None if the settings can go together.
"""

from megatron_rl.validate.models import beyond_the_end, check_critic_model, check_lengths, check_profile
from megatron_rl.validate.table import validate_config

__all__ = ["beyond_the_end", "check_critic_model", "check_lengths", "check_profile", "validate_config"]
