"""A model's sizes and rotary frequencies, read from a Hugging Face config.

A config with a feature that the models here lack is refused, with a message that names the feature.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from megatron_rl.config.model import ParallelConfig
from megatron_rl.distributed.topology import Topology
from megatron_rl.errors import ConfigError, quoted
from megatron_rl.model.costs import layout_of
from megatron_rl.model.settings import ModelSettings
from megatron_rl.weights.families.family import class_fields
from megatron_rl.weights.families.layer_fields import FULL, refuse_other_masks
from megatron_rl.weights.families.register import FAMILIES, check_family
from megatron_rl.weights.model_shape import ModelShape

SCALINGS = ("linear", "llama3", "yarn")


def _check_divisible(hf_config: Any, shape: ModelShape, parallel: ParallelConfig, topology: Topology) -> None:
    """Raise ConfigError if a degree of parallelism does not divide the size that it splits.

    Also raises ConfigError in three cases: degrees for experts are set and the model has no experts;
    experts with biases would be split over ranks; a model with experts has tensor parallelism
    without sequence parallelism.
    """
    name, family = hf_config.name_or_path or hf_config.model_type, FAMILIES[shape.family]
    experts, ffn, ffn_name = family.experts is not None, shape.ffn_hidden_size, family.ffn_field
    # (setting, degree, the size's name, the size)
    split = [
        ("parallel.tensor", topology.tensor_size, field, hf_config.to_dict()[field])
        for field in ("num_attention_heads", "num_key_value_heads")
    ]
    if experts:
        split += [
            ("parallel.expert_tensor", topology.expert_tensor_size, ffn_name, ffn),
            ("parallel.expert", topology.expert_size, "num_experts", shape.num_experts),
            ("parallel.tensor", topology.tensor_size, "intermediate_size", shape.dense_ffn_hidden_size),
            ("parallel.tensor", topology.tensor_size, "the shared experts' width", shape.shared_ffn_hidden_size),
        ]
    else:
        split += [("parallel.tensor", topology.tensor_size, ffn_name, ffn)]
    if shape.delta is not None:
        split += [("parallel.tensor", topology.tensor_size, "linear_num_key_heads", shape.delta.key_heads)]
    for key, degree, size_name, size in split:
        if size % degree:
            raise ConfigError(f"{key}={degree} does not divide {size_name}={size} of {name}; use a divisor")
    # experts: biases, degrees without experts, and tokens that would be sent twice
    if shape.linear_bias and topology.expert_tensor_size > 1:
        raise ConfigError(
            f"the experts of {name} have biases, which Megatron-Core takes on whole experts alone, and they are split "
            f"over {topology.expert_tensor_size} ranks; set parallel.expert_tensor=1"
        )
    if not experts and topology.expert_size > 1:
        raise ConfigError(
            f"parallel.expert={topology.expert_size} splits experts and {name} has none; set parallel.expert=1"
        )
    if not experts and parallel.expert_tensor not in (None, topology.tensor_size):
        raise ConfigError(
            f"parallel.expert_tensor={parallel.expert_tensor} splits experts and {name} has none; leave it null"
        )
    if experts and topology.tensor_size > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            f"parallel.tensor={topology.tensor_size} with experts needs parallel.sequence_parallel=true, or "
            "Megatron-Core would send each token to the experts once per tensor rank; turn it on"
        )


def model_shape(
    hf_config: Any, settings: ModelSettings, topology: Topology, *, layer_spec: str, value_head: bool = False
) -> ModelShape:
    """Return the sizes and features of a Hugging Face config, checked against the degrees of parallelism.

    layer_spec: "transformer_engine" or "torch", whose layers are built.
    value_head: whether the model has a value head in place of the LM head, as a critic has.

    A mixture's ``router_aux_loss_coef`` is ignored: that loss is no term of the token-sum loss
    (algorithm/signal.py). Transformers adds it only under ``output_router_logits``.

    Raises ConfigError, naming the feature or size, for a feature that the models here lack, or for a
    size that a degree does not divide.
    """
    provider = settings.model.provider
    shape = read_shape(hf_config, layer_spec=layer_spec, vocab_multiple=topology.tensor_size, provider=provider)
    _check_divisible(hf_config, shape, settings.parallel, topology)
    if value_head:
        shape = dataclasses.replace(shape, value_head=True, tied_embeddings=False)
    if topology.pipeline_size * topology.virtual_size == 1:
        return shape
    return dataclasses.replace(shape, stage_layers=layout_of(shape, settings, hf_config))


def read_shape(hf_config: Any, *, layer_spec: str, vocab_multiple: int = 1, provider: str = "native") -> ModelShape:
    """Return the sizes and features of a Hugging Face config, before any division over ranks.

    layer_spec: "transformer_engine" or "torch", whose layers are built.
    vocab_multiple: the vocabulary is padded to a multiple of it.
    provider: ``model.provider``, "native" or "bridge".

    Raises ConfigError for a feature of the config that the models here lack, and names the feature.
    """
    if provider == "bridge":
        from megatron_rl.model.bridge.family import bridged_shape

        return bridged_shape(hf_config, layer_spec=layer_spec, vocab_multiple=vocab_multiple)
    check_family(hf_config.model_type, "model.hf_path")
    family = FAMILIES[hf_config.model_type]
    refuse_other_masks(hf_config)
    family.refuse(hf_config)
    heads, vocab = hf_config.num_attention_heads, hf_config.vocab_size
    # head_dim is absent in qwen2's config, None in some llamas'
    head_dim = hf_config.to_dict().get("head_dim") or hf_config.hidden_size // heads
    fields = dict(
        family=family.model_type,
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        ffn_hidden_size=hf_config.to_dict()[family.ffn_field],
        num_heads=heads,
        num_kv_heads=hf_config.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        padded_vocab_size=-(-vocab // vocab_multiple) * vocab_multiple,
        context_tokens=hf_config.max_position_embeddings,
        tied_embeddings=bool(hf_config.tie_word_embeddings),
        layer_spec=layer_spec,
    )
    return ModelShape(**fields | family.features(hf_config))


def angle_kinds(hf_config: Any) -> tuple[str | None, ...]:
    """Return each layer's kind: the key of its rotary parameters in ``rope_parameters``.

    Only configs of OLMo 3 and Gemma 3 have one key per kind. In others all layers share the
    parameters, and each item is None.
    """
    if FULL in hf_config.rope_parameters:
        return tuple(hf_config.layer_types)
    return (None,) * hf_config.num_hidden_layers


def rotary_tables(hf_config: Any, head_dim: int, *, turns_partly: bool = False) -> dict[str | None, torch.Tensor]:
    """Return {kind of layer (``angle_kinds``): rotary inverse frequencies}; the key None means all layers.

    turns_partly: whether the model's family reads ``partial_rotary_factor``.

    Raises ConfigError as ``inverse_frequencies`` does.
    """
    return {
        kind: inverse_frequencies(hf_config, head_dim, kind, turns_partly=turns_partly)
        for kind in dict.fromkeys(angle_kinds(hf_config))
    }


def _rope(hf_config: Any, kind: str | None) -> dict[str, Any]:
    return hf_config.rope_parameters if kind is None else hf_config.rope_parameters[kind]


def inverse_frequencies(
    hf_config: Any, head_dim: int, layer_kind: str | None = None, *, turns_partly: bool = False
) -> torch.Tensor:
    """Return float32 rotary inverse frequencies as transformers computes them, one for each rotated pair of columns.

    There are head_dim / 2 of them, or fewer under ``partial_rotary_factor``. Then the rest of each
    head is not rotated (Megatron-Core 0.16.1 ``rope_utils.py``).

    layer_kind: the layer's kind, as ``angle_kinds`` returns it; None if all layers share the rotary
        parameters.
    turns_partly: whether the model's family, a built-in one or one of Megatron-Bridge, reads
        ``partial_rotary_factor``.

    Raises ConfigError for any scaling but default, linear, llama3 and yarn, and for a partial
    factor that is not supported.
    """
    rope = _rope(hf_config, layer_kind)
    kind = rope["rope_type"]
    share = rope.get("partial_rotary_factor") or 1.0
    if share != 1.0 and not (kind == "default" and (turns_partly or _turns_partly(hf_config))):
        partly = [name for name, family in FAMILIES.items() if family.turns_partly]
        raise ConfigError(
            f"partial_rotary_factor={share} of {hf_config.model_type} with rope_type={kind!r} is not supported; only "
            f"1.0 is, and another one for {', '.join(partly)} with rope_type='default'"
        )
    head_dim = int(head_dim * share)
    if kind == "default":
        return 1.0 / (rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if kind not in SCALINGS:
        raise ConfigError(
            f"rope_type={kind!r} is not supported (default, {', '.join(SCALINGS)} are): it depends on the length"
        )
    frequencies, factor = _scaled(hf_config, layer_kind)
    if factor != 1.0 and kind != "yarn":
        raise ConfigError(f"rope_type={kind!r} with attention factor {factor} is not supported; only 1.0 is")
    return _checked(frequencies, rope, head_dim)


def _turns_partly(hf_config: Any) -> bool:
    """Return whether the config's family is in FAMILIES and reads ``partial_rotary_factor``."""
    return hf_config.model_type in FAMILIES and FAMILIES[hf_config.model_type].turns_partly


def _checked(frequencies: torch.Tensor, rope: dict[str, Any], head_dim: int) -> torch.Tensor:
    """Return rotary frequencies in float32. Raises ConfigError unless they are finite, and head_dim / 2 in number.

    Transformers' functions may compute another number of them, since they also read ``head_dim``
    and ``partial_rotary_factor`` from the config.

    rope: the rotary parameters, for messages.
    """
    if not frequencies.isfinite().all():
        raise ConfigError(f"rope_parameters={quoted(dict(rope), 200)} give frequencies that are NaN or infinite")
    if 2 * len(frequencies) != head_dim:
        raise ConfigError(
            f"rope_parameters={quoted(dict(rope), 200)} turn {2 * len(frequencies)} of {head_dim} elements of a head, "
            "which is not supported; remove partial_rotary_factor, or a head_dim of other width, from the config"
        )
    return frequencies.float()


def _scaled(hf_config: Any, kind: str | None) -> tuple[torch.Tensor, float]:
    """Return transformers' inverse frequencies and attention factor for the scaling "linear", "llama3" or "yarn".

    kind: the layer's kind, as ``angle_kinds`` returns it.

    Raises ConfigError if transformers cannot compute them.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = _rope(hf_config, kind)
    try:
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](hf_config, torch.device("cpu"), layer_type=kind)
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:  # numbers that contradict each other
        raise ConfigError(
            f"rope_parameters={quoted(dict(rope), 200)} of {hf_config.model_type} give no frequencies in transformers "
            f"({type(error).__name__}: {error}); correct the number named there, or head_dim"
        ) from error


def softmax_scale(hf_config: Any, head_dim: int, kind: str | None = None) -> float | None:
    """Return the factor on the attention scores; None for 1 / sqrt(head_dim).

    kind: the layer's kind, as ``angle_kinds`` returns it.

    In Gemma's configs ``query_pre_attn_scalar`` takes the place of head_dim; no other family's
    module reads the field. Yarn (Peng et al., 2023, arXiv:2309.00071, section 3.4) multiplies the
    rotated q and k by an attention factor (default ``0.1 · ln(factor) + 1``). Megatron-Core's fused
    rotary kernel does not (0.16.1 ``rope_utils.py``). So under yarn the result is multiplied by the
    square of the attention factor.

    Raises ConfigError if the attention factor is not a finite number above 0.
    """
    name = "query_pre_attn_scalar"
    scalar = hf_config.to_dict()[name] if name in class_fields(type(hf_config)) else None
    if _rope(hf_config, kind)["rope_type"] != "yarn":
        return None if scalar is None else scalar**-0.5
    _, factor = _scaled(hf_config, kind)
    if not 0 < factor < math.inf:
        raise ConfigError(f"rope_type='yarn' with attention factor {factor} is not supported; it must be above 0")
    return factor**2 / math.sqrt(scalar or head_dim)


def latent_angles(hf_config: Any, shape: ModelShape) -> tuple[torch.Tensor, float]:
    """Return multi-latent attention's inverse frequencies [rope_head_dim / 2], and the factor on cos and sin.

    Both are as transformers computes them, under yarn too. Raises ConfigError if they are not
    finite.
    """
    rope = hf_config.rope_parameters
    if rope["rope_type"] != "yarn":
        return inverse_frequencies(hf_config, shape.rope_head_dim), 1.0
    frequencies, factor = _scaled(hf_config, None)
    if not math.isfinite(factor):
        raise ConfigError(f"rope_parameters={quoted(dict(rope), 200)} give an attention factor that is {factor}")
    return _checked(frequencies, rope, shape.rope_head_dim), float(factor)
