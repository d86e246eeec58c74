"""Gated delta nets: layers that keep a matrix per head as their state instead of keys and values."""
