"""The training side of a run: the objects that its loop calls, from a rollout's advantages to the evaluation."""
