"""The bytes on one GPU of each pipeline stage: weights, reference, gradients, optimizer, activations, logits.

- Weights are counted from the shape and equal those of the built model
  (tests/tools/test_simulate_cluster.py).
- Gradients lie in one float32 buffer per rank (``grad_reduce_in_fp32``) and are not sharded.
- AdamW keeps two float32 moments per parameter and, for bfloat16 weights, a float32 master copy.
  Muon keeps one moment of the weights in matrices, and AdamW's two of the others.
  ``optimizer.distributed`` shards all of them over data and context parallel ranks. With adapters
  (``lora.rank``) the frozen weights have neither gradients nor optimizer state.
- A critic on the same GPUs keeps its own weights, gradients and optimizer state. Policy and critic
  are updated in turns. So only the activations and logits of the one that needs more are counted.
- Activations are the elements that autograd saves per token and layer, with an attention that saves
  no scores.

The sum leaves out allocator fragments, communication buffers, and CUDA itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.model.logprob.chunks import bytes_per_logit, default_chunk_tokens
from megatron_rl.planning.timeline import warmup_forwards
from megatron_rl.simulator.degrees import Degrees
from megatron_rl.simulator.placed import PlacedModel
from megatron_rl.weights.mapping import pair_entries, shard_size, stage_entries, target_entries
from megatron_rl.weights.matrices import is_matrix
from megatron_rl.weights.model_shape import DELTA_CHUNK, DeltaNetShape, ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Holds the bytes that the trainer needs on a GPU of one pipeline stage.

    stage: the number of the stage.
    layers: the number of its layers, over all its model chunks.
    reference: a reference's weights if ``reference.placement=device``, and a teacher's weights.
    optimizer: the optimizer state under the configured ``optimizer.distributed``.
    optimizer_sharded, optimizer_whole: the state with and without ``optimizer.distributed``.
    activations: the activations under the configured recompute.
    activations_kept, activations_recomputed: the activations without and with full recompute.
    critic_weights: the weights of a critic on the same GPU.
    critic_state: that critic's gradients and optimizer state.
    critic_working: that critic's activations and values during its update; the policy holds no
        activations at that time.
    """

    stage: int
    layers: int
    weights: int
    reference: int
    gradients: int
    optimizer: int
    optimizer_sharded: int
    optimizer_whole: int
    activations: int
    activations_kept: int
    activations_recomputed: int
    logits: int
    critic_weights: int = 0
    critic_state: int = 0
    critic_working: int = 0

    @property
    def state(self) -> int:
        """Return the bytes that stay on the GPU between updates: everything except activations and logits."""
        own = self.weights + self.reference + self.gradients + self.optimizer
        return own + self.critic_weights + self.critic_state

    @property
    def total(self) -> int:
        return self.state + max(self.activations + self.logits, self.critic_working)

    def kept_while_generating(self, takes_turns: bool) -> int:
        """Return the bytes that the trainer keeps on the GPU while an engine generates there.

        takes_turns: whether gradients and optimizer state are moved off the GPU meanwhile
            (rollout/colocation.py).
        """
        offloaded = self.gradients + self.optimizer + self.critic_state
        return self.state - (offloaded if takes_turns else 0)


def layer_parameters(shape: ModelShape, degrees: Degrees, layer: int) -> tuple[int, int]:
    """Return the number of a layer's parameters on one rank, as (outside the experts, in the rank's experts)."""
    tensor, hidden, heads = degrees.tensor_size, shape.hidden_size, shape.num_heads
    attention, norms = shape.mixer_parameters(layer, tensor), 2 * hidden
    if shape.has_delta_net(layer):
        norms += shape.delta.value_head_dim + 2 * shape.delta.value_heads // tensor  # the norm, A_log and dt_bias
    else:
        norms += (2 * shape.head_dim if shape.qk_norm else 0) + shape.q_lora_rank + shape.kv_lora_rank
        attention += (heads + 2 * shape.num_kv_heads) * shape.head_dim // tensor if shape.qkv_bias else 0
    if shape.post_norms:
        norms += (heads + shape.num_kv_heads) * shape.head_dim // tensor
    if shape.sandwich_norms:
        norms += 2 * hidden
    if shape.sinks:
        attention += heads // tensor
    if not shape.has_mixture(layer):
        width = shape.mlp_matrices * (shape.dense_ffn_hidden_size or shape.ffn_hidden_size)
        return attention + norms + width * hidden // tensor, 0
    expert = 3 * hidden * shape.ffn_hidden_size // degrees.expert_tensor_size
    router = shape.num_experts * hidden
    if shape.linear_bias:
        attention, router = attention + hidden, router + shape.num_experts
        expert += 2 * shape.ffn_hidden_size // degrees.expert_tensor_size + hidden
    shared = 3 * hidden * shape.shared_ffn_hidden_size // tensor + (hidden if shape.shared_gate else 0)
    return attention + norms + router + shared, shape.num_experts // degrees.expert_size * expert


def layers_of(shape: ModelShape, degrees: Degrees, stage: int) -> list[int]:
    """Return the numbers of the layers on a pipeline stage, over all its model chunks."""
    chunks = range(stage, shape.num_stages, degrees.pipeline_size)
    return [layer for chunk in chunks for layer in shape.layers_on(chunk)]


def stage_parameters(shape: ModelShape, degrees: Degrees, stage: int) -> tuple[int, int]:
    """Return the number of parameters on one rank of a pipeline stage, as (outside the experts, in its experts).

    A tied embedding is counted on the first and on the last stage. A critic has one row of weights
    (its value head) in place of the LM head.
    """
    layers = [layer_parameters(shape, degrees, layer) for layer in layers_of(shape, degrees, stage)]
    dense, experts = sum(own for own, _ in layers), sum(own for _, own in layers)
    vocabulary = shape.padded_vocab_size // degrees.tensor_size * shape.hidden_size
    last = stage == degrees.pipeline_size - 1
    if stage == 0:
        dense += vocabulary
    if last:
        dense += shape.hidden_size
        if shape.value_head:
            dense += shape.hidden_size
        elif not (shape.tied_embeddings and degrees.pipeline_size == 1):
            dense += vocabulary
    return dense, experts


def stage_adapters(model: PlacedModel, stage: int) -> tuple[int, int]:
    """Return the number of LoRA parameters on one rank of a pipeline stage, as (outside the experts, in its experts).

    Both are 0 if every weight is trained.
    """
    shape, degrees = model.shape, model.degrees
    adapted, dense, experts = shape.with_adapters(model.lora), 0, 0
    for layer in layers_of(shape, degrees, stage):
        for weight in target_entries(adapted, layer, shape.num_experts or 1):  # one expert's targets
            ranks = degrees.tensor_size if weight.expert is None else degrees.expert_tensor_size
            count = sum(math.prod(shard_size(entry, adapted, ranks)) for entry in pair_entries(weight))
            if weight.expert is None:
                dense += count
            else:
                experts += count * (shape.num_experts // degrees.expert_size)
    return dense, experts


def stage_matrices(model: PlacedModel, stage: int) -> tuple[int, int]:
    """Return how many of a rank's parameters Muon steps, as (outside the experts, in the rank's experts).

    Both are 0 under AdamW.
    """
    shape, degrees, dense, experts = model.shape, model.degrees, 0, 0
    if model.algorithm != "muon":
        return 0, 0
    for chunk in range(stage, shape.num_stages, degrees.pipeline_size):
        for entry in stage_entries(shape, chunk, shape.num_experts or 1):  # one expert's entries
            if not is_matrix(entry, shape):
                continue
            if entry.expert is None:
                dense += math.prod(shard_size(entry, shape, degrees.tensor_size))
            else:
                each = math.prod(shard_size(entry, shape, degrees.expert_tensor_size))
                experts += each * (shape.num_experts // degrees.expert_size)
    return dense, experts


def kept_elements(model: PlacedModel, layer: int) -> float:
    """Return the number of elements that autograd saves in a layer per token of a rank.

    The list below is for layers without fused kernels: all layers in float32, and in bfloat16 those
    that ``takes_fused_kernels`` excludes. ``fused_kept_elements`` counts the others.

    - Each of the two norms saves input, normalised values and output: 6 · hidden_size together,
      split by sequence parallelism. Norms after attention and MLP save input and normalised values.
    - Attention saves the joint projection that includes v, the rotated q and k, its output, and the
      cosines and sines. Norms of q and k also save their normalised values and the input of q's
      norm, a copy. The input of k's norm is no copy but a part of the saved projection.
    - Multi-latent attention saves q, k, v and its output, each at q's width. If v's width differs,
      the output is also saved at v's width. The norms of the latents count like the other norms.
    - The MLP saves gate and up, then the activated gate, up again, and their product. If gate and up
      are bounded, it saves three more: the bounded gate, its sigmoid and the bounded up.
    - A gated delta net saves what ``delta_kept_elements`` counts, in place of attention's. Gated
      attention also saves its output before the gates, the gates, and their sigmoids.
    - A mixture of experts saves each token's input and output once for each expert that the token is
      sent to. Every rank's experts are assumed to get equally many tokens. Under sequence
      parallelism a tensor rank sends only its own tokens; all expert-tensor ranks get the same
      ones.
    """
    shape, degrees = model.shape, model.degrees
    if model.dtype == "bfloat16" and takes_fused_kernels(shape):
        return fused_kept_elements(model, layer)
    tensor, hidden, heads, kv_heads = degrees.tensor_size, shape.hidden_size, shape.num_heads, shape.num_kv_heads
    normed = shape.qk_norm or shape.post_norms
    attention = 3 * (heads + kv_heads) / tensor + 4 + ((2 * heads + kv_heads) / tensor if normed else 0)
    attention *= shape.head_dim
    attention += 3 * heads * shape.head_dim / tensor if shape.output_gate else 0
    if shape.has_delta_net(layer):
        attention = delta_kept_elements(shape.delta, tensor)
    norms = (10 if shape.sandwich_norms else 6) * hidden / model.sequence_shards
    if shape.kv_lora_rank:
        apart = shape.value_head_dim if shape.value_head_dim != shape.head_dim else 0
        attention = heads * (4 * shape.head_dim + apart) / tensor + 4 * shape.rope_head_dim
        latents = 3 * (shape.q_lora_rank + shape.kv_lora_rank) + shape.rope_head_dim
        norms += latents / model.sequence_shards
    if not shape.has_mixture(layer):
        return norms + attention + 5 * (shape.dense_ffn_hidden_size or shape.ffn_hidden_size) / tensor
    choices = shape.experts_per_token * degrees.expert_tensor_size / tensor
    widths = 8 if shape.swiglu_limit else 5
    routed = choices * (2 * hidden + widths * shape.ffn_hidden_size / degrees.expert_tensor_size)
    return norms + attention + routed + 5 * shape.shared_ffn_hidden_size / tensor


def delta_kept_elements(delta: DeltaNetShape, tensor_size: int = 1) -> float:
    """Return the number of elements that autograd saves in a gated delta net per token, without the projection's input.

    - The convolution saves its input: q, k and v.
    - The rule saves, for chunks of C tokens that are all full, q and k after their norms; the
      values, each token's u (model/delta_net/rule.py), and the inverse of a chunk's system, C for
      each head of v; and each chunk's state.
    - The gated norm saves its input and the gates; the projection back saves their product.
    - Seven numbers per head of v: decays, steps, and what they are made of.

    tensor_size: the number of tensor ranks; the elements of one rank are counted.
    """
    wide = 5 + delta.key_head_dim / DELTA_CHUNK
    narrow = delta.convolved_width + 2 * delta.key_width
    return (narrow + wide * delta.value_width + (DELTA_CHUNK + 7) * delta.value_heads) / tensor_size


def takes_fused_kernels(shape: ModelShape) -> bool:
    """Return whether fused kernels apply to the layers: norms only before attention and MLP, and plain SwiGLU.

    Layers with latents (multi-latent attention) are excluded too.
    """
    return not (shape.post_norms or shape.sandwich_norms or shape.swiglu_limit or shape.gelu or shape.kv_lora_rank)


def fused_kept_elements(model: PlacedModel, layer: int) -> float:
    """Return the number of elements that autograd saves in a layer per token of a rank, with fused norms and SwiGLU.

    - The two norms: each saves its input, and the matrix product after a norm saves the norm's
      output, 4 · hidden_size in all.
    - SwiGLU saves gate and up; the matrix product after SwiGLU saves their product.
    - With norms of q and k, q's norm saves its input, a copy. The input of k's norm is no copy but a
      part of the saved projection.
    - Cosines and sines are not counted: all layers share one copy per micro-batch.
    - An expert's output is not saved, since its SwiGLU already applies the router's weights.
    """
    shape, degrees = model.shape, model.degrees
    tensor, hidden, heads, kv_heads = degrees.tensor_size, shape.hidden_size, shape.num_heads, shape.num_kv_heads
    attention = (3 * (heads + kv_heads) / tensor + (heads / tensor if shape.qk_norm else 0)) * shape.head_dim
    attention += 3 * heads * shape.head_dim / tensor if shape.output_gate else 0
    if shape.has_delta_net(layer):
        attention = delta_kept_elements(shape.delta, tensor)
    norms = 4 * hidden / model.sequence_shards
    if not shape.has_mixture(layer):
        return norms + attention + 3 * (shape.dense_ffn_hidden_size or shape.ffn_hidden_size) / tensor
    choices = shape.experts_per_token * degrees.expert_tensor_size / tensor
    routed = choices * (hidden + 3 * shape.ffn_hidden_size / degrees.expert_tensor_size)
    return norms + attention + routed + 3 * shape.shared_ffn_hidden_size / tensor


def in_flight(degrees: Degrees, stage: int, microbatches: int) -> float:
    """Return the most micro-batches whose activations a rank of a pipeline stage holds at once; may be a fraction.

    On a rank with V model chunks, a micro-batch's activations in one chunk count as 1/V micro-batch.

    microbatches: the most micro-batches that a data-parallel rank runs in a step.
    """
    virtual = degrees.virtual_size
    warm = warmup_forwards(stage, degrees.pipeline_size, virtual, microbatches, degrees.pipeline_size)
    return min(warm + 1, microbatches * virtual) / virtual


def stage_memory(model: PlacedModel, stage: int, *, tokens: int, loss_tokens: int, microbatches: int) -> StageMemory:
    """Return the memory of one pipeline stage.

    tokens, loss_tokens: the numbers of tokens and of loss tokens of the largest micro-batch.
    microbatches: the most micro-batches that a data-parallel rank runs.
    """
    # Parameters, and their optimizer state.
    shape, degrees, size = model.shape, model.degrees, model.element_bytes
    dense, experts = stage_parameters(shape, degrees, stage)
    adapters = (0, 0) if shape.value_head else stage_adapters(model, stage)
    weights = dense + experts + sum(adapters)
    if any(adapters):
        dense, experts = adapters  # only the adapters are trained
    masters = 4 if size == 2 else 0
    one_moment = stage_matrices(model, stage)
    states = [(8 + masters) * n - 4 * by_muon for n, by_muon in zip((dense, experts), one_moment, strict=True)]
    whole = sum(states)
    sharded = round(states[0] / (degrees.data_size * degrees.context_size) + states[1] / degrees.expert_data_size)
    gradient_bytes = 4 if model.float32_gradients else size
    # Activations of the micro-batches in flight, as autograd keeps them and under full recompute.
    own_tokens, flying = tokens / degrees.context_size, in_flight(degrees, stage, microbatches)
    each = [kept_elements(model, layer) for layer in layers_of(shape, degrees, stage)]
    layer = own_tokens * max(each, default=0.0) * size  # recomputation keeps one such layer whole
    boundary = own_tokens * shape.hidden_size * size / model.sequence_shards
    at_once = model.recompute_layers
    all_kept = flying * own_tokens * sum(each) * size
    recomputed = flying * len(each) * boundary / at_once + at_once * layer
    is_last = stage == degrees.pipeline_size - 1 and microbatches
    return StageMemory(
        stage=stage,
        layers=len(each),
        weights=weights * size,
        reference=weights * size * model.keeps_reference,
        gradients=(dense + experts) * gradient_bytes,
        optimizer=sharded if model.shards_optimizer else whole,
        optimizer_sharded=sharded,
        optimizer_whole=whole,
        activations=round(recomputed if model.full_recompute else all_kept),
        activations_kept=round(all_kept),
        activations_recomputed=round(recomputed),
        logits=round(_logit_bytes(model, loss_tokens)) if is_last else 0,
    )


def _logit_bytes(model: PlacedModel, loss_tokens: int) -> float:
    """Return the bytes of logits that a rank of the last pipeline stage holds at once, for part of ``loss_tokens``."""
    shape, degrees, size = model.shape, model.degrees, model.element_bytes
    columns = 1 if shape.value_head else shape.padded_vocab_size // degrees.tensor_size
    # torch's CUDA builds, for which the forecast is made, include Triton
    kernel = "triton" if model.logprob_kernel == "auto" else model.logprob_kernel
    rows = min(loss_tokens / degrees.context_size, default_chunk_tokens("cuda", columns, kernel, size))
    return rows * columns * bytes_per_logit(kernel, size)


def beside_teacher(stage: StageMemory, teacher: ModelShape, policy: PlacedModel) -> StageMemory:
    """Return a pipeline stage's memory plus the weights of the same stage of a teacher, in the policy's dtype."""
    held = sum(stage_parameters(teacher, policy.degrees, stage.stage)) * policy.element_bytes
    return dataclasses.replace(stage, reference=stage.reference + held)


def beside_critic(
    policy: Sequence[StageMemory], critic: Sequence[StageMemory], num_ranks: int
) -> tuple[StageMemory, ...]:
    """Return the memory of the policy's stages with a critic on the same ranks added.

    The critic's pipeline may have another number of stages, so that one policy stage shares its ranks
    with several critic stages. Its entry is then that of the GPU of the stage that needs the most.

    num_ranks: the number of ranks, which both models have in common.
    """
    stages = []
    for number, stage in enumerate(policy):
        ranks = range(number * num_ranks // len(policy), (number + 1) * num_ranks // len(policy))
        met = sorted({rank * len(critic) // num_ranks for rank in ranks})
        both = [
            dataclasses.replace(
                stage,
                critic_weights=critic[other].weights,
                critic_state=critic[other].gradients + critic[other].optimizer,
                critic_working=critic[other].activations + critic[other].logits,
            )
            for other in met
        ]
        stages.append(max(both, key=lambda memory: memory.total))
    return tuple(stages)
