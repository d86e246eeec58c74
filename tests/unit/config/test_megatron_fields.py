"""All fields of the installed Megatron-Core's config classes are accepted, typed as these want them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_rl.backend.optimizer import REFUSED_OPTIMIZER_FIELDS
from megatron_rl.config.megatron_fields import resolve_fields
from megatron_rl.errors import ConfigError
from megatron_rl.model.build import REFUSED_TRANSFORMER_FIELDS

from megatron.core.distributed import DistributedDataParallelConfig  # isort: skip
from megatron.core.optimizer import OptimizerConfig  # isort: skip
from megatron.core.transformer.enums import AttnBackend  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip


@pytest.mark.parametrize("cls", [TransformerConfig, DistributedDataParallelConfig, OptimizerConfig])
def test_every_field_of_the_installed_class_is_known(cls):
    given = {field.name: None for field in dataclasses.fields(cls)}
    assert resolve_fields(given, cls, "megatron.x", {}) == given


def test_names_become_dtypes_and_enum_members_where_the_type_asks_for_them():
    assert resolve_fields({"exp_avg_dtype": "bfloat16"}, OptimizerConfig, "megatron.optimizer", {}) == {
        "exp_avg_dtype": torch.bfloat16
    }
    found = resolve_fields(
        {"attention_backend": "flash", "fp8": "hybrid"}, TransformerConfig, "megatron.transformer", {}
    )
    assert found == {"attention_backend": AttnBackend.flash, "fp8": "hybrid"}


@pytest.mark.parametrize(
    "cls,given,words",
    [
        (OptimizerConfig, {"exp_avg_dtype": "bfloat61"}, ["megatron.x.exp_avg_dtype", "bfloat61"]),
        (TransformerConfig, {"attention_backend": "flush"}, ["megatron.x.attention_backend", "flush", "flash"]),
        (DistributedDataParallelConfig, {"bucket_sise": 3}, ["megatron.x.bucket_sise", "bucket_size"]),
    ],
)
def test_what_means_nothing_is_named(cls, given, words):
    with pytest.raises(ConfigError) as error:
        resolve_fields(given, cls, "megatron.x", {})
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    "cls,refused", [(TransformerConfig, REFUSED_TRANSFORMER_FIELDS), (OptimizerConfig, REFUSED_OPTIMIZER_FIELDS)]
)
def test_refused_fields_exist_and_say_why(cls, refused):
    """Every refused field is one of the installed version, and its refusal says why.

    A refusal of a field that the installed version does not have would guard nothing.
    """
    known = {field.name for field in dataclasses.fields(cls)}
    assert set(refused) <= known, set(refused) - known
    for name, reason in refused.items():
        with pytest.raises(ConfigError, match="refused") as error:
            resolve_fields({name: 1}, cls, "megatron.x", refused)
        assert reason in str(error.value)
