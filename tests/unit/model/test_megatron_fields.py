"""All fields of the installed Megatron-Core's config classes are accepted, typed as these want them."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from megatron_rl.algorithm.signal import signal_rule
from megatron_rl.backend.megatron_ddp import REFUSED_DDP_FIELDS
from megatron_rl.backend.optimizer import REFUSED_OPTIMIZER_FIELDS
from megatron_rl.config import Config, load_config
from megatron_rl.errors import ConfigError
from megatron_rl.model.build import build_model, transformer_config
from megatron_rl.model.hf_config import read_shape
from megatron_rl.model.megatron_fields import Refusals, resolve_fields
from megatron_rl.model.settings import ModelSettings
from megatron_rl.model.transformer_fields import REFUSED_TRANSFORMER_FIELDS, transformer_fields
from tests.reference import tiny_config

from megatron.core.distributed import DistributedDataParallelConfig  # isort: skip
from megatron.core.optimizer import OptimizerConfig  # isort: skip
from megatron.core.transformer.enums import AttnBackend  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

NONE = Refusals(owned={})
REFUSED = [
    (TransformerConfig, REFUSED_TRANSFORMER_FIELDS),
    (OptimizerConfig, REFUSED_OPTIMIZER_FIELDS),
    (DistributedDataParallelConfig, REFUSED_DDP_FIELDS),
]


def refused_by(words: list[str], act: Callable[..., object], *given: object) -> None:
    with pytest.raises(ConfigError) as error:
        act(*given)
    assert all(word in str(error.value) for word in words), str(error.value)


def typed_fields(config: Config) -> dict[str, object]:
    return transformer_fields(config.megatron.transformer, lora_rank=config.lora.rank)


@pytest.mark.parametrize("cls", [TransformerConfig, DistributedDataParallelConfig, OptimizerConfig])
def test_every_field_of_the_installed_class_is_known(cls):
    """Null leaves a field as it is, and Megatron-Core's own value is of the field's type."""
    fields = [x for x in dataclasses.fields(cls) if x.default is not dataclasses.MISSING]
    given = {x.name: x.default for x in fields}
    assert resolve_fields(given, cls, "megatron.x", NONE) == given
    nothing = resolve_fields(dict.fromkeys(given), cls, "megatron.x", NONE)
    assert {x.name for x in fields if x.default is None} <= nothing.keys() < given.keys()
    assert {*nothing.values()} == {None}


def test_names_become_dtypes_and_enum_members_and_what_means_nothing_is_named():
    for cls, given, wanted in (
        (OptimizerConfig, {"exp_avg_dtype": "bfloat16"}, {"exp_avg_dtype": torch.bfloat16}),
        (TransformerConfig, {"attention_backend": "flash"}, {"attention_backend": AttnBackend.flash}),
        (TransformerConfig, {"fp8": "hybrid"}, {"fp8": "hybrid"}),
        (TransformerConfig, {"window_size": [3, 0]}, {"window_size": (3, 0)}),
        (TransformerConfig, {"recompute_modules": ["mlp"]}, {"recompute_modules": ["mlp"]}),
        (OptimizerConfig, {"clip_grad": 1, "bf16": 1}, {"clip_grad": 1, "bf16": True}),
    ):
        assert resolve_fields(given, cls, "megatron.x", NONE) == wanted
    for cls, given, words in (
        (OptimizerConfig, {"exp_avg_dtype": "bfloat61"}, ["megatron.x.exp_avg_dtype", "bfloat61"]),
        (TransformerConfig, {"attention_backend": "flush"}, ["megatron.x.attention_backend", "flush", "flash"]),
        (OptimizerConfig, {"clip_grad": "much"}, ["megatron.x.clip_grad='much' is not a value", "takes a number;"]),
        (OptimizerConfig, {"hysteresis": True}, ["megatron.x.hysteresis=True", "takes an integer"]),
        (TransformerConfig, {"fp8": "e5m2"}, ["fp8='e5m2'", "takes e4m3 or hybrid or null"]),
        (TransformerConfig, {"recompute_modules": [1]}, ["recompute_modules=[1]", "takes a list of a text or null"]),
        (TransformerConfig, {"window_size": [1]}, ["window_size=[1]", "a list of an integer"]),
        (TransformerConfig, {"init_method": "zeros"}, ["init_method='zeros'", "a Python object"]),
        (DistributedDataParallelConfig, {"bucket_sise": 3}, ["megatron.x.bucket_sise", "bucket_size"]),
    ):
        refused_by(words, resolve_fields, given, cls, "megatron.x", NONE)


@pytest.mark.parametrize(("cls", "refused"), REFUSED)
def test_refused_fields_exist_and_say_why(cls, refused):
    """A refusal of a field that the installed version lacks guards nothing; test_every_field.py tries all values."""
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    assert {*refused.owned, *refused.unsupported} <= set(defaults)
    for name, reason in {**refused.unsupported, **refused.owned}.items():
        with pytest.raises(ConfigError, match="refused") as error:
            resolve_fields({name: 1}, cls, "megatron.x", refused)
        assert reason in str(error.value)
    for name in refused.unsupported:  # and the value that Megatron-Core has by itself is let through
        assert resolve_fields({name: defaults[name]}, cls, "megatron.x", refused) == {name: defaults[name]}


def test_recomputing_no_layers_at_a_time_is_refused():
    config = load_config(None, ["megatron.transformer.recompute_num_layers=0"])
    refused_by(["recompute_num_layers=0", "give 1 or more"], typed_fields, config)


FP8 = "megatron.transformer.fp8=hybrid"


def test_fp8_refuses_torchs_layers_the_exact_skip_and_what_it_cannot_be_combined_with():
    for overrides, words in (
        (["megatron.transformer.fp8_recipe=mxfp8"], ["fp8_recipe=mxfp8", "tensorwise, blockwise, delayed"]),
        (["megatron.transformer.tp_only_amax_red=false"], ["tp_only_amax_red=false", "different numbers of them"]),
        (["lora.rank=4"], ["lora.rank=4", "remove megatron.transformer.fp8"]),
    ):
        config = load_config(None, [FP8, "skip.mode=off", *overrides])
        refused_by(words, typed_fields, config)
    config = load_config(None, [FP8, "skip.mode=off", "model.dtype=bfloat16"])
    with pytest.raises(ConfigError, match="fp8=hybrid needs Transformer Engine's layers, and these are torch's"):
        build_model(ModelSettings.of(config), tiny_config("qwen2_untied"), topology=None)
    delta = tiny_config("qwen3_5_text")
    with pytest.raises(ConfigError, match="fp8=hybrid of qwen3_5_text: FP8 was not run with gated delta nets"):
        transformer_config(read_shape(delta, layer_spec="transformer_engine"), delta, ModelSettings.of(config), None)
    with pytest.raises(ConfigError, match="fp8=hybrid makes that untrue .an FP8 scale is a maximum"):
        signal_rule(load_config(None, [FP8, "skip.mode=exact"]))


@pytest.mark.parametrize("recipe", [None, "tensorwise", "blockwise", "delayed"])
def test_fp8_maxima_are_never_reduced_over_data_parallel_ranks(recipe):
    """Those ranks run different numbers of micro-batches; tensor and context ranks run the same."""
    overrides = [FP8] if recipe is None else [FP8, f"megatron.transformer.fp8_recipe={recipe}"]
    fields = transformer_fields(load_config(None, overrides).megatron.transformer, lora_rank=None)
    assert fields["fp8"] == "hybrid" and fields["tp_only_amax_red"] is True
    assert "tp_only_amax_red" not in transformer_fields({}, lora_rank=None)
