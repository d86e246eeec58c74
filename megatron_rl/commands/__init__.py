"""The command `megatron-rl`: one word for each thing that a user starts."""
