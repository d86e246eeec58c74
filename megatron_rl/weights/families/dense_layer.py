"""A plain Llama layer: the mapping of its parameters to Hugging Face (``Entry``), and its tensors' shapes."""

from __future__ import annotations

from megatron_rl.weights.entry import Entry, Layout
from megatron_rl.weights.model_shape import ModelShape

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def attention_entries(shape: ModelShape) -> tuple[Entry, ...]:
    """Return an ``Entry`` (mapping to Hugging Face) for each parameter of grouped-query attention.

    The norm before attention is included. Biases and norms of q and k are included if the shape
    says that the model has them.
    """
    fused = shape.layer_spec == "transformer_engine"
    norm = "self_attention.linear_qkv.layer_norm_weight" if fused else "input_layernorm.weight"
    entries = [
        Entry(megatron=norm, hf=("input_layernorm.weight",), layout=Layout.REPLICATED),
        Entry(
            megatron="self_attention.linear_qkv.weight", hf=tuple(f"{part}.weight" for part in _QKV), layout=Layout.QKV
        ),
        Entry(megatron="self_attention.linear_proj.weight", hf=("self_attn.o_proj.weight",), layout=Layout.COLUMNS),
    ]
    if shape.qkv_bias:
        biases = tuple(f"{part}.bias" for part in _QKV)
        entries.append(Entry(megatron="self_attention.linear_qkv.bias", hf=biases, layout=Layout.QKV))
    if shape.qk_norm:
        for part in "qk":
            entries.append(
                Entry(
                    megatron=f"self_attention.{part}_layernorm.weight",
                    hf=(f"self_attn.{part}_norm.weight",),
                    layout=Layout.REPLICATED,
                )
            )
    return tuple(entries)


def dense_layer(shape: ModelShape) -> tuple[Entry, ...]:
    """Return an ``Entry`` (mapping to Hugging Face) for each parameter of a layer with one MLP of gate, up and down."""
    return (*attention_entries(shape), *mlp_entries(shape))


def mlp_entries(shape: ModelShape) -> tuple[Entry, ...]:
    """Return an ``Entry`` (mapping to Hugging Face) for each parameter of an MLP and of the norm before it."""
    fused = shape.layer_spec == "transformer_engine"
    norm = "mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight"
    gate_up = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
    return (
        Entry(megatron=norm, hf=("post_attention_layernorm.weight",), layout=Layout.REPLICATED),
        Entry(megatron="mlp.linear_fc1.weight", hf=gate_up, layout=Layout.GATE_UP),
        Entry(megatron="mlp.linear_fc2.weight", hf=("mlp.down_proj.weight",), layout=Layout.COLUMNS),
    )


def attention_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return {Hugging Face name within the layer: shape} of grouped-query attention's tensors.

    With an output gate ``q_proj`` also has each head's gate, below the head's query.
    """
    q, kv, hidden = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, shape.hidden_size
    projected = 2 * q if shape.output_gate else q
    return {
        "self_attn.q_proj.weight": (projected, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.q_proj.bias": (q,),
        "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.weight": (hidden, q),
        "self_attn.q_norm.weight": (shape.head_dim,),
        "self_attn.k_norm.weight": (shape.head_dim,),
    }


def dense_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return {Hugging Face name within the layer: shape} of a layer's tensors, except norms over the hidden state."""
    hidden, ffn = shape.hidden_size, shape.ffn_hidden_size
    return attention_sizes(shape) | {
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
