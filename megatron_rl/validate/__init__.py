"""Checks of the settings that only make sense together, before any weight is read. Not a collective.

What is refused stands in one table (table.py); the reasons lie by theme in objective.py, models.py
and rollouts.py.
"""

from megatron_rl.validate.models import beyond_the_end, check_critic_model, check_lengths, check_profile
from megatron_rl.validate.table import validate_config

__all__ = ["beyond_the_end", "check_critic_model", "check_lengths", "check_profile", "validate_config"]
