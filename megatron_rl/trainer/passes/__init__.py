"""The forward passes over a rollout that no gradient follows: log π_old, π_ref and π_T, values, and their carrier."""
