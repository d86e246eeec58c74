"""The checkpoints of a run: all the state that decides its future, or nothing."""
