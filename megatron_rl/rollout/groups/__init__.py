"""The groups of a rollout: which of them are trained, replayed, asked again, or left under way."""
