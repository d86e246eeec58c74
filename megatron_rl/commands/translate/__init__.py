"""The translation of other frameworks' settings into a configuration of megatron_rl: `megatron-rl translate`."""
