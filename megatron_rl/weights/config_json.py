"""The check of a model folder's config.json and generation_config.json, field by field, before a model is built."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from megatron_rl.errors import ConfigError, quoted
from megatron_rl.json_text import check, field, read_object
from megatron_rl.weights.families.family import class_fields
from megatron_rl.weights.families.register import ALIASES, FAMILIES, TEXT_PARTS, check_family, family_of
from megatron_rl.weights.mapping import hf_size
from megatron_rl.weights.model_shape import ModelShape
from megatron_rl.weights.reader import (
    HEAD_NAME,
    HuggingFaceReader,
    has_weights,
    heads_differ,
    is_quantized,
    used_names,
)

CONFIG, GENERATION = "config.json", "generation_config.json"
MOST_CONFIG_BYTES = 16 * 2**20
# A GPU draws random weights of at most so many parameters (8 GiB in float32). The bound does not depend on free memory:
# ranks would then choose differently, and draw different weights.
DRAWN_ON_DEVICE = 2**31
# The fields that are numbers, with bounds that any model keeps. null leaves the family's default, but is refused for
# SIZES.
RANGES: dict[str, tuple[type, float, float]] = {
    "num_hidden_layers": (int, 1, 10_000),
    "hidden_size": (int, 1, 2**20),
    "intermediate_size": (int, 1, 2**24),
    "moe_intermediate_size": (int, 1, 2**24),
    "num_attention_heads": (int, 1, 2**16),
    "num_key_value_heads": (int, 1, 2**16),
    "num_local_experts": (int, 1, 2**16),
    "num_experts": (int, 1, 2**16),
    "num_experts_per_tok": (int, 1, 2**16),
    "head_dim": (int, 2, 2**16),
    "vocab_size": (int, 1, 2**26),
    "max_position_embeddings": (int, 1, 2**40),
    "rms_norm_eps": (float, 1e-30, 1.0),
    "initializer_range": (float, 0.0, 1e6),
    "n_routed_experts": (int, 1, 2**16),
    "n_shared_experts": (int, 1, 2**10),
    "n_group": (int, 1, 2**16),
    "topk_group": (int, 1, 2**16),
    "first_k_dense_replace": (int, 0, 2**16),
    "routed_scaling_factor": (float, 1e-6, 1e6),
    "num_nextn_predict_layers": (int, 0, 2**10),
    "intermediate_size_mlp": (int, 1, 2**24),
    "interleave_moe_layer_step": (int, 1, 2**16),
    "no_rope_layer_interval": (int, 1, 2**16),
    "attention_chunk_size": (int, 1, 2**40),
    "floor_scale": (int, 1, 2**40),
    "attn_scale": (float, 0.0, 1e6),
    "swiglu_alpha": (float, 1e-6, 1e6),
    "swiglu_limit": (float, 1e-6, 1e30),
    "q_lora_rank": (int, 1, 2**20),
    "kv_lora_rank": (int, 1, 2**20),
    "qk_nope_head_dim": (int, 1, 2**16),
    "qk_rope_head_dim": (int, 2, 2**16),
    "v_head_dim": (int, 1, 2**16),
    "query_pre_attn_scalar": (float, 1e-6, 1e9),
    "partial_rotary_factor": (float, 1e-3, 1.0),
    "original_max_position_embeddings": (int, 1, 2**40),
    "num_labels": (int, 0, 2**16),  # transformers makes a name for each
    "shared_expert_intermediate_size": (int, 1, 2**24),
    "full_attention_interval": (int, 1, 10_000),
    "linear_num_key_heads": (int, 1, 2**16),
    "linear_num_value_heads": (int, 1, 2**16),
    "linear_key_head_dim": (int, 1, 2**16),
    "linear_value_head_dim": (int, 1, 2**16),
    "linear_conv_kernel_dim": (int, 2, 2**10),
}
# Fields that a config.json must have: transformers' own defaults are the sizes of a model of 7,000,000,000 parameters.
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
OF_MIXTURES = {"num_local_experts", "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group"}
OF_MIXTURES |= {"first_k_dense_replace", "num_experts", "shared_expert_intermediate_size"}
MOST_EXPERTS = 2**20  # in all layers together: each expert is a tensor with a name
# Fields by which transformers would take another config, other fields or other code for the folder's model.
NESTED = ("text_config", "text_encoder", "decoder", "generator")
REPLACING = {"attribute_map", "per_layer_config"}
KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
# The numbers of rope_parameters, by rope_type; any other type is refused where the frequencies are made.
ROPE_NUMBERS = {
    "linear": ("rope_theta", "factor"),
    "llama3": ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("rope_theta", "factor", "original_max_position_embeddings"),
}
# Numbers that rope_parameters of any of these types may have.
ROPE_OPTIONS = {
    "partial_rotary_factor": (1e-3, 1.0),
    **dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"), (0.0, 1e6)),
}
# The fields that the model built here, its checks or transformers' own config classes read.
_READ = {
    *RANGES,
    *("model_type", "hidden_act", "attention_bias", "mlp_bias", "tie_word_embeddings", "layer_types"),
    *("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "sliding_window", "use_sliding_window"),
    *("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "router_jitter_noise", "is_causal"),
    *("use_qk_norm", "no_rope_layers", "moe_layers", "attn_temperature_tuning"),
    *("query_pre_attn_scalar", "hidden_activation", "use_bidirectional_attention", "rope_local_base_freq"),
    *("sliding_window_pattern", "_sliding_window_pattern"),
    *("rope_interleave", "scoring_func", "topk_method", "moe_layer_freq"),
    *("max_window_layers", "quantization_config", "compression_config", "eos_token_id", "bos_token_id", "pad_token_id"),
    *("original_max_position_embeddings", "resid_pdrop", "embd_pdrop", "attn_output_gate", "output_gate_type"),
}
# Fields that are read whether or not transformers' class of the family has them.
_ANYWHERE = {
    *("model_type", "rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"),
    *("head_dim", "is_causal", "quantization_config", "compression_config", "num_labels"),
    "max_window_layers",  # Qwen's mixtures write it even if windows are off
}
# Fields that do not change the numbers of a forward pass.
_NEUTRAL = {
    *("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache"),
    *("id2label", "label2id", "problem_type", "pretraining_tp", "output_router_logits"),
    *("aux_loss_alpha", "seq_aux", "ep_size", "qk_head_dim"),  # qk_head_dim is the sum of its parts
    *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),  # layers that are left out, as in transformers
    "mamba_ssm_dtype",  # how inference keeps the state of a delta net
    *("router_aux_loss_coef", "chunk_size_feed_forward", "return_dict", "output_attentions", "output_hidden_states"),
}


def parse_hf_config(folder: str | pathlib.Path, key: str = "model.hf_path") -> Any:
    """Return transformers' config of a model folder of any family; no weights are read.

    A ``quantization_config`` of a supported kind (block FP8, MXFP4) is removed from the config,
    since the weights are dequantised when they are read.

    key: the setting that names the folder, for messages.

    Raises ConfigError, naming the file, if config.json is missing, is no JSON, is refused by
    transformers, or is quantised in another way.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    path = pathlib.Path(folder) / CONFIG
    fields = read_fields(folder, key)
    if is_quantized(fields):
        from megatron_rl.weights.quantization import block_size

        block_size(fields, str(path))
    name = str(fields.get("model_type"))
    family = ALIASES.get(name, name)
    # what transformers would not read right: another name, a whole vision-language model, or a null that it trips on
    rewritten = family != name or family in TEXT_PARTS.values() or fields.get("auto_map", {}) is None
    try:
        if not (rewritten and family in CONFIG_MAPPING):
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        else:
            own = {key: value for key, value in fields.items() if key != "auto_map"}
            config = CONFIG_MAPPING[family].from_dict({**own, "model_type": family})
            config.name_or_path = str(folder)
    except Exception as error:  # its validators raise errors of many classes
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is refused by transformers: {type(error).__name__}: {reason[:400]}") from error
    for name in ("quantization_config", "compression_config"):
        if name in vars(config):
            delattr(config, name)
    return config


def read_hf_config(folder: str | pathlib.Path, key: str = "model.hf_path", *, provider: str = "native") -> Any:
    """Return transformers' config of a model folder, after a check of its family and of its numeric fields.

    provider: ``model.provider``: "native" accepts only the families built here, "bridge"
        (Megatron-Bridge) any family.

    Raises ConfigError, naming the file and the field, for a family that is not built here, or a
    number out of range.
    """
    path = pathlib.Path(folder) / CONFIG
    fields = read_fields(folder, key)
    if provider == "native":
        check_family(fields.get("model_type"), str(path))
        _check_own(fields, str(path))
    for name, (kind, least, most) in RANGES.items():  # checked before transformers makes a list of num_hidden_layers
        if fields.get(name) is not None:
            check(fields[name], f"{path}: {name}", kind, least=least, most=most)
    config = parse_hf_config(folder, key)
    _check_sizes(config, str(path))
    return config


def _check_own(fields: Mapping[str, object], where: str) -> None:
    """Raise ConfigError if a config.json lacks a size, has a second model's config in a field, or names code to load.

    The sizes are the fields in SIZES (``hidden_size``, say) and the family's ``ffn_field``. The
    error is also raised for a field that would replace a method of transformers' config class.

    fields: the fields of config.json; ``model_type`` names a family that is built here.
    where: the file's name, for messages.
    """
    from transformers import CONFIG_MAPPING

    family = family_of(fields["model_type"])
    if nested := [name for name in NESTED if fields.get(name) is not None]:
        raise ConfigError(
            f"{where} holds a model within the model, {nested[0]}={quoted(fields[nested[0]])}, which a "
            f"{family.model_type} model does not have; write its fields beside model_type, and no {nested[0]}"
        )
    own = class_fields(CONFIG_MAPPING[family.model_type])
    for name in dict.fromkeys((*(x for x in SIZES if x in own), family.ffn_field)):
        if fields.get(name) is None:
            raise ConfigError(f"{where} lacks the field {name}, a size of the model; give the config of its weights")
    methods = {name for name, _ in inspect.getmembers(CONFIG_MAPPING[family.model_type], callable)}
    if replaced := sorted(fields.keys() & (methods | REPLACING)):
        raise ConfigError(f"{where}: {replaced[0]} would replace a part of transformers' config class; remove it")
    for name in KERNELS:
        if isinstance(value := fields.get(name), str) and re.search("[/:|]", value):
            raise ConfigError(f"{where}: {name}={quoted(value)} names code to download; remove it")


def load_hf_config(folder: str | pathlib.Path, key: str = "model.hf_path", *, provider: str = "native") -> Any:
    """Return ``read_hf_config``'s config; ``tie_word_embeddings`` is false if LM head and embedding differ on disk."""
    config = read_hf_config(folder, key, provider=provider)
    settle_tying(config, folder)
    return config


def transformers_model(config: Any, folder: str | pathlib.Path, **settings: object) -> Any:
    """Return transformers' own causal language model of a config, without reading weights.

    Without a GPU its gated delta nets compute with torch, whether fla-core is installed or not.

    settings: further arguments of ``AutoModelForCausalLM.from_config``.

    Raises ConfigError if transformers cannot make a model of the config.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with _kernels(on_gpu=torch.cuda.is_available()):
            return AutoModelForCausalLM.from_config(config, **settings)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a field that only the model's own code reads may raise an error of any class
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{pathlib.Path(folder) / CONFIG}: transformers can make no model of it: {type(error).__name__}: "
            f"{reason[:400]}; mend the field that it speaks of, or remove it"
        ) from error


def _kernels(*, on_gpu: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context in which transformers makes models whose kernels can run here (weights/without_fla.py)."""
    if on_gpu or importlib.util.find_spec("fla") is None:
        return contextlib.nullcontext()
    from megatron_rl.weights.without_fla import without_fla

    return without_fla()


def random_state(
    config: Any, shape: ModelShape, folder: str | pathlib.Path, *, seed: int, device: Any
) -> dict[str, Any]:
    """Return {tensor name: weights} of transformers' model of a config, with random weights drawn from ``seed``.

    shape: the sizes of this model, from which its weights are counted.
    device: the torch.device that draws the weights. More than 2³¹ weights are drawn on the CPU
        instead. A GPU takes a tenth of the CPU's time, and draws other numbers from the same seed.

    Raises ConfigError if transformers cannot make a model of the config, or if the weights would
    not fit in the host's memory.
    """
    import torch

    count = sum(math.prod(hf_size(shape, name)) for name in used_names(shape))
    if 4 * count > (memory := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")):
        raise ConfigError(
            f"{pathlib.Path(folder) / CONFIG} asks for {count:,} random weights, {4 * count / 2**30:,.0f} GiB in "
            f"float32, and this host has {memory / 2**30:,.0f} GiB of memory; set smaller sizes"
        )
    device = device if count <= DRAWN_ON_DEVICE else torch.device("cpu")
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        return transformers_model(config, folder).state_dict()


def settle_tying(config: Any, folder: str | pathlib.Path) -> None:
    """Set the config's ``tie_word_embeddings`` to false if LM head and embedding differ in the folder's files.

    transformers does the same (5.19 ``PreTrainedModel.tie_weights``).
    """
    if config.tie_word_embeddings and has_weights(folder):
        reader = HuggingFaceReader(folder)
        if heads_differ(reader):
            config.tie_word_embeddings = False
        reader.close()


def read_fields(folder: str | pathlib.Path, key: str = "model.hf_path") -> dict[str, object]:
    """Return the fields of a folder's config.json; of a vision-language model's, those of its text part.

    Raises ConfigError if the file is missing or holds no JSON object.

    key: the setting that names the folder, for messages.
    """
    path = pathlib.Path(folder) / CONFIG
    if not path.is_file():
        raise ConfigError(f"{key}={str(folder)!r} holds no config.json; give a local Hugging Face directory")
    fields = read_object(path, most_bytes=MOST_CONFIG_BYTES)
    if str(fields.get("model_type")) not in TEXT_PARTS:
        return fields
    from megatron_rl.weights.text_part import text_fields

    return text_fields(fields, str(path))


def _check_sizes(config: Any, where: str) -> None:
    """Raise ConfigError if a config's sizes do not fit together, or a number in ``rope_parameters`` is out of range.

    Example: ``num_attention_heads`` must be a multiple of ``num_key_value_heads``.

    where: the name of config.json, for messages.
    """
    family, fields = family_of(config.model_type), config.to_dict()
    if family is not None:
        own = class_fields(type(config)) | {"head_dim"}
        fields = {config.attribute_map.get(name, name): value for name, value in fields.items() if name in own}
        _check_experts(fields, where)
    heads, groups, hidden = (fields[x] for x in ("num_attention_heads", "num_key_value_heads", "hidden_size"))
    if heads % groups:
        raise ConfigError(f"{where}: num_key_value_heads={groups} does not divide num_attention_heads={heads}")
    if fields.get("head_dim") is None and hidden % heads:
        raise ConfigError(f"{where}: num_attention_heads={heads} does not divide hidden_size={hidden}; set head_dim")
    head_dim = fields.get("head_dim") or hidden // heads
    if head_dim % 2:
        raise ConfigError(f"{where}: head_dim={head_dim} is odd, and rotary embeddings turn pairs")
    if isinstance(pad := fields.get("pad_token_id"), int) and pad >= fields["vocab_size"]:
        raise ConfigError(f"{where}: pad_token_id={pad} is beyond vocab_size={fields['vocab_size']}; set it to null")
    rope = check(fields.get("rope_parameters"), f"{where}: rope_parameters", dict)
    by_kind = {name: value for name, value in rope.items() if name in ("full_attention", "sliding_attention")}
    if by_kind and family is not None and (not family.turns_by_kind or set(config.layer_types) - by_kind.keys()):
        kinds = f"the numbers of {', '.join(set(config.layer_types))}" if family.turns_by_kind else "one set of numbers"
        raise ConfigError(f"{where}: rope_parameters has {', '.join(by_kind)}; a {family.model_type} model has {kinds}")
    for name, own in by_kind.items():
        _check_rope(check(own, f"{where}: rope_parameters: {name}", dict), f"{where}: rope_parameters: {name}")
    if not by_kind:
        _check_rope(rope, f"{where}: rope_parameters")


def _check_experts(fields: Mapping[str, Any], where: str) -> None:
    for name in OF_MIXTURES & fields.keys():
        check(fields[name], f"{where}: {name}", int)
    counts = (fields[name] for name in ("num_local_experts", "n_routed_experts", "num_experts") if name in fields)
    experts, layers = next(counts, 0), fields["num_hidden_layers"]
    if experts and experts < fields["num_experts_per_tok"]:
        raise ConfigError(
            f"{where}: num_experts_per_tok={fields['num_experts_per_tok']} is more than the {experts} experts"
        )
    if experts * layers > MOST_EXPERTS:
        raise ConfigError(f"{where}: {experts} experts in each of {layers} layers are more than {MOST_EXPERTS}")


def _check_rope(rope: dict, where: str) -> None:
    kind = field(rope, "rope_type", str, where)
    for name in ROPE_NUMBERS.get(kind, ("rope_theta",)):
        field(rope, name, float, where, least=1.001 if name == "rope_theta" else 1e-6, most=1e15)
    for name, (least, most) in ROPE_OPTIONS.items():
        if rope.get(name) is not None:
            check(rope[name], f"{where}: {name}", float, least=least, most=most)


def ignored_fields(folder: str | pathlib.Path) -> dict[str, object]:
    """Return {field: value} of the fields of config.json that are set, but that the model built here does not read.

    Examples are dropout, and a field that transformers' config class lacks since it belongs to
    another family.
    """
    from transformers import CONFIG_MAPPING

    fields, read = read_fields(folder), _READ
    if (family := family_of(fields.get("model_type"))) is not None:
        read = _READ & (class_fields(CONFIG_MAPPING[family.model_type]) | _ANYWHERE | set(family.reads))
    return {
        name: value
        for name, value in fields.items()
        if name not in read | _NEUTRAL and value not in (None, False, 0, "", [], {})
    }


def check_served(folder: str | pathlib.Path, *, provider: str = "native") -> None:
    """Raise ConfigError if vLLM would build another model from a folder's config.json than the trainer does.

    provider: ``model.provider``, which builds the trainer's model.
    """
    path = pathlib.Path(folder) / CONFIG
    fields = read_fields(folder)
    if is_quantized(fields):
        from megatron_rl.weights.quantization import refuse_served

        refuse_served(fields, str(path))
    written, settled = (read(folder, provider=provider) for read in (read_hf_config, load_hf_config))
    if provider == "native":
        FAMILIES[written.model_type].refuse_served(fields, str(path))
    if written.tie_word_embeddings and not settled.tie_word_embeddings:
        raise ConfigError(
            f"{path} says tie_word_embeddings=true and the files hold a {HEAD_NAME} of their own, which "
            "rollout.engine=vllm would leave out; set tie_word_embeddings to false there"
        )


def stop_ids(folder: str | pathlib.Path) -> list[int]:
    """Return ``eos_token_id`` of generation_config.json as a list of token ids; [] if it is null or absent.

    If there is no generation_config.json, the field of config.json is read.

    Raises ConfigError for a file that is no JSON object, and for a value that is neither a token
    id, a list of token ids, nor null.
    """
    path = pathlib.Path(folder) / GENERATION
    if path.exists():
        value = read_object(path, most_bytes=MOST_CONFIG_BYTES).get("eos_token_id")
    else:
        path = pathlib.Path(folder) / CONFIG
        value = read_fields(folder).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for each in ids:
        if not isinstance(each, int) or isinstance(each, bool):
            raise ConfigError(f"{path}: eos_token_id must be a token id, a list of them or null: {quoted(value)}")
    return ids
