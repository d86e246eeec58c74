"""The saving, loading and conversion of a run's checkpoints. A checkpoint appears complete or not at all."""
