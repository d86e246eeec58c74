"""The policy: a Megatron-Core GPTModel of a Hugging Face config, its attention core and its log-probs."""
