"""Checks of the settings that only make sense together, before any weight is read. Not a collective.

What is refused stands in one table (table.py); the reasons lie by theme in objective.py, models.py
and rollouts.py.
"""

from megatron_rl.validate.models import check_critic_model, check_lengths
from megatron_rl.validate.table import validate_config

__all__ = ["check_critic_model", "check_lengths", "validate_config"]
