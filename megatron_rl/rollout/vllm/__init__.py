"""Rollouts by vLLM: engine processes of the run, servers over HTTP, and their supervision."""
