"""Checkpoints of a run: the whole of what decides its future, or nothing."""
