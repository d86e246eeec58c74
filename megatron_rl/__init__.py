"""RL post-training on Megatron-Core that does not pay for samples without signal."""

__version__ = "0.4.0"
