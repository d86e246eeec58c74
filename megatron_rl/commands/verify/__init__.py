"""The command `megatron-rl verify`: it compares a parallel topology with one process, on a small copy of a model."""
