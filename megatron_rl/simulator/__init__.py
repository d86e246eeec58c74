"""The forecast of the time and memory that the optimizer steps on one rollout take on N GPUs.

The trainer's own planner divides the samples among the GPUs. No process is started and no model is
built.
"""
