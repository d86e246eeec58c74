"""The policy: a Megatron-Core GPTModel built from a Hugging Face config, its core attention and its log-probs.

A file of this room imports only files below it, between folders too. From the bottom:

- ``attention``: which keys a query sees, with kernels and core attentions;
- ``layer_spec``, ``rotary``, then ``invariant``, the row-invariant parts, and ``logprob``, logits
  and log-probs;
- ``post_norm``, ``gpt_oss``, ``latent_attention``: the layers of some families;
- ``bridge``: models that NVIDIA's Megatron-Bridge describes; ``hf_config`` and ``positions``: sizes
  and angles from a Hugging Face config;
- ``parts``, ``build``: the parts of a model, and the model; ``lora``: adapters; ``frozen``: a
  second model.
"""
