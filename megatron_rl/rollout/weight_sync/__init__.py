"""Delivery of the policy's weights from the trainer to inference engines: sender, transport and receiver."""
