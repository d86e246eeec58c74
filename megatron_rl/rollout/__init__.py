"""Rollouts: engines sample completions of prompts, and a queue turns the scored groups into training batches."""
