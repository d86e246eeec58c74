"""What a configuration would do on a number of GPUs: the real planner, predicted times, memory. Joins no world and
builds no model."""
