"""RL post-training of language models on Megatron-Core, which spends no compute on samples without a gradient."""

__version__ = "0.4.0"
