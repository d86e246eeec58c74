"""Writes small GGUF files as llama.cpp's converter would, for tests of `megatron-rl convert import --gguf`."""

import pathlib

import numpy as np
import torch

from tests.reference import tiny_model

# By the end of a tensor's name in the file; every other tensor is F32.
TYPES = {
    "token_embd.weight": "Q8_0",
    "attn_q.weight": "Q4_1",
    "attn_k.weight": "F16",
    "attn_v.weight": "Q8_0",
    "attn_output.weight": "Q4_0",
    "ffn_up.weight": "BF16",
    "ffn_down.weight": "Q4_1",
}
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
CHARACTERS = [chr(i) for i in range(33, 127)]  # as a byte-level tokenizer spells them; Ġ is the space
TOKENS = ["<|end|>", "<|user|>", "Ġ", "ab", "Ġa", *CHARACTERS]  # 99
TEMPLATE = "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"


def stored_name(name: str) -> str:
    """Return a Hugging Face tensor's name in a GGUF file."""
    if not name.startswith("model.layers."):
        head = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
        base, _, kind = name.rpartition(".")
        return f"{head[base]}.{kind}"
    _, _, layer, rest = name.split(".", 3)
    base, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{LAYER_NAMES[base]}.{kind}"


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Permute rows as llama.cpp's converter does (convert_hf_to_gguf.py, LlamaModel.permute)."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: pathlib.Path, family: str = "llama", *, keys: dict | None = None, tensors: dict | None = None
) -> dict[str, torch.Tensor]:
    """Write a model with random weights, and return the tensors that the file stands for, under Hugging Face's names.

    keys: values that replace the file's, by key; None leaves a key out.
    tensors: [..] float32 arrays that replace the file's, by the name in the file; None leaves a tensor out.
    """
    import gguf

    config, model = tiny_model(family)
    architecture = config.model_type
    values = {
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{architecture}.rope.freq_base": config.rope_parameters["rope_theta"],
        f"{architecture}.vocab_size": len(TOKENS),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(TOKENS) - 2)],
        "tokenizer.ggml.merges": ["a b", "Ġ a"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }
    if family == "qwen3":
        values[f"{architecture}.attention.key_length"] = config.head_dim
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (values | (keys or {})).items():
        if value is not None:
            kind = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
            writer.add_key_value(key, value, kind, sub_type=list_type(value))
    wanted = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored, rows = stored_name(name), tensor.float().numpy()
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(stored.split(".")[-2])
        in_file = permuted(rows, heads) if architecture == "llama" and heads else rows
        in_file = (tensors or {}).get(stored, in_file)
        if in_file is None:
            continue
        kind = gguf.GGMLQuantizationType[next((t for end, t in TYPES.items() if stored.endswith(end)), "F32")]
        writer.add_tensor(stored, gguf.quantize(in_file, kind), raw_dtype=kind)
        wanted[name] = torch.from_numpy(gguf.dequantize(gguf.quantize(rows, kind), kind).copy())
    for stored in (tensors or {}).keys() - {stored_name(name) for name in model.state_dict()}:
        writer.add_tensor(stored, tensors[stored])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return wanted


def list_type(value: object):
    """Return the type of a list's elements, None for any other value."""
    import gguf

    if not isinstance(value, list):
        return None
    return gguf.GGUFValueType.INT32 if isinstance(value[0], int) else gguf.GGUFValueType.STRING
