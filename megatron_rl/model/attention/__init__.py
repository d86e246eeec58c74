"""Core attention over packed sequences: which keys a query sees, and kernels and layers that compute attention."""
