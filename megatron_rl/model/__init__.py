"""The policy: a Megatron-Core GPTModel built from a Hugging Face config, its core attention and its log-probs."""
