"""The forward passes over a rollout without a gradient: log π_old, π_ref and π_T, values, and their container."""
