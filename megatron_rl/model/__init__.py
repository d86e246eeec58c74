"""The policy: a Megatron-Core GPTModel built from a Hugging Face config, its core attention and its log-probs.

What a file imports of this room lies lower, between folders too; from the bottom:

- ``attention``: which keys a query sees, and the kernels and core attentions that compute it;
- ``layer_spec``, ``rotary``, then ``invariant``, the row-invariant parts, and ``logprob``, logits
  and log-probs;
- ``post_norm``, ``gpt_oss``, ``latent_attention``: layers that some families have;
- ``bridge``: NVIDIA's descriptions; ``hf_config`` and ``positions``: sizes and angles from a
  Hugging Face config;
- ``parts``, ``build``: what a model is made of, and the model; ``lora``: adapters; ``frozen``: a
  second model.
"""
