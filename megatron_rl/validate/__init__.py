"""Checks of relations between settings, before any weight is read. They are no collectives.

One table (table.py) lists the refused combinations. The functions that give the reasons are in
objective.py, models.py and rollouts.py, by theme.
"""

from megatron_rl.validate.models import beyond_the_end, check_critic_model, check_lengths, check_profile
from megatron_rl.validate.table import validate_config

__all__ = ["beyond_the_end", "check_critic_model", "check_lengths", "check_profile", "validate_config"]
