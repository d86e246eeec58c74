"""The forecast of a configuration's update on a number of GPUs: the real planner's plans, predicted times, memory.

It joins no world and builds no model.
"""
