"""Inference engines: their interface, the embedded engine, and engines that wrap another engine."""
