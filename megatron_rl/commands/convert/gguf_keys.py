"""The check of a GGUF file's keys: each is used by `gguf_import.py`, has no effect, or raises an error that names it.

The meaning of a key is llama.cpp's (src/llama-model.cpp ``load_hparams``, src/llama-vocab.cpp
``load``, 2026). The names are the gguf library's (0.19 ``constants.py`` Keys).
"""

from __future__ import annotations

from typing import Any

from megatron_rl.commands.convert.gguf_file import GgufFile
from megatron_rl.errors import ConfigError, quoted
from megatron_rl.json_text import check

# Below "<architecture>.": the keys that gguf_import.py reads, or that llama.cpp shows without using them.
READ = {
    *("block_count", "embedding_length", "feed_forward_length", "context_length", "attention.head_count"),
    *("attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length", "rope.freq_base"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"),
    *("rope.scaling.original_context_length", "rope.scaling.finetuned"),  # yarn's, and keys that are only logged
}
# Keys with the values that change nothing in a Llama layer built here. For a scale or a cap, 0 means "none" in
# llama.cpp.
NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale"), (0, 1)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "nextn_predict_layers"), (0,)),
    **dict.fromkeys(("attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias"), (0,)),
    **dict.fromkeys(("attention.sliding_window", "expert_used_count", "pooling_type"), (0,)),
    **dict.fromkeys(("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"), (1,)),
    **dict.fromkeys(("rope.scaling.alpha", "rope.scaling.yarn_ext_factor"), (0,)),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "tensor_data_layout": ("Meta AI original pth",),
    "expert_count": (0,),
}
TOKENIZER = {
    *("model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token", "add_eos_token"),
    *("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id", "unknown_token_id", "padding_token_id"),
    # tokens of other tasks, which no text is cut into
    *("seperator_token_id", "mask_token_id", "cls_token_id", "prefix_token_id", "suffix_token_id", "middle_token_id"),
    *(f"fim_{part}_token_id" for part in ("pre", "suf", "mid", "pad", "rep", "sep")),
}
# Names, authors and licences; who quantized the file, and how; its parts; templates beside the model's own.
PREFIXES = ("general.", "quantize.", "mradermacher.", "split.", "tokenizer.chat_template", "tokenizer.huggingface.json")
# tokenizer.ggml.pre of the Llama 3 family, whose texts begin with BOS unless the file says otherwise
BEGINS = ("llama-bpe", "llama3", "llama-v3", "falcon3")


def single(file: GgufFile, key: str, kind: type, absent: Any, **bounds: float):
    """Return the value of a key, or ``absent`` if the file lacks the key.

    kind: the type that the value must have; if it is float, an integer passes too.
    bounds: ``least`` and ``most``, the smallest and the largest number allowed.

    Raises ConfigError if the value has another type or is out of bounds.
    """
    return check(file.values.get(key, absent), f"{file.path}: {key}", kind, **bounds)


def check_kind(file: GgufFile) -> None:
    """Raise ConfigError if the file is no whole model: an adapter, or one file of a split model."""
    if (kind := single(file, "general.type", str, "model")) != "model":
        raise ConfigError(
            f"{file.path} has general.type={quoted(kind)}, which is no whole model; name the model's file, an adapter "
            "merged into it (llama-export-lora)"
        )
    if (parts := single(file, "split.count", int, 1)) not in (0, 1):
        raise ConfigError(f"{file.path} is one of {parts} files; join them by llama-gguf-split --merge")


def check_keys(file: GgufFile, family: str, head_dim: int) -> None:
    """Raise ConfigError for the first key that changes the model and that the import would ignore.

    A key passes if the import reads it, if it only describes the file, or if its value has no
    effect on the model.

    family: the architecture, with which the names of its keys begin: ``llama``, ``qwen2``.
    head_dim: the width of an attention head, computed from other keys of the file.
    """
    bpe = file.values.get("tokenizer.ggml.model") == "gpt2"
    wanted = {f"{family}.{name}": values for name, values in NEUTRAL.items()} | {
        f"{family}.rope.dimension_count": (head_dim,),
        f"{family}.attention.key_length": (head_dim,),
        f"{family}.attention.value_length": (head_dim,),
        f"{family}.vocab_size": (len(file.values["tokenizer.ggml.tokens"]),),
        # A list of merges takes no space before a text; spm pieces do, as transformers' LlamaTokenizer makes them.
        "tokenizer.ggml.add_space_prefix": (False, True) if bpe else (True,),
        "tokenizer.ggml.remove_extra_whitespaces": (False,),
        "tokenizer.ggml.add_sep_token": (False,),
    }
    read = {f"{family}.{name}" for name in READ} | {f"tokenizer.ggml.{name}" for name in TOKENIZER}
    for key, value in file.values.items():
        if key in wanted:
            if not isinstance(value, int | float | str) or value not in wanted[key]:
                only = " or ".join(map(quoted, wanted[key]))
                raise ConfigError(
                    f"{file.path} has {quoted(key)[1:-1]}={quoted(value)}; only {only} is read. Convert the Hugging "
                    "Face directory that it was made from"
                )
        elif key not in read and not key.startswith(PREFIXES):
            raise ConfigError(
                f"{file.path} has {quoted(key)[1:-1]}={quoted(value)}, a key that import --gguf does not know: the "
                "model may be another than its other keys say. Convert the Hugging Face directory that it was made from"
            )


def rope_scaling(file: GgufFile, family: str) -> float:
    """Return the factor by which rotary positions are divided, 1.0 without scaling.

    As in llama.cpp, a missing scaling type means linear. A missing factor is taken from
    ``rope.scale_linear``, and a factor of 0 means no scaling.

    family: the architecture, with which the names of its keys begin.

    Raises ConfigError for any scaling but linear.
    """
    kind = single(file, f"{family}.rope.scaling.type", str, "linear")
    scaled_by = "the tensor rope_freqs.weight" if "rope_freqs.weight" in file.tensors else quoted(kind)
    if scaled_by not in ("'none'", "'linear'"):
        raise ConfigError(
            f"{file.path} scales its rotary frequencies by {scaled_by}, which config.json cannot be made from; convert "
            "the Hugging Face directory that it was made from"
        )
    old, new = (f"{family}.rope.{name}" for name in ("scale_linear", "scaling.factor"))
    factor = single(file, new if new in file.values else old, float, 0.0, least=0.0, most=1e6)
    return factor if factor and kind == "linear" else 1.0


def added_tokens(file: GgufFile) -> dict[str, bool]:
    """Return transformers' settings ``add_bos_token`` and ``add_eos_token``: whether each text gets these tokens.

    Raises ConfigError if the file asks for a token without giving its id.
    """
    values = file.values
    begins = values.get("tokenizer.ggml.model") == "llama" or values.get("tokenizer.ggml.pre") in BEGINS
    usual = {"bos": begins and "tokenizer.ggml.bos_token_id" in values, "eos": False}
    added = {name: single(file, f"tokenizer.ggml.add_{name}_token", bool, usual[name]) for name in usual}
    for name, wanted in added.items():
        if wanted and f"tokenizer.ggml.{name}_token_id" not in values:
            raise ConfigError(
                f"{file.path} says tokenizer.ggml.add_{name}_token=true and lacks tokenizer.ggml.{name}_token_id; "
                "convert the Hugging Face directory that it was made from"
            )
    return {f"add_{name}_token": wanted for name, wanted in added.items()}
