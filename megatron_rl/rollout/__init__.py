"""Rollouts: prompts in, sampled completions with their log-probs out."""
