"""Transformer Engine's modules in plain torch, under the real ones' contract (read, 2.3.0 and 2.20.2)."""
