"""The translation of other frameworks' settings into a configuration of this one: `megatron-rl translate`."""
