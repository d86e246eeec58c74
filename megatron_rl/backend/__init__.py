"""Megatron-Core's model, schedule and optimizer behind one object: log-probs, forward and backward, an optimizer
step."""
