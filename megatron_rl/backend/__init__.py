"""Megatron-Core's model, schedule and optimizer behind one object: log-probs, gradients, an optimizer step."""
