"""The trainer: the standing parts of a run, and its work on a rollout from advantages to evaluation."""
