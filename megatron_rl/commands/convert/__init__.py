"""The conversion between Hugging Face directories and Megatron checkpoints: `megatron-rl convert`."""
