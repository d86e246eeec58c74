"""The policy: a Megatron-Core GPTModel built from a Hugging Face config, its core attention and its log-probs.

The main files and subfolders follow. Each imports only from earlier ones:

- ``attention``: which keys a query sees, with the kernels and modules that compute attention
- ``layer_spec``, ``rotary``: the spec of a layer's modules, and rotary angles
- ``invariant``, then ``logprob``: row-invariant modules, then logits and log-probs
- ``post_norm``, ``gpt_oss``, ``latent_attention``: the layers of some families
- ``bridge``: models that NVIDIA's Megatron-Bridge describes
- ``hf_config`` and ``positions``: sizes and rotary angles from a Hugging Face config
- ``parts``, ``build``: the choice between plain and row-invariant modules, and the building of the model
- ``lora``: LoRA adapters
- ``frozen``: a second model that is not trained (a reference policy or a teacher)
"""
