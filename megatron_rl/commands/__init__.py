"""The command `megatron-rl`: one word for each program that a user starts."""
