"""Rollout generation by vLLM: engine processes that the run starts, servers over HTTP, and their supervisor."""
