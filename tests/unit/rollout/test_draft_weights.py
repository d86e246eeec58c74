"""Drafters with weights before any engine starts: a folder that cannot draft for the policy is refused by name."""

import json
import pathlib

import pytest
import torch

from megatron_rl.config import load_config
from megatron_rl.errors import ConfigError
from megatron_rl.rollout.engines.replica import ReplicaLost, check_drafters
from megatron_rl.rollout.vllm.arguments import engine_arguments
from megatron_rl.validate import rollouts, validate_config

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
POLICY = {"model_type": "qwen2", "vocab_size": 17, "max_position_embeddings": 64}
TOKENS = {"a": 0, "b": 1, "c": 2}


def folder_of(folder: pathlib.Path, tokens=TOKENS, weights: bool = True, **fields: object) -> pathlib.Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**POLICY, **fields}))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": []}))
    if weights:
        (folder / "model.safetensors").touch()
    return folder


def arguments_of(policy: pathlib.Path, method: str, drafter: pathlib.Path | None, *more: str, device=CPU) -> dict:
    named = "" if drafter is None else f"model: {drafter}, "
    drafts = f"rollout.vllm={{speculative_config: {{{named}num_speculative_tokens: 3}}}}"
    given = ("rollout.engine=vllm", f"model.hf_path={policy}", f"rollout.speculation={method}", drafts)
    config = load_config(None, [*given, "rollout.max_response_tokens=20", *more])
    sections = (config.model, config.rollout, config.weight_sync, config.lora)
    return engine_arguments(*sections, max_prompt_tokens=9, seed=0, device=device)


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_a_drafter_is_loaded_from_its_files_and_the_policy_is_not(tmp_path, method):
    """On a shared GPU a sleep keeps the drafter's weights, and those alone."""
    policy, drafter = folder_of(tmp_path / "policy"), folder_of(tmp_path / "drafter")
    found = arguments_of(policy, method, drafter)
    load = {"draft_load_config": {"load_format": "auto"}}
    wanted = {"method": method, "model": str(drafter), "num_speculative_tokens": 3} | load
    assert found["speculative_config"] == wanted and found["load_format"] == "dummy"
    assert found["max_model_len"] == 9 + 20 + 3 + 1 and "sleep_preserve_parameter_names" not in found
    found = arguments_of(policy, method, drafter, device=GPU)
    assert found["enable_sleep_mode"] and found["sleep_preserve_parameter_names"] == ["draft.*"]
    found = arguments_of(policy, method, drafter, "rollout.sleep=never", device=GPU)
    assert not found["enable_sleep_mode"] and "sleep_preserve_parameter_names" not in found


@pytest.mark.parametrize(("method", "given", "words"), [
    ("draft_model", {"vocab_size": 19}, "has vocab_size=19|has 17|speculation=off"),
    ("eagle", {"vocab_size": 16}, "has vocab_size=16|has 17"),
    ("eagle3", {"vocab_size": None, "transformer_layer_config": {"vocab_size": 5}}, "vocab_size="),
    ("draft_model", {"tokens": {"a": 0, "b": 2, "c": 1}}, "gives 'b' the id 2|policy 1|speculation=off"),
    ("draft_model", {"tokens": {"a": 0, "b": 1}}, "gives 'c' the id None|2|speculation=off"),
    ("draft_model", {"max_position_embeddings": 32}, "max_position_embeddings=32|have 33|lower"),
    ("draft_model", {"weights": False}, "neither model.safetensors nor"),
])
def test_a_folder_that_cannot_draft_for_the_policy_is_refused(tmp_path, method, given, words):
    policy, drafter = folder_of(tmp_path / "policy"), folder_of(tmp_path / "drafter", **given)
    with pytest.raises(ConfigError) as refused:
        arguments_of(policy, method, drafter)
    assert all(word in str(refused.value) for word in (*words.split("|"), str(drafter))), refused.value


def test_a_folder_without_a_config_and_a_path_that_vllm_takes_for_another_method_are_refused(tmp_path):
    policy = folder_of(tmp_path / "policy")
    with pytest.raises(ConfigError, match=r"model='.*nowhere' holds no config.json; give the local folder"):
        arguments_of(policy, "draft_model", tmp_path / "nowhere")
    misleading = folder_of(tmp_path / "my-EAGLE3-like")
    with pytest.raises(ConfigError, match="'eagle3' in its path.*rename the folder, or name a link"):
        arguments_of(policy, "draft_model", misleading)
    assert arguments_of(policy, "eagle3", misleading)["speculative_config"]["method"] == "eagle3"


def test_mtp_heads_need_a_checkpoint_that_has_them(tmp_path):
    """Their folder is the policy's, so no model is named."""
    with_heads = folder_of(tmp_path / "with", num_nextn_predict_layers=1)
    found = arguments_of(with_heads, "mtp", None)["speculative_config"]
    assert found == {"method": "mtp", "num_speculative_tokens": 3, "draft_load_config": {"load_format": "auto"}}
    with pytest.raises(ConfigError, match="speculation=mtp: .*without/config.json has no num_nextn_predict_layers"):
        arguments_of(folder_of(tmp_path / "without"), "mtp", None)
    with pytest.raises(ConfigError, match="speculation=mtp: .*empty holds neither model.safetensors"):
        arguments_of(folder_of(tmp_path / "empty", weights=False, num_nextn_predict_layers=1), "mtp", None)


def test_latent_attention_is_refused_where_engines_sleep(tmp_path):
    policy, drafter = folder_of(tmp_path / "policy"), folder_of(tmp_path / "drafter", kv_lora_rank=8)
    with pytest.raises(ConfigError, match="kv_lora_rank=8.*rollout.sleep=never"):
        arguments_of(policy, "draft_model", drafter, device=GPU)
    arguments_of(policy, "draft_model", drafter, "rollout.sleep=never", device=GPU)


def test_adapters_alone_are_refused_beside_a_drafter_with_weights():
    given = ("rollout.engine=vllm", "lora.rank=4", "weight_sync.adapters=alone")
    validate_config(load_config(None, [*given, "rollout.speculation=ngram"]), rollouts.adapters_alone)
    with pytest.raises(ConfigError, match="adapters=alone with rollout.speculation=eagle.*adapters=merged"):
        validate_config(load_config(None, [*given, "rollout.speculation=eagle"]), rollouts.adapters_alone)


def test_a_receipt_with_another_checksum_of_the_drafter_loses_the_engine():
    """A receipt without a drafter passes, and of two workers one suffices."""
    receipt = {"version": 1, "checksum": "c", "num_tensors": 2, "failure": ""}
    whole = receipt | {"drafter": {"model": "folder", "loaded": "0a", "held": "0a"}}
    check_drafters("the engine", [receipt, whole])
    spoiled = receipt | {"drafter": whole["drafter"] | {"held": "0b"}}
    with pytest.raises(ReplicaLost, match="worker 1 of the engine has other weights.* folder .*0a and is 0b"):
        check_drafters("the engine", [whole, spoiled])
