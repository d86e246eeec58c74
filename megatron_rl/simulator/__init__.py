"""The forecast of one update, a rollout's optimizer steps, on N GPUs; the trainer's own planner plans it.

It predicts times and memory. It starts no processes and builds no model.
"""
