"""Core attention over packed sequences: which keys a query sees, and the kernels and layers that compute it."""
