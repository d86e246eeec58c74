"""Delivery of the policy's weights to inference engines: sender, transport and receiver."""
