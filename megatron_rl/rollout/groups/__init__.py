"""The choice of a rollout's groups: which are trained, replayed, sampled again, or left under way."""
