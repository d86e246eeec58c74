"""Megatron-Core's parameters under Hugging Face's names, both ways."""
