"""The conversion between Megatron-Core's parameters and tensors under Hugging Face's names."""
