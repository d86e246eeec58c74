"""Checks of combinations of settings, made before any weight is read. Each rank checks for itself.

table.py lists the refused combinations. For each one, a function in objective.py, models.py or
rollouts.py returns the reason against it, or None.
"""

from megatron_rl.validate.models import beyond_the_end, check_critic_model, check_lengths, check_profile
from megatron_rl.validate.table import validate_config

__all__ = ["beyond_the_end", "check_critic_model", "check_lengths", "check_profile", "validate_config"]
