"""Rollouts: engines sample completions of prompts, and a queue turns the scored groups into training batches.

Its folders import each other in one direction: engines ← weight_sync ← vllm, and engines ←
endpoint.
"""
