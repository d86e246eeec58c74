"""The conversion of Megatron-Bridge's description of a model family: provider to ModelShape, mapping to ``Entry``.

A provider is Megatron-Bridge's configuration of a model, which also builds the model. A mapping
gives each Megatron parameter its Hugging Face tensors, as an ``Entry`` (weights/entry.py) does
here. This follows the source of megatron-bridge 0.6.2 (``models/conversion/auto_bridge.py``,
``mapping_registry.py``, ``param_mapping.py``, ``models/gpt_provider.py``) and megatron-core 0.19.2.

A family is accepted if its layers are Megatron-Core's plain GPT layers. The layers built here
differ from these only in attention's kernel. Any other family is refused with the reason.
"""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable
from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.weights.entry import Entry, Layout
from megatron_rl.weights.families.family import Family, nothing
from megatron_rl.weights.families.register import FAMILIES, PREFIX
from megatron_rl.weights.mapping import EMBEDDING, FINAL_NORM, HEAD
from megatron_rl.weights.model_shape import ModelShape

RUN_WITH = {"megatron-bridge": "0.6", "megatron-core": "0.19"}  # the tested releases
INSTALL = "pip install 'megatron_rl[bridge]', in an environment of its own (docs/models.md)"
_FINAL_BIAS = Entry(megatron="decoder.final_layernorm.bias", hf=("model.norm.bias",), layout=Layout.REPLICATED)
ROTARY = ("default", "linear", "llama3")  # others scale attention too, or depend on the length
# A provider's fields: the values that the layers here can have, and the feature that another value means.
PLAIN: dict[str, tuple[tuple[object, ...], str]] = {
    "multi_latent_attention": ((False,), "multi-latent attention"),
    "num_moe_experts": ((None, 0), "a mixture of experts (the families of docs/models.md have them)"),
    "mtp_num_layers": ((None, 0), "layers that predict further tokens"),
    "window_size": ((None,), "a sliding window"),
    "softmax_scale": ((None,), "a scale of the attention scores of its own"),
    "softmax_type": (("vanilla",), "attention sinks"),
    "attn_logit_softcapping": ((None, 0, 0.0), "soft-capped attention scores"),
    "final_logit_softcapping": ((None, 0, 0.0), "soft-capped logits"),
    "qk_l2_norm": ((False,), "an L2 norm of q and k"),
    "qk_clip": ((False,), "clipped q and k"),
    "attention_output_gate": ((False,), "a gate on attention's output"),
    "rotary_interleaved": ((False,), "rotary pairs that lie side by side"),
    "no_rope_freq": ((None,), "layers without rotary angles"),
    "position_embedding_type": (("rope",), "another embedding of positions than plain rotary angles"),
    "heterogeneous_block_specs": ((False,), "layers that differ from one another"),
    "experimental_attention_variant": ((None,), "another kind of attention"),
    "apply_residual_connection_post_layernorm": ((False,), "a residual stream of normed states"),
    "activation_func_clamp_value": ((None,), "a clamped activation"),
    "use_transformer_engine_full_layer_spec": ((False,), "Transformer Engine's whole layers"),
    "normalization": (("RMSNorm", "LayerNorm"), "another norm"),
}


def read_provider(hf_config: Any) -> tuple[Any, Any]:
    """Return Megatron-Bridge's provider and mapping registry for a Hugging Face config; no weights are read.

    The provider is the model's configuration, which also builds the model. The registry maps
    Megatron parameters to Hugging Face tensors.

    Raises ConfigError if the package is missing or of another release, and for a family that
    Megatron-Bridge or this package does not take.
    """
    check_releases()
    try:
        from megatron.bridge import AutoBridge
    except Exception as error:  # it imports much of the GPU's software, which may fail in any way
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model.provider=bridge: megatron-bridge cannot be imported: {type(error).__name__}: {reason}; {INSTALL}"
        ) from error
    named = copy.deepcopy(hf_config)
    if not named.architectures:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        named.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(hf_config.model_type, "")]
    try:
        bridge = AutoBridge.from_hf_config(named)
        provider = bridge.to_megatron_provider(load_weights=False)
        registry = bridge._model_bridge.mapping_registry()
    except Exception as error:  # ValueError if not supported; any class if the config lacks a field
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model.provider=bridge: megatron-bridge makes no provider of a {hf_config.model_type!r} model: "
            f"{type(error).__name__}: {reason}"
        ) from error
    refuse_other_layers(provider, hf_config.model_type)
    return provider, registry


def check_releases() -> None:
    """Raise ConfigError unless megatron-bridge and megatron-core are installed in the tested releases."""
    if importlib.util.find_spec("megatron.bridge") is None:
        raise ConfigError(f"model.provider=bridge needs NVIDIA's megatron-bridge, which is not installed: {INSTALL}")
    installed = {name: importlib.metadata.version(name) for name in RUN_WITH}
    if any(not version.startswith(f"{RUN_WITH[name]}.") for name, version in installed.items()):
        raise ConfigError(
            "model.provider=bridge was run with "
            + " and ".join(f"{name} {version}.x" for name, version in RUN_WITH.items())
            + "; here are "
            + " and ".join(f"{name} {version}" for name, version in installed.items())
            + f"; {INSTALL}"
        )


def refuse_other_layers(provider: Any, family: str) -> None:
    """Raise ConfigError if a provider's layers are not Megatron-Core's plain, dense GPT layers.

    provider: Megatron-Bridge's configuration of a model.
    family: the model's ``model_type``, for messages.
    """
    from megatron.bridge.models.gpt_provider import GPTModelProvider, default_layer_spec

    where = f"model.provider=bridge: megatron-bridge's provider of {family} ({type(provider).__name__})"
    if not isinstance(provider, GPTModelProvider):
        raise ConfigError(f"{where} builds no GPTModel; the token sum, packing and log-probs are built for that alone")
    for name, (values, what) in PLAIN.items():
        if name in vars(provider) and (value := vars(provider)[name]) not in values:
            raise ConfigError(f"{where} has {name}={value}: {what}, which the layers here do not express")
    spec = provider.transformer_layer_spec
    if spec is not default_layer_spec:
        name = spec.func if isinstance(spec, functools.partial) else spec
        raise ConfigError(
            f"{where} has layers of its own ({name.__module__}.{name.__qualname__}), and their attention does not take "
            "the packed sequences and shared prompts that the token sum is built on; only plain GPT layers are taken"
        )


def refuse_other_angles(hf_config: Any) -> None:
    """Raise ConfigError unless all layers share one ``rope_type``: "default", "linear" or "llama3"."""
    kind = hf_config.rope_parameters.get("rope_type")
    if kind not in ROTARY:
        raise ConfigError(
            f"model.provider=bridge: rope_type={kind!r} of {hf_config.model_type} is not taken; {', '.join(ROTARY)} are"
        )


def bridged_shape(hf_config: Any, *, layer_spec: str, vocab_multiple: int) -> ModelShape:
    """Return the shape that Megatron-Bridge's provider gives a Hugging Face config, and add its family to FAMILIES.

    model/hf_config.py ``read_shape`` describes the arguments.

    Raises ConfigError as ``read_provider`` does. Also raises ConfigError if Megatron-Bridge splits a
    parameter over tensor ranks in a way that this package lacks (weights/entry.py ``Layout``).
    """
    provider, registry = read_provider(hf_config)
    refuse_other_angles(hf_config)
    tied, vocab = bool(hf_config.tie_word_embeddings), hf_config.vocab_size
    FAMILIES.describe(_family(provider, registry, hf_config.model_type, layer_spec, tied=tied))
    heads = provider.num_attention_heads
    return ModelShape(
        family=f"{PREFIX}{hf_config.model_type}",
        num_layers=provider.num_layers,
        hidden_size=provider.hidden_size,
        ffn_hidden_size=provider.ffn_hidden_size,
        num_heads=heads,
        num_kv_heads=provider.num_query_groups or heads,
        head_dim=provider.kv_channels or provider.hidden_size // heads,
        vocab_size=vocab,
        padded_vocab_size=-(-vocab // vocab_multiple) * vocab_multiple,
        context_tokens=hf_config.max_position_embeddings,
        tied_embeddings=tied,
        layer_spec=layer_spec,
        qkv_bias=provider.add_qkv_bias or provider.add_bias_linear,
        qk_norm=provider.qk_layernorm,
        mlp_matrices=3 if provider.gated_linear_unit else 2,
    )


def _family(provider: Any, registry: Any, model_type: str, layer_spec: str, *, tied: bool) -> Family:
    """Return the ``Family`` of a provider's model, with one entry per layer parameter from Megatron-Bridge's mapping.

    provider, registry: as ``read_provider`` returns them.
    tied: whether the head shares the embedding's weight.

    Raises ConfigError if the mapping gives the embedding, the final norm or the head another
    Hugging Face name than this package reads.
    """
    names = _parameters(provider, fused=layer_spec == "transformer_engine")
    entries = tuple(
        _entry(registry, name, kind, model_type, gated=provider.gated_linear_unit) for name, kind in names.items()
    )
    # the mapping must give embedding, final norm and head the names that are read here
    ends = [(EMBEDDING, EMBEDDING.hf[0]), (FINAL_NORM, FINAL_NORM.hf[0])]
    ends += [] if tied else [(HEAD, HEAD.hf[0])]
    last = (_FINAL_BIAS,) if provider.normalization == "LayerNorm" else ()
    for entry, hf in [*ends, *((entry, entry.hf[0]) for entry in last)]:
        found = registry.megatron_to_hf_lookup(entry.megatron)
        if found is None or found.hf_param != hf:
            raise ConfigError(
                f"model.provider=bridge: {entry.megatron} of {model_type} is {found and found.hf_param} in "
                f"megatron-bridge's mapping, and {hf} is read here; a model of these names is not supported"
            )
    return Family(
        model_type=f"{PREFIX}{model_type}",
        refuse=lambda _: None,
        features=nothing,
        layer=lambda _: entries,
        sizes=lambda shape: _sizes(entries, shape),
        turns_partly=provider.rotary_percent != 1.0,
        last=last,
    )


def _parameters(provider: Any, *, fused: bool) -> dict[str, str]:
    """Return {parameter name: "rows", "columns" or "whole"} of a plain GPT layer.

    The value says what of the parameter a tensor rank holds: some rows, some columns, or all of it.

    fused: whether linears contain the norms before them, as Transformer Engine's do.
    """
    linear, bias = provider.add_bias_linear, provider.normalization == "LayerNorm"
    parts = ("weight", "bias") if bias else ("weight",)
    before = {"self_attention.linear_qkv": "input_layernorm", "mlp.linear_fc1": "pre_mlp_layernorm"}
    prefixes = [f"{x}.layer_norm_" if fused else f"{norm}." for x, norm in before.items()]
    names = {f"{prefix}{part}": "whole" for prefix in prefixes for part in parts}
    if provider.qk_layernorm:
        names |= {f"self_attention.{x}_layernorm.{part}": "whole" for x in "qk" for part in parts}
    for x in before:
        names[f"{x}.weight"] = "rows"
        if linear or (provider.add_qkv_bias and x.endswith("qkv")):
            names[f"{x}.bias"] = "rows"
    for x in ("self_attention.linear_proj", "mlp.linear_fc2"):
        names[f"{x}.weight"] = "columns"
        if linear:
            names[f"{x}.bias"] = "whole"
    return names


def _entry(registry: Any, name: str, kind: str, model_type: str, *, gated: bool) -> Entry:
    """Return the entry of the layer parameter ``name``: its Hugging Face tensors, and its layout over tensor ranks.

    registry: Megatron-Bridge's mapping, as ``read_provider`` returns it.
    kind: what of the parameter a tensor rank holds: some "rows", some "columns" or the "whole".
    gated: whether the MLP has a gate.

    The class of Megatron-Bridge's mapping decides the layout; for AutoMapping, ``kind`` does.
    Megatron-Bridge fuses q, k, v and gate, up as this package does (tests/bridge_oracle.py,
    tests/bridge).

    Raises ConfigError for a mapping whose layout this package cannot read.
    """
    from megatron.bridge.models.conversion import param_mapping

    # the mapping of layer 0 stands for all layers
    mapped = registry.megatron_to_hf_lookup(f"decoder.layers.0.{name}")
    where = f"model.provider=bridge: megatron-bridge's mapping of {model_type}"
    if mapped is None:
        raise ConfigError(f"{where} has no tensor for decoder.layers.0.{name}")
    # the mapping's class: its layout here, and whether the file holds q, k and v as one tensor
    layouts: dict[type, tuple[Layout, bool]] = {
        param_mapping.QKVMapping: (Layout.QKV, False),
        param_mapping.GatedMLPMapping: (Layout.GATE_UP, False),
        param_mapping.ConcatenatedQKVMapping: (Layout.QKV, True),
        param_mapping.AutoMapping: (
            {"rows": Layout.GATE_UP, "columns": Layout.COLUMNS, "whole": Layout.REPLICATED}[kind],
            False,
        ),
        param_mapping.ReplicatedMapping: (Layout.REPLICATED, False),
    }
    if type(mapped) not in layouts or (isinstance(mapped, param_mapping.AutoMapping) and mapped.permute_dims):
        raise ConfigError(f"{where} has a {type(mapped).__name__} for {name}, whose layout is not read here")
    layout, joined = layouts[type(mapped)]
    if gated and name == "mlp.linear_fc1.weight" and layout is Layout.GATE_UP and isinstance(mapped.hf_param, str):
        raise ConfigError(f"{where} has gate and up in one tensor, {mapped.hf_param}, whose layout is not read here")
    # the names of the file's tensors
    tensors = tuple(mapped.hf_param.values()) if isinstance(mapped.hf_param, dict) else (mapped.hf_param,)
    strange = [x for x in tensors if not x.startswith("model.layers.0.")]
    if strange:
        raise ConfigError(f"{where} names {strange[0]} for {name}, and layers are read as model.layers.<number> here")
    return Entry(
        megatron=name,
        hf=tuple(re.sub(r"^model\.layers\.0\.", "", x) for x in tensors),
        layout=layout,
        joined=joined,
    )


def _sizes(entries: tuple[Entry, ...], shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return {Hugging Face name: tensor shape} of a layer's parameters, except norms over the hidden state.

    entries: the layer's parameters.
    shape: the model's sizes.
    """
    hidden, ffn = shape.hidden_size, shape.ffn_hidden_size
    heads = [x * shape.head_dim for x in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
    outputs: dict[str, Callable[[int], list[int]]] = {
        "linear_qkv": lambda parts: heads if parts == 3 else [sum(heads)],
        "linear_fc1": lambda parts: [ffn] * parts,
        "linear_proj": lambda _: [hidden],
        "linear_fc2": lambda _: [hidden],
    }
    inputs = {"linear_qkv": hidden, "linear_fc1": hidden, "linear_proj": heads[0], "linear_fc2": ffn}
    sizes: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        module, _, part = entry.megatron.rpartition(".")
        linear = module.rpartition(".")[2]
        if linear.endswith(("q_layernorm", "k_layernorm")):
            sizes |= dict.fromkeys(entry.hf, (shape.head_dim,))
        elif linear in outputs and not part.startswith("layer_norm"):
            rows = outputs[linear](len(entry.hf))
            for name, each in zip(entry.hf, rows, strict=True):
                sizes[name] = (each, inputs[linear]) if part == "weight" else (each,)
    return sizes
