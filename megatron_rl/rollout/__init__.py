"""Rollouts: engines sample completions of prompts, and a queue turns the scored groups into training batches.

The folder ``engines`` imports none of its sibling folders. ``weight_sync`` and ``endpoint`` import
``engines``, and ``vllm`` imports ``engines`` and ``weight_sync``.
"""
