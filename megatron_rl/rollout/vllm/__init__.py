"""Rollouts by vLLM: engines of the run's own as processes, servers over HTTP, and their supervision."""
