"""Shapes of released models: every tensor's name and size is transformers', at full size and on the meta device."""

import math

import pytest
import torch

from megatron_rl.model.costs import flops_per_token
from megatron_rl.model.hf_config import ModelShape, read_shape
from megatron_rl.weights.config_json import read_hf_config
from megatron_rl.weights.fused import file_tensors
from megatron_rl.weights.mapping import hf_size, layer_entries
from megatron_rl.weights.reader import used_names
from tests.published.configs import ELEMENTS, HERE, fields_of, is_refused, text_of, thin_fields


def assert_names_and_sizes(config, numbers: int) -> ModelShape:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    wanted = {key: tuple(x.shape) for key, x in file_tensors(model.state_dict(), config.model_type).items()}
    if config.tie_word_embeddings:
        del wanted["lm_head.weight"]  # in the state dict, not in files
    assert sum(math.prod(size) for size in wanted.values()) == numbers
    shape = read_shape(config, layer_spec="torch")
    assert {key: hf_size(shape, key) for key in used_names(shape)} == wanted
    rules = len(shape.delta.layers) * shape.delta.rule_cost if shape.delta else 0.0  # beside what the numbers multiply
    assert 0 < flops_per_token(shape, 0.0) < 6 * (numbers + rules)
    return shape


@pytest.mark.parametrize("name", ELEMENTS)
def test_names_and_sizes_of_a_released_model_are_those_of_transformers(name: str) -> None:
    """A config as published is read as a run reads it, or refused by name."""
    if not is_refused(name, HERE / name):
        assert_names_and_sizes(read_hf_config(HERE / name), ELEMENTS[name])


MAVERICK = dict(num_local_experts=128, interleave_moe_layer_step=2, use_qk_norm=False)


@pytest.mark.parametrize(
    ("kind", "fields", "numbers"),
    [
        ("GptOssConfig", dict(num_hidden_layers=36, num_local_experts=128), 116_829_156_672),
        ("Llama4TextConfig", {}, 107_769_861_120),
        ("Llama4TextConfig", MAVERICK, 400_711_848_960),
    ],
    ids=["gpt-oss-120b", "Llama-4-Scout", "Llama-4-Maverick"],
)
def test_names_and_sizes_on_paper_are_those_of_transformers(kind: str, fields: dict, numbers: int) -> None:
    """Of models whose config is not published here; the classes' defaults are a release's."""
    import transformers

    shape = assert_names_and_sizes(getattr(transformers, kind)(**fields), numbers)
    if kind == "GptOssConfig":
        assert shape.windows == (128, 0) * 18
    else:
        assert shape.chunked.turned_layers == tuple(i for i in range(48) if i % 4 != 3)


def test_layers_of_glm_4_5_air_are_of_two_kinds() -> None:
    shape = read_shape(read_hf_config(HERE / "GLM-4.5-Air"), layer_spec="torch")
    assert layer_entries(shape, 0) != layer_entries(shape, 1) == layer_entries(shape, 45)


@pytest.mark.parametrize("name", ELEMENTS)
def test_a_thin_copy_keeps_every_field_that_is_no_size(name: str) -> None:
    """A thin copy differs in sizes and token ids alone, and in how far a rope scaling or a window reaches."""
    fields, thin = fields_of(name), thin_fields(name)
    assert fields == text_of(fields) or {key for key in fields if thin[key] != fields[key]} == {"text_config"}
    fields, thin = text_of(fields), text_of(thin)
    sizes = {key for key, value in fields.items() if isinstance(value, int) and not isinstance(value, bool)}
    reach = {"rope_scaling", "layer_types", "eos_token_id", "quantization_config"}
    assert {key for key in fields if thin.get(key) != fields[key]} <= sizes | reach
    assert set(thin) == set(fields) - {"quantization_config"}
    kept = {"num_experts_per_tok", "n_group", "topk_group", "n_shared_experts", "linear_conv_kernel_dim"}
    assert all(thin[key] == fields[key] for key in kept & set(fields))
    assert set(thin.get("layer_types", ())) == set(fields.get("layer_types", ()))
