"""The comparison of a topology with one process, on a thin model: `megatron-rl verify`."""
