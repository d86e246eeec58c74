"""The sizes and features of a model, from its Hugging Face config, and the settings of its LoRA adapters."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron_rl.config import LoraConfig

DELTA_CHUNK = 64  # tokens of a chunk of the gated delta rule; transformers and flash-linear-attention take as many


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedAttentionShape:
    """Holds the features of attention that only Llama 4 has. Layers are given by their numbers, from 0.

    chunk_tokens: positions are cut into chunks of this many tokens; in a chunked layer a token
        attends to its own chunk alone.
    chunked_layers: the chunked layers; in the other layers a token attends to the whole sequence
        before it.
    turned_layers: the layers whose q and k get rotary embeddings; the others get no positional
        embedding.
    l2_norm: whether q and k of the ``turned_layers`` are divided by their root mean square.
    scale, scale_tokens: in a layer outside ``turned_layers`` the query at position p is multiplied
        by 1 + scale · log(1 + floor((p + 1) / scale_tokens)). A scale of 0.0 turns this off.
    """

    chunk_tokens: int
    chunked_layers: tuple[int, ...]
    turned_layers: tuple[int, ...]
    l2_norm: bool
    scale: float
    scale_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetShape:
    """Holds the sizes of a model's gated delta nets, and the layers that have one in place of attention.

    Source: Yang et al. 2024, Gated Delta Networks (arXiv:2412.06464).

    layers: the numbers of these layers, from 0.
    key_heads, value_heads: the number of heads of q and of k, and the number of heads of v; each head
        of k serves value_heads / key_heads heads of v.
    key_head_dim, value_head_dim: the widths of one head of q or k, and of one head of v.
    conv_tokens: the number of tokens that the causal convolution reads for one token, itself
        included.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_tokens: int

    @property
    def key_width(self) -> int:
        """Return the width of all heads of q; that of k is the same."""
        return self.key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Return the width of all heads of v; that of their output gates is the same."""
        return self.value_heads * self.value_head_dim

    @property
    def projected_width(self) -> int:
        """Return the width of what a token's hidden state is projected to: q, k, v, gates, and β and a of each head."""
        return 2 * (self.key_width + self.value_width + self.value_heads)

    @property
    def state_elements(self) -> int:
        """Return the number of elements of a sequence's state in one layer, whatever the sequence's length.

        It holds a matrix for each head of v, and the last tokens that the convolution reads.
        """
        return self.value_width * self.key_head_dim + (self.conv_tokens - 1) * self.convolved_width

    @property
    def convolved_width(self) -> int:
        """Return the width of q, k and v together, which pass the convolution."""
        return 2 * self.key_width + self.value_width

    @property
    def rule_cost(self) -> float:
        """Return the multiply-adds of the gated delta rule per token in one layer, whatever the sequence's length.

        They are those of the products in model/delta_net/rule.py, for chunks of C = 64 tokens, as if
        every chunk were full and continued another. For each head of q, K Kᵀ and Q Kᵀ take 2 · C · d_k.
        For each head of v, the triangular system takes C / 2 · (d_k + d_v), its scores times U C · d_v,
        and the three products with the state 3 · d_k · d_v.
        """
        key, value = self.key_head_dim, self.value_head_dim
        own = DELTA_CHUNK * ((key + value) / 2 + value) + 3 * key * value
        return 2 * DELTA_CHUNK * self.key_width + self.value_heads * own


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Holds a model's sizes and features. Widths are numbers of elements; ``context_tokens`` is in tokens.

    ffn_hidden_size: the hidden width of the MLP, or of one expert in a mixture of experts.
    head_dim: the width of one head's q and k, and of its v if ``value_head_dim`` is 0.
    q_lora_rank, kv_lora_rank: the widths of multi-latent attention's latent of q, and of its common
        latent of k and v; 0 without multi-latent attention. If q_lora_rank alone is 0, q is
        projected from the hidden state.
    rope_head_dim, value_head_dim: in multi-latent attention, the width of the rotated part of a
        head's q and k, and the width of a head's v; else 0.
    chunked: the features of Llama 4's attention; None for any other model.
    post_norms: True for a norm after attention, a norm after the MLP, and norms over all heads of q
        and of k together (OLMo 2).
    mlp_matrices: the number of matrices of an MLP: 3 with gate, up and down, or 2 without a gate.
    sandwich_norms: True for norms before and after attention and MLP, all multiplying by 1 + weight
        (Gemma 3).
    scaled_embedding: True if the embedding is multiplied by sqrt(hidden_size) (Gemma).
    gelu: True if the MLP's activation is gelu (tanh) (Gemma).
    shifted_norms: True if every norm over the hidden state, and over a head of q and k, multiplies by
        1 + weight.
    output_gate: True if each head's attention output is multiplied by a sigmoid; the gates are
        projected from the hidden state together with q.
    shared_gate: True if the shared expert's output is multiplied by a sigmoid of one number per token.
    delta: the gated delta nets of some layers; None if every layer has attention.
    windows: for each layer, the number of tokens that a token attends to, itself included; 0 if it
        attends to all tokens before it. () if no layer has a window.
    num_experts, experts_per_token: the number of routed experts, and how many of them a token goes
        to; 0 for a dense model.
    num_dense_layers, dense_ffn_hidden_size: in a mixture, the number of layers that have one MLP in
        place of experts, and this MLP's hidden width; else 0.
    dense_layers: the numbers of these layers; () if they are the first ``num_dense_layers``.
    shared_ffn_hidden_size: the hidden width of the expert that every token goes to beside its
        routed experts; 0 without a shared expert.
    router_groups, router_groups_per_token: the number of groups of experts, and the number of
        groups that a token's experts come from; 0 without groups.
    router_scaling: the factor by which the weights of the chosen experts are multiplied.
    router_bias: True if a number per expert is added to the expert's score, only to choose experts
        (``Entry.frozen``, a buffer without gradient).
    num_extra_layers: the number of multi-token-prediction layers in the files. They follow the
        model's own layers, and are not loaded.
    router_pre_softmax: True if a chosen expert's weight is its probability among all experts, so
        that the chosen experts' weights do not add up to 1.
    linear_bias: True for biases on attention's output projection, the router and the experts
        (gpt-oss).
    sinks: True for a learned logit per head in the softmax's denominator.
    swiglu_limit: the bound c of an expert's SwiGLU, which takes min(gate, c), and up clamped to
        [−c, c]; 0.0 for no clamp.
    padded_vocab_size: ``vocab_size`` rounded up to a multiple of TP; padding tokens get no
        probability and no gradient.
    layer_spec: Megatron-Core's layer spec, "transformer_engine" (norms fused into linears) or
        "torch". It decides the parameters' names.
    value_head: True if the last matrix gives one number per token in place of the vocabulary's
        logits; embeddings are then never tied.
    lora_rank, lora_alpha, lora_targets: the settings of the LoRA adapters (model/lora/adapters.py);
        0, 0.0 and () if every weight is trained.
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
    shifted_norms: bool = False
    output_gate: bool = False
    shared_gate: bool = False
    delta: DeltaNetShape | None = None
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
        """Return the number of pipeline stages; in the interleaved schedule each model chunk of a rank is a stage."""
        return len(self.stage_layers) or 1

    def layers_on(self, stage: int) -> range:
        """Return the layers of pipeline stage ``stage``, as a range of the model's layer numbers."""
        counts = self.stage_layers or (self.num_layers,)
        first = sum(counts[:stage])
        return range(first, first + counts[stage])

    def has_mixture(self, layer: int) -> bool:
        """Return whether the model's layer ``layer`` has a mixture of experts in place of an MLP."""
        dense = layer in self.dense_layers if self.dense_layers else layer < self.num_dense_layers
        return bool(self.num_experts) and not dense

    def has_delta_net(self, layer: int) -> bool:
        """Return whether the model's layer ``layer`` has a gated delta net in place of attention."""
        return self.delta is not None and layer in self.delta.layers

    @property
    def layers_differ(self) -> bool:
        """Return whether layers are of several kinds, so that checkpoints have separate keys for each layer."""
        return self.num_dense_layers > 0 or self.delta is not None

    @property
    def num_attention_layers(self) -> int:
        """Return the number of layers with attention."""
        return self.num_layers - (len(self.delta.layers) if self.delta else 0)

    def attended(self, mean_context: float) -> float:
        """Return the number of tokens that a token attends to, averaged over tokens and summed over layers.

        mean_context: the average in a layer where a token attends to all tokens before it.
        """
        chunked = self.chunked.chunked_layers if self.chunked else ()
        within = min(mean_context, self.chunked.chunk_tokens / 2) if self.chunked else 0.0
        return (self.num_attention_layers - len(chunked)) * mean_context + len(chunked) * within

    def attention_parameters(self, tensor_size: int = 1) -> int:
        """Return the number of weights in the attention matrices of one layer, on one of ``tensor_size`` tensor ranks.

        The heads' matrices are split over tensor ranks. The projections to the latents of
        multi-latent attention are whole on every rank.
        """
        hidden, heads = self.hidden_size, self.num_heads // tensor_size
        if not self.kv_lora_rank:
            gates = self.num_heads if self.output_gate else 0
            return hidden * (2 * (self.num_heads + self.num_kv_heads) + gates) * self.head_dim // tensor_size
        of_hidden = self.q_lora_rank + self.kv_lora_rank + self.rope_head_dim + heads * self.value_head_dim
        keys_and_values = self.head_dim - self.rope_head_dim + self.value_head_dim
        of_latents = (self.q_lora_rank or hidden) * self.head_dim + self.kv_lora_rank * keys_and_values
        return hidden * of_hidden + heads * of_latents

    def mixer_parameters(self, layer: int, tensor_size: int = 1) -> int:
        """Return the number of weights in the matrices of a layer's attention, or of its gated delta net.

        A gated delta net's convolution is included.

        tensor_size: the number of tensor ranks; the weights of one rank are counted.
        """
        if not self.has_delta_net(layer):
            return self.attention_parameters(tensor_size)
        delta = self.delta
        projections = self.hidden_size * (delta.projected_width + delta.value_width)
        return (projections + delta.convolved_width * delta.conv_tokens) // tensor_size

    @property
    def score_width(self) -> float:
        """Return half the sum of the widths of q and v over all heads, the factor w of attention's cost.

        In a layer, attention over a causal sequence of T tokens takes w · T² multiply-adds.
        """
        return self.num_heads * (self.head_dim + (self.value_head_dim or self.head_dim)) / 2

    @property
    def cached_elements(self) -> int:
        """Return the number of elements per token and layer in an engine's KV cache: keys and values, or latents."""
        if self.kv_lora_rank:
            return self.kv_lora_rank + self.rope_head_dim
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def mean_token_cost(self) -> float:
        """Return the ``token_cost`` of a layer, as the mean over the layers."""
        return sum(map(self.token_cost, range(self.num_layers))) / self.num_layers

    def token_cost(self, layer: int) -> float:
        """Return the multiply-adds of one token in layer ``layer``, attention's scores left out.

        They are one for each weight that the token passes, and those of a gated delta net's rule.
        """
        return self.passed_parameters(layer) + (self.delta.rule_cost if self.has_delta_net(layer) else 0.0)

    def passed_parameters(self, layer: int) -> int:
        """Return the number of matrix weights that one token passes through in layer ``layer``.

        In a mixture these are the weights of ``experts_per_token`` experts, the shared expert and its
        gate, the router and attention.
        """
        if self.num_experts and not self.has_mixture(layer):
            width = 3 * self.dense_ffn_hidden_size
        else:
            mlps = self.experts_per_token if self.num_experts else 1
            width = self.mlp_matrices * (self.ffn_hidden_size * mlps + self.shared_ffn_hidden_size) + self.num_experts
            width += self.shared_gate
        return self.mixer_parameters(layer) + self.hidden_size * width

    def rank_shares(self, pipeline: int) -> tuple[tuple[float, float, float], ...]:
        """Return (cost of the layers, their number, the number with attention) of each pipeline rank.

        All model chunks of a rank are counted. A layer's cost is its ``token_cost``, divided by the
        mean over all layers.

        pipeline: the number of pipeline ranks; stage s is on rank s modulo ``pipeline``.
        """
        shares = []
        for rank in range(pipeline):
            layers = [x for stage in range(rank, self.num_stages, pipeline) for x in self.layers_on(stage)]
            cost = sum(map(self.token_cost, layers)) / self.mean_token_cost
            with_attention = sum(not self.has_delta_net(layer) for layer in layers)
            shares.append((cost, float(len(layers)), float(with_attention)))
        return tuple(shares)

    @property
    def square_share(self) -> float:
        """Return s: in a layer with attention, attention over a causal sequence of T tokens costs s · T².

        The unit of cost is one token's pass through an average layer, its scores left out.
        """
        return self.score_width / self.mean_token_cost

    @property
    def head_layers(self) -> float:
        """Return the LM head's cost per token as a multiple of an average layer's (``mean_token_cost``)."""
        return self.head_cost() / self.mean_token_cost

    def head_cost(
        self, loss_tokens: float = 1.0, tokens: float = 1.0, *, times: float = 1.0, columns: int | None = None
    ) -> float:
        """Return the cost of the last matrix (LM head or value head) per token, in multiply-adds.

        loss_tokens, tokens: of ``tokens`` tokens, only the ``loss_tokens`` tokens with a loss go
            through the matrix. The cost is divided by ``tokens``.
        times: how often a token with a loss goes through the matrix.
        columns: the matrix's columns; None for the vocabulary without padding, or for a value
            head's single column.
        """
        columns = columns or (1 if self.value_head else self.vocab_size)
        return self.hidden_size * columns * times * loss_tokens / tokens

    def with_adapters(self, lora: LoraConfig) -> ModelShape:
        """Return the same shape with the settings of ``lora``'s adapters; the shape itself if ``lora.rank`` is None."""
        if lora.rank is None:
            return self
        return dataclasses.replace(self, lora_rank=lora.rank, lora_alpha=lora.alpha, lora_targets=tuple(lora.targets))
