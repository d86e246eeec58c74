"""The sizes of a model, from its Hugging Face config and its adapters."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron_rl.config import LoraConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Holds a model's sizes by its Hugging Face config. Sizes are in elements, ``context_tokens`` in tokens.

    ffn_hidden_size: the width of the MLP, or of one expert where the MLP is a mixture.
    post_norms: True for norms behind attention and MLP, and over all heads of q and k together (OLMo 2).
    mlp_matrices: an MLP's: gate, up and down, or 2 without a gate.
    num_experts, experts_per_token: 0 for a dense model.
    num_dense_layers, dense_ffn_hidden_size: the first layers of a mixture that have one MLP, and its width; else 0.
    shared_ffn_hidden_size: the width of the expert that every token passes beside its own; 0 without.
    router_groups, router_groups_per_token: a token's experts lie in so many of the groups of experts; 0 without groups.
    router_scaling: what the chosen experts' weights are multiplied by.
    router_bias: True where a number per expert is added to its score for the choice alone (``Entry.frozen``).
    num_extra_layers: the layers that predict further tokens, which files hold behind the model's own and which are left
    out.
    router_pre_softmax: True where the chosen experts' weights are a share of all experts' probability and do not add up
    to 1.
    padded_vocab_size: the vocabulary rounded up to a multiple of TP; the pads take no probability and get no gradient.
    layer_spec: "transformer_engine" (norms fused into linears) or "torch"; it decides the parameters' names.
    value_head: True for one number per token in place of the vocabulary's logits; embeddings are then never tied.
    lora_rank, lora_alpha, lora_targets: the adapters' (model/adapter.py); 0 and none where every weight is trained.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    padded_vocab_size: int
    context_tokens: int
    tied_embeddings: bool
    layer_spec: str
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    mlp_matrices: int = 3
    num_experts: int = 0
    experts_per_token: int = 0
    router_pre_softmax: bool = False
    num_dense_layers: int = 0
    dense_ffn_hidden_size: int = 0
    shared_ffn_hidden_size: int = 0
    router_groups: int = 0
    router_groups_per_token: int = 0
    router_scaling: float = 1.0
    router_bias: bool = False
    num_extra_layers: int = 0
    value_head: bool = False
    lora_rank: int = 0
    lora_alpha: float = 0.0
    lora_targets: tuple[str, ...] = ()

    @property
    def layer_parameters(self) -> float:
        """Return the weights of a layer's matrices that a token passes, the mean over the layers.

        Of a mixture they are ``experts_per_token`` experts', the shared one's and the router's.
        """
        attention = 2 * self.hidden_size * (self.num_heads + self.num_kv_heads) * self.head_dim
        mlps = self.experts_per_token if self.num_experts else 1
        width = self.mlp_matrices * (self.ffn_hidden_size * mlps + self.shared_ffn_hidden_size) + self.num_experts
        first = 3 * self.dense_ffn_hidden_size * self.num_dense_layers
        widths = first + width * (self.num_layers - self.num_dense_layers)
        return attention + self.hidden_size * widths / self.num_layers

    @property
    def square_share(self) -> float:
        """Return attention's cost per squared token of a causal sequence, over a layer's matrices' per token."""
        return self.num_heads * self.head_dim / self.layer_parameters

    @property
    def head_layers(self) -> float:
        """Return the LM head's cost in layers, were every token to pass it."""
        return self.vocab_size * self.hidden_size / self.layer_parameters

    def with_adapters(self, lora: LoraConfig) -> ModelShape:
        """Return the same model with ``lora``'s adapters; itself where ``lora.rank`` is null."""
        if lora.rank is None:
            return self
        return dataclasses.replace(self, lora_rank=lora.rank, lora_alpha=lora.alpha, lora_targets=tuple(lora.targets))
