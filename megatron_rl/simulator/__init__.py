"""The forecast of one update (a rollout's optimizer steps) on a number of GPUs, from the real planner's plans.

It predicts times and memory. It starts no processes and builds no model.
"""
