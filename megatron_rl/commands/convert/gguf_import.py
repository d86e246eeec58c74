"""The conversion of a GGUF file to a Hugging Face directory, for `megatron-rl convert import --gguf`.

The gguf library dequantizes one tensor at a time to float32, which is then cast to the wanted
dtype. The same library's table maps the tensors' names, and transformers makes the tokenizer.
transformers 5.19 (``load_gguf_checkpoint``) calls the same library, so every tensor is equal to the
bit to what transformers loads.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import numpy as np
import torch

from megatron_rl.checkpoint.convert import WIDER, appearing
from megatron_rl.commands.convert.gguf_file import GgufFile, gguf_library
from megatron_rl.commands.convert.gguf_keys import added_tokens, check_keys, check_kind, rope_scaling, single
from megatron_rl.commands.convert.source import read_model
from megatron_rl.errors import ConfigError, quoted
from megatron_rl.json_text import check, field
from megatron_rl.weights.mapping import hf_size
from megatron_rl.weights.model_shape import ModelShape
from megatron_rl.weights.reader import check_finite, used_names
from megatron_rl.weights.shards import Planned, ShardWriter

# general.architecture → the class that config.json names; llama.cpp's mistral files say llama too.
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
# tokenizer.ggml.pre → how text is cut before merges. Transformers (5.19) cuts the names of SPLITS as the model was
# trained to, and every unknown name as GPT-2 does. DIGITS first cut off each digit (llama.cpp llama-vocab.cpp).
SPLITS = ("default", "gpt-2", "llama-bpe", "llama3", "llama-v3", "falcon3", "tekken", "qwen2", "deepseek-r1-qwen")
DIGITS = ("smollm",)
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
STOPS = ("eos_token_id", "eot_token_id", "eom_token_id")

Progress = Callable[[int], None]


def import_gguf(
    file: GgufFile,
    target: pathlib.Path,
    *,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
    progress: Progress = lambda _: None,
) -> dict:
    """Write the model of a GGUF file to the Hugging Face directory ``target``; return a JSON-able report.

    dtype: the dtype of the written tensors; they are dequantized to float32 first.
    shard_bytes: the largest size of a safetensors file.
    overwrite: whether an existing ``target`` is replaced.
    progress: called after each tensor with the number of bytes written for it.

    Raises ConfigError, naming the file, if it is damaged, or of an unsupported architecture. Raises
    it also if the tensors do not fit the model that the file's keys describe.
    """
    fields, generation = config_fields(file, dtype)
    with appearing(target, overwrite=overwrite) as partial:
        write_json(partial / "config.json", fields)
        write_json(partial / "generation_config.json", generation)
        _, shape = read_model(partial)
        names = match_tensors(file, shape)
        write_tokenizer(file, partial, shape.vocab_size)
        planned = [Planned(name=name, shape=hf_size(shape, name), dtype=dtype) for name in names]
        writer = ShardWriter(partial, planned, shard_bytes)
        try:
            for name, stored in names.items():
                tensor = read_tensor(file, stored, shape, dtype)
                writer.add(name, tensor)
                progress(tensor.nbytes)
                del tensor  # before the next one is read
            files = writer.finish()
        finally:
            writer.abandon()
    num_bytes = sum(tensor.num_bytes for tensor in planned)
    return {
        "wrote": str(target),
        "family": shape.family,
        "tensors": len(names),
        "bytes": num_bytes,
        "files": files,
        "types": sorted({place.type_name for place in file.tensors.values()}),
    }


def write_json(path: pathlib.Path, fields: dict) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def shortest(value: float) -> float:
    """Return the shortest decimal number with the same float32 value: 9.999999747378752e-06 → 1e-05."""
    return float(str(np.float32(value)))


def config_fields(file: GgufFile, dtype: torch.dtype) -> tuple[dict, dict]:
    """Return (fields of config.json, fields of generation_config.json), two dicts made from the file's keys.

    dtype: the dtype that config.json names.
    """
    values, where = file.values, str(file.path)
    family = field(values, "general.architecture", str, where)
    if family not in CLASSES:
        raise ConfigError(
            f"{where} holds a {quoted(family)} model; import --gguf reads {', '.join(CLASSES)}: for another, convert "
            "the Hugging Face directory that it was made from"
        )
    check_kind(file)
    # The model's sizes.
    fields = {name: field(values, f"{family}.{key}", int, where, least=1, most=2**40) for key, name in SIZES.items()}
    heads = fields["num_attention_heads"]
    groups = single(file, f"{family}.attention.head_count_kv", int, heads, least=1)
    eps = field(values, f"{family}.attention.layer_norm_rms_epsilon", float, where, least=1e-30, most=1.0)
    tokens = field(values, "tokenizer.ggml.tokens", list, where)
    if len(tokens) != (different := len(set(tokens))):
        raise ConfigError(f"{where} has {len(tokens)} tokens, and only {different} of them are different")
    fields |= {"num_key_value_heads": groups, "rms_norm_eps": shortest(eps), "vocab_size": len(tokens)}
    head_dim = fields["hidden_size"] // heads
    if family != "qwen2":
        head_dim = fields["head_dim"] = single(file, f"{family}.attention.key_length", int, head_dim, least=1)
    check_keys(file, family, head_dim)
    # Special tokens, by their ids.
    special = {
        key: check(values[f"tokenizer.ggml.{key}"], f"{where}: {key}", int, least=0, most=len(tokens) - 1)
        for key in ("bos_token_id", "padding_token_id", "unknown_token_id", *STOPS)
        if f"tokenizer.ggml.{key}" in values
    }
    stops = list(dict.fromkeys(special[key] for key in STOPS if key in special))
    ids = {"bos_token_id": special.get("bos_token_id"), "pad_token_id": special.get("padding_token_id")}
    ids["eos_token_id"] = stops[0] if len(stops) == 1 else stops or None
    head = {"architectures": [CLASSES[family]], "model_type": family, "dtype": str(dtype).removeprefix("torch.")}
    tied = {"tie_word_embeddings": "output.weight" not in file.tensors, "rope_parameters": rope(file, family)}
    return head | fields | tied | ids, ids


def rope(file: GgufFile, family: str) -> dict:
    """Return the dict ``rope_parameters`` of config.json, made from the file's keys ``<family>.rope.*``."""
    base = shortest(single(file, f"{family}.rope.freq_base", float, 10000.0, least=1.0))
    if (factor := rope_scaling(file, family)) == 1.0:
        return {"rope_type": "default", "rope_theta": base}
    return {"rope_type": "linear", "rope_theta": base, "factor": shortest(factor)}


def match_tensors(file: GgufFile, shape: ModelShape) -> dict[str, str]:
    """Return {Hugging Face name: name in the file} of every tensor, in the order of the model's layers.

    Raises ConfigError if the file lacks a tensor, has one of a wrong shape, or has one that the
    model does not use.
    """
    gguf = gguf_library()
    file.check_types()
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == shape.family)
    table = gguf.get_tensor_name_map(architecture, shape.num_layers)
    names: dict[str, str] = {}
    for name in sorted(used_names(shape), key=by_layer):
        base, _, kind = name.rpartition(".")
        stored = f"{table.get_name(base)}.{kind}"
        if stored not in file.tensors:
            raise ConfigError(f"{file.path} holds no tensor {stored}; its keys describe a model that has one ({name})")
        if file.tensors[stored].shape != hf_size(shape, name):
            raise ConfigError(
                f"{file.path}: {stored} has shape {file.tensors[stored].shape}, and its keys ask for "
                f"{hf_size(shape, name)}"
            )
        names[name] = stored
    if unread := sorted(file.tensors.keys() - set(names.values())):
        raise ConfigError(
            f"{file.path} holds {len(unread)} tensors that the {shape.family} model is not made of, "
            f"{', '.join(unread[:3])}"
        )
    return names


def by_layer(name: str) -> tuple[int, str]:
    """Return a sort key that orders tensors: the embedding, then the layers, then the final norm and the LM head.

    name: a tensor's Hugging Face name.
    """
    parts = name.split(".")
    layer = int(parts[2]) if parts[1] == "layers" else -1 if parts[1] == "embed_tokens" else 1 << 30
    return layer, name


def read_tensor(file: GgufFile, stored: str, shape: ModelShape, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in Hugging Face's layout, in ``dtype``; raise ConfigError if it has a number that is not finite.

    stored: the tensor's name in the file.
    shape: the sizes of the model.
    """
    numbers = file.read(stored)
    heads = {"attn_q": shape.num_heads, "attn_k": shape.num_kv_heads}.get(stored.split(".")[-2])
    if shape.family == "llama" and heads is not None:
        numbers = unpermute(numbers, heads)
    whole = torch.from_numpy(np.array(numbers))
    tensor = whole.to(dtype)
    check_finite(tensor, lambda: [(f"{stored} of {file.path}", whole)], WIDER)
    return tensor


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of a q or k projection reordered from llama.cpp's order to Hugging Face's.

    rows: [heads · head_dim, ...].

    llama.cpp's rotary embedding rotates neighbouring pairs of a head's rows. Hugging Face's llama
    rotates row i with row i + head_dim / 2. llama.cpp's converter (convert_hf_to_gguf.py,
    LlamaModel.permute) therefore interleaves the two halves of each head. With one head of 4 rows,
    a, c, b, d become a, b, c, d.
    """
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_tokenizer(file: GgufFile, folder: pathlib.Path, vocab_size: int) -> None:
    """Write the tokenizer's files and the chat template to ``folder``, built by transformers from the GGUF file.

    Raises ConfigError if no tokenizer of ``vocab_size`` tokens can be made, or if the file names an
    unknown way of splitting text into words.
    """
    from tokenizers import Tokenizer, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    where = str(file.path)
    cut = single(file, "tokenizer.ggml.pre", str, "default")
    byte_level = field(file.values, "tokenizer.ggml.model", str, where) == "gpt2"
    if byte_level and cut not in SPLITS + DIGITS:
        raise ConfigError(
            f"{where}: tokenizer.ggml.pre={quoted(cut)} cuts text in a way that is not known here; known are "
            f"{', '.join(SPLITS + DIGITS)}"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.path.parent, gguf_file=file.path.name, local_files_only=True)
    except Exception as error:  # of many classes: a list that is too short, a merge of one part, an unknown model
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{where}: no tokenizer can be made from it: {type(error).__name__}: {reason}") from error
    # Transformers adds the class's own unknown token if the file names none; the model has no row for it.
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < vocab_size]
    backend = Tokenizer.from_str(json.dumps(state))
    if (found := backend.get_vocab_size()) != vocab_size:
        raise ConfigError(f"{where}: its tokenizer has {found} tokens, and the embedding {vocab_size} rows")
    if byte_level and cut in DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    tokens = file.values["tokenizer.ggml.tokens"]
    special = {
        name: tokens[file.values[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in SPECIAL.items()
        if f"tokenizer.ggml.{key}_token_id" in file.values
    }
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **special, **added_tokens(file))
    made.chat_template = single(file, "tokenizer.chat_template", str, "") or None
    made.save_pretrained(folder)
