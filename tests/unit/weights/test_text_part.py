"""Config and files of a vision-language model of Qwen3.5 are read as those of its text part, or refused by name."""

import json
import logging
import pathlib

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.errors import ConfigError
from megatron_rl.model.hf_config import read_shape
from megatron_rl.rollout.vllm.arguments import family_arguments
from megatron_rl.weights.config_json import ignored_fields, load_hf_config, read_hf_config, stop_ids, transformers_model
from megatron_rl.weights.families.register import TEXT_PARTS
from megatron_rl.weights.reader import HuggingFaceReader, check_tensors
from tests.reference import tiny_config, tiny_whole

FAMILIES = tuple(TEXT_PARTS.values())


def fields_of(family: str, outer: dict | None = None, **inner: object) -> dict[str, object]:
    """Return the fields of a vision-language model's config.json; a value of None takes a field away."""
    text = tiny_config(family, layers=4).to_dict() | inner
    text = {name: x for name, x in text.items() if x is not None}
    (whole,) = (name for name, part in TEXT_PARTS.items() if part == family)
    return {"model_type": whole, "text_config": text, "vision_config": {"depth": 1}} | (outer or {})


def write(folder: pathlib.Path, fields: dict) -> pathlib.Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_models_config_is_its_text_parts(tmp_path, family):
    config = load_hf_config(write(tmp_path, fields_of(family, mtp_num_hidden_layers=1, mamba_ssm_dtype="float32")))
    wanted = tiny_config(family, layers=4)
    assert type(config) is type(wanted) and config.model_type == family
    assert read_shape(config, layer_spec="torch") == read_shape(wanted, layer_spec="torch")
    with torch.device("meta"):
        assert [type(transformers_model(config, tmp_path)).__name__] == config.architectures
    assert ignored_fields(tmp_path) == {} and config.name_or_path == str(tmp_path)


def test_fields_beside_the_text_part_are_taken_where_it_lacks_them(tmp_path):
    outer = dict(tie_word_embeddings=True, eos_token_id=[3, 4], pad_token_id=5, dtype="bfloat16")
    other = dict(tie_word_embeddings=False, eos_token_id=7, pad_token_id=8, dtype="float32")
    for inner in (dict.fromkeys(outer), other):
        write(tmp_path, fields_of("qwen3_5_text", outer, **inner))
        config = read_hf_config(tmp_path)
        wanted, stops = (other, [7]) if inner is other else (outer, [3, 4])
        found = {name: getattr(config, name) for name in wanted}
        assert found | {"dtype": str(config.dtype).removeprefix("torch.")} == wanted and stop_ids(tmp_path) == stops
        tied = {"text_config": {"tie_word_embeddings": wanted["tie_word_embeddings"]}}
        overrides = {"architectures": ["Qwen3_5ForCausalLM"]} | tied
        assert family_arguments(str(tmp_path)) == {"hf_overrides": overrides}
    write(tmp_path, tiny_config("qwen3_5_text").to_dict())
    assert family_arguments(str(tmp_path)) == {}


REFUSED = [
    (dict(text_config=None), {}, " holds a 'qwen3_5' model and no text_config, .* with model_type=qwen3_5_text"),
    (dict(text_config=3), {}, ": text_config must be an object, and it is 3"),
    (dict(model_type="qwen3_vl"), {}, " holds a 'qwen3_vl' model; this version builds qwen2, "),
    ({}, dict(model_type="qwen3"), ": text_config holds a 'qwen3' model; that of a text part here is qwen3_5_text"),
    ({}, dict(text_config={"hidden_size": 3}), " holds a model within the model, text_config="),
    ({}, dict(hidden_size=None), " lacks the field hidden_size, a size of the model"),
    ({}, dict(linear_conv_kernel_dim=1), ": linear_conv_kernel_dim must be 2 to 1024, and it is 1"),
    ({}, dict(linear_num_key_heads=0), ": linear_num_key_heads must be 1 to 65536, and it is 0"),
    ({}, dict(linear_num_value_heads="4"), ": linear_num_value_heads must be an integer, and it is '4'"),
    ({}, dict(linear_key_head_dim=2.5), ": linear_key_head_dim must be an integer, and it is 2.5"),
    ({}, dict(linear_value_head_dim=-8), ": linear_value_head_dim must be 1 to 65536, and it is -8"),
    ({}, dict(full_attention_interval=0), ": full_attention_interval must be 1 to 10000, and it is 0"),
    (dict(quantization_config={"quant_method": "awq"}), {}, ": quantization_config says .* quantised by 'awq'"),
]


@pytest.mark.parametrize(("outer", "inner", "message"), REFUSED)
def test_an_odd_whole_config_is_refused_by_name(tmp_path, outer, inner, message):
    write(tmp_path, fields_of("qwen3_5_text", outer, **inner))
    with pytest.raises(ConfigError, match=f"^{tmp_path}/config.json{message}"):
        read_hf_config(tmp_path)


@pytest.mark.parametrize(("changes", "message"), [
    (dict(attn_output_gate=False), "attn_output_gate=false of qwen3_5_moe_text is not supported"),
    (dict(output_gate_type="sigmoid"), "output_gate_type='sigmoid' of qwen3_5_moe_text is not supported"),
    (dict(num_experts=1), "num_experts_per_tok=2 is more than the 1 experts"),
    (dict(shared_expert_intermediate_size=0), "shared_expert_intermediate_size must be 1 to 16777216, and it is 0"),
])
def test_what_delta_nets_and_their_mixtures_lack_is_refused_by_name(tmp_path, changes, message):
    write(tmp_path, tiny_config("qwen3_5_moe_text").to_dict() | changes)
    with pytest.raises(ConfigError, match=message):
        read_shape(read_hf_config(tmp_path), layer_spec="torch")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text", "qwen3_next"])
def test_a_null_that_names_no_code_changes_nothing_and_is_not_passed_on(tmp_path, family):
    wanted = tiny_config(family)
    config = read_hf_config(write(tmp_path, wanted.to_dict() | {"auto_map": None, "attn_output_gate": True}))
    assert read_shape(config, layer_spec="torch") == read_shape(wanted, layer_spec="torch")
    config.save_pretrained(tmp_path / "copy")
    assert "auto_map" not in json.loads((tmp_path / "copy/config.json").read_text())


def test_tower_and_further_tokens_are_left_out_with_a_warning_each(tmp_path, caplog):
    tiny_whole("qwen3_5_moe_text").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tower = sorted(name for name in tensors if name.startswith("model.visual."))
    save_file(tensors | {"mtp.fc.weight": torch.ones(2), "mtp.norm.weight": torch.ones(2)}, file)
    shape = read_shape(load_hf_config(tmp_path), layer_spec="torch")
    with caplog.at_level(logging.WARNING):
        check_tensors(HuggingFaceReader(tmp_path), shape)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path} holds 2 tensors of layers that predict further tokens, mtp.fc.weight the first; they are left out",
        f"{tmp_path} holds {len(tower)} tensors of a vision tower, {tower[0]} the first; they are left out",
    ]
    save_file(tensors | {"model.norm.weight": torch.ones(64)}, file)
    twice = f"{tmp_path} holds both model.norm.weight and model.language_model.norm.weight; remove one of them"
    with pytest.raises(ConfigError, match=f"^{twice}"):
        HuggingFaceReader(tmp_path)
    save_file(tensors | {"model.audio.weight": torch.ones(64)}, file)
    with pytest.raises(ConfigError, match="holds 1 tensors that the model is not made of, model.audio.weight"):
        check_tensors(HuggingFaceReader(tmp_path), shape)


def test_block_fp8_of_a_whole_model_is_read(tmp_path):
    """The scales have the whole model's names too, and quantization_config stands beside text_config."""
    tiny_whole("qwen3_5_text").save_pretrained(tmp_path)
    config, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    block = {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "dynamic"}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": block}))
    tensors, name = load_file(file), "layers.0.linear_attn.in_proj_z.weight"
    there = f"model.language_model.{name}"
    size = tensors[there].shape
    tensors[there] = torch.full(size, 2.0).to(torch.float8_e4m3fn)
    save_file(tensors | {f"{there}_scale_inv": torch.full((size[0] // 8, size[1] // 8), 0.25)}, file)
    reader = HuggingFaceReader(tmp_path)
    check_tensors(reader, read_shape(load_hf_config(tmp_path), layer_spec="torch"))
    assert torch.equal(reader.read(f"model.{name}", 0, 0, size[0]), torch.full(size, 0.5))
