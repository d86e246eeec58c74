"""The trainer: the parts of a run, and its work on a rollout from advantages to evaluation."""
