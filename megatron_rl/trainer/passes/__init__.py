"""The forward passes over a rollout without a gradient: log π_old, log π_ref (reference), log π_T (teacher), values."""
