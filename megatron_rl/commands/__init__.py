"""The command `megatron-rl`: its first argument names the program to run, such as ``train`` or ``convert``."""
