"""RL post-training of language models on Megatron-Core, without compute for samples that give no gradient."""

__version__ = "0.4.0"
