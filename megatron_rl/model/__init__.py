"""The policy: a Megatron-Core GPTModel built from a Hugging Face config, its core attention and its log-probs.

A file of this folder, or of a subfolder, imports only from earlier entries of this list:

- ``attention``: which keys a query sees, with the kernels and modules that compute attention
- ``layer_spec``, ``rotary``: the spec of a layer's modules, and rotary angles
- ``invariant``, then ``logprob``: row-invariant modules, then logits and log-probs
- ``post_norm``, ``gpt_oss``, ``latent_attention``: the layers of some families
- ``bridge``: models that NVIDIA's Megatron-Bridge describes
- ``hf_config`` and ``positions``: sizes and rotary angles from a Hugging Face config
- ``parts``, ``build``: the choice of a model's modules, and the model
- ``lora``: adapters
- ``frozen``: a second model
"""
