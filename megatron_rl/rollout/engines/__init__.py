"""Inference engines: their interface, the embedded one, and engines around another one."""
