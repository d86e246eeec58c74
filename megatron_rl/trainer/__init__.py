"""A run's standing parts and what it does with a rollout: advantages, corrections, the reference policy, evaluation."""
