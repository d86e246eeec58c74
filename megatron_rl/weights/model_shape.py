"""The sizes of a model, from its Hugging Face config and its adapters."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron_rl.config import LoraConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedAttentionShape:
    """Holds the features of Llama 4's attention beside sizes; layers are given by their numbers.

    chunk_tokens: positions are cut into chunks of this length; in a chunked layer a token sees only
        its own chunk.
    chunked_layers: the chunked layers; the others see the whole sequence.
    turned_layers: the layers whose q and k are rotated; the others have no positions.
    l2_norm: whether q and k of rotated layers are divided by their root mean square.
    scale, scale_tokens: in a layer without positions the query at position p is multiplied by 1 +
        scale · log(1 + floor((p + 1) / scale_tokens)); a scale of 0.0 for none.
    """

    chunk_tokens: int
    chunked_layers: tuple[int, ...]
    turned_layers: tuple[int, ...]
    l2_norm: bool
    scale: float
    scale_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Holds a model's sizes by its Hugging Face config. Sizes are in elements, ``context_tokens`` in tokens.

    ffn_hidden_size: the width of the MLP, or of one expert of a mixture.
    head_dim: the width of one head's q and k, and of its v if ``value_head_dim`` is 0.
    q_lora_rank, kv_lora_rank: of multi-latent attention, the widths of the latents of q, and of k
        and v; 0 without it. If only q_lora_rank is 0, q is made of the hidden state.
    rope_head_dim, value_head_dim: of multi-latent attention, the width of the rotated part of a
        head's q and k, and the width of its v; else 0.
    chunked: Llama 4's attention, whose layers are of two kinds (``ChunkedAttentionShape``); None
        for any other.
    post_norms: True for norms after attention and MLP, and over all heads of q and k together (OLMo
        2).
    mlp_matrices: the matrices of an MLP: 3 with gate, up and down, or 2 without a gate.
    sandwich_norms: True for norms before and after attention and MLP, all multiplying by 1 + weight
        (Gemma 3).
    scaled_embedding, gelu: True for the embedding times sqrt(hidden_size), and for gelu (tanh) in
        the MLP (Gemma).
    windows: for each layer, the number of tokens that a token sees, itself included; 0 for all
        before it. () if all layers see all.
    num_experts, experts_per_token: 0 for a dense model.
    num_dense_layers, dense_ffn_hidden_size: the number of layers of a mixture that have one MLP,
        and its width; else 0.
    dense_layers: the numbers of the ``num_dense_layers`` layers with one MLP, if they are not the
        first layers.
    shared_ffn_hidden_size: the width of the expert that every token passes beside its own; 0
        without.
    router_groups, router_groups_per_token: the number of groups of experts, and in how many of them
        a token's experts lie; 0 without groups.
    router_scaling: the factor of the chosen experts' weights.
    router_bias: True if a number per expert is added to its score, for the choice only
        (``Entry.frozen``).
    num_extra_layers: the layers that predict further tokens. Files hold them after the model's own
        layers; they are left out.
    router_pre_softmax: True if the chosen experts' weights are their shares of all experts'
        probability, so that they do not add up to 1.
    linear_bias: True for biases on attention's output, the router and the experts (gpt-oss).
    sinks: True for a learned logit per head in the softmax's denominator.
    swiglu_limit: the bound of an expert's gate (above) and up (both sides); 0.0 without.
    padded_vocab_size: the vocabulary rounded up to a multiple of TP; the pads take no probability
        and get no gradient.
    layer_spec: "transformer_engine" (norms fused into linears) or "torch"; it decides the
        parameters' names.
    value_head: True for one number per token in place of the vocabulary's logits; embeddings are
        then never tied.
    lora_rank, lora_alpha, lora_targets: the adapters' (model/lora/adapters.py); 0 and none if every
        weight is trained.
    stage_layers: the number of layers of each pipeline stage (planning/pipeline_layout.py); () for
        a single stage.
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
    sandwich_norms: bool = False
    scaled_embedding: bool = False
    gelu: bool = False
    windows: tuple[int, ...] = ()
    chunked: ChunkedAttentionShape | None = None
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_head_dim: int = 0
    value_head_dim: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    router_pre_softmax: bool = False
    num_dense_layers: int = 0
    dense_layers: tuple[int, ...] = ()
    dense_ffn_hidden_size: int = 0
    shared_ffn_hidden_size: int = 0
    router_groups: int = 0
    router_groups_per_token: int = 0
    router_scaling: float = 1.0
    router_bias: bool = False
    num_extra_layers: int = 0
    linear_bias: bool = False
    sinks: bool = False
    swiglu_limit: float = 0.0
    value_head: bool = False
    lora_rank: int = 0
    lora_alpha: float = 0.0
    lora_targets: tuple[str, ...] = ()
    stage_layers: tuple[int, ...] = ()

    @property
    def num_stages(self) -> int:
        """Return the number of pipeline stages, chunks of the interleaved schedule counted one by one."""
        return len(self.stage_layers) or 1

    def layers_on(self, stage: int) -> range:
        """Return the numbers of a stage's layers among the model's."""
        counts = self.stage_layers or (self.num_layers,)
        first = sum(counts[:stage])
        return range(first, first + counts[stage])

    def has_mixture(self, layer: int) -> bool:
        """Return whether the MLP of the model's layer ``layer`` is a mixture."""
        dense = layer in self.dense_layers if self.dense_layers else layer < self.num_dense_layers
        return bool(self.num_experts) and not dense

    def attended(self, mean_context: float) -> float:
        """Return the number of tokens that a token attends to, added up over the layers.

        mean_context: the tokens that it attends to in a layer that sees all.
        """
        chunked = self.chunked.chunked_layers if self.chunked else ()
        within = min(mean_context, self.chunked.chunk_tokens / 2) if self.chunked else 0.0
        return (self.num_layers - len(chunked)) * mean_context + len(chunked) * within

    def attention_parameters(self, tensor_size: int = 1) -> int:
        """Return the number of weights in the matrices of a layer's attention, on one of ``tensor_size`` tensor ranks.

        A rank holds its own heads' share; it holds the projections to multi-latent attention's
        latents whole.
        """
        hidden, heads = self.hidden_size, self.num_heads // tensor_size
        if not self.kv_lora_rank:
            return 2 * hidden * (self.num_heads + self.num_kv_heads) * self.head_dim // tensor_size
        of_hidden = self.q_lora_rank + self.kv_lora_rank + self.rope_head_dim + heads * self.value_head_dim
        keys_and_values = self.head_dim - self.rope_head_dim + self.value_head_dim
        of_latents = (self.q_lora_rank or hidden) * self.head_dim + self.kv_lora_rank * keys_and_values
        return hidden * of_hidden + heads * of_latents

    @property
    def score_width(self) -> float:
        """Return the mean of the total widths of q and of v over all heads: a query's cost at each key."""
        return self.num_heads * (self.head_dim + (self.value_head_dim or self.head_dim)) / 2

    @property
    def cached_elements(self) -> int:
        """Return the elements that an engine keeps per token and layer: keys and values, or their latents."""
        if self.kv_lora_rank:
            return self.kv_lora_rank + self.rope_head_dim
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> float:
        """Return the weights of a layer's matrices that a token passes, as the mean over the layers.

        In a mixture these are ``experts_per_token`` experts, the shared expert and the router.
        """
        return sum(map(self.passed_parameters, range(self.num_layers))) / self.num_layers

    def passed_parameters(self, layer: int) -> int:
        """Return the number of weights in the matrices of the model's layer ``layer`` that a token passes."""
        if self.num_experts and not self.has_mixture(layer):
            width = 3 * self.dense_ffn_hidden_size
        else:
            mlps = self.experts_per_token if self.num_experts else 1
            width = self.mlp_matrices * (self.ffn_hidden_size * mlps + self.shared_ffn_hidden_size) + self.num_experts
        return self.attention_parameters() + self.hidden_size * width

    def rank_shares(self, pipeline: int) -> tuple[tuple[float, float], ...]:
        """Return each pipeline rank's (cost in layers of mean cost, number of layers), over all its chunks.

        pipeline: the number of ranks that the stages lie on, one after the other.
        """
        shares = []
        for rank in range(pipeline):
            layers = [x for stage in range(rank, self.num_stages, pipeline) for x in self.layers_on(stage)]
            shares.append((sum(map(self.passed_parameters, layers)) / self.layer_parameters, float(len(layers))))
        return tuple(shares)

    @property
    def square_share(self) -> float:
        """Return attention's cost per squared token of a causal sequence, in units of a layer's cost per token."""
        return self.score_width / self.layer_parameters

    @property
    def head_layers(self) -> float:
        """Return the LM head's cost in layers, if every token passed it."""
        return self.head_cost() / self.layer_parameters

    def head_cost(
        self, loss_tokens: float = 1.0, tokens: float = 1.0, *, times: float = 1.0, columns: int | None = None
    ) -> float:
        """Return the weights of the last matrix that a token passes on average, multiplied by ``times``.

        loss_tokens, tokens: only tokens with loss pass the matrix.
        columns: the matrix's columns; None for all but the pads, or a value head's single column.
        """
        columns = columns or (1 if self.value_head else self.vocab_size)
        return self.hidden_size * columns * times * loss_tokens / tokens

    def with_adapters(self, lora: LoraConfig) -> ModelShape:
        """Return the same model with ``lora``'s adapters; itself if ``lora.rank`` is null."""
        if lora.rank is None:
            return self
        return dataclasses.replace(self, lora_rank=lora.rank, lora_alpha=lora.alpha, lora_targets=tuple(lora.targets))
