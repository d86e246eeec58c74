"""The text part of a vision-language checkpoint is loaded as transformers loads it, and comes out as a text model."""

import json
import pathlib

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_rl.backend import MegatronBackend
from megatron_rl.checkpoint.convert import Cut, export_folder, import_folder
from megatron_rl.checkpoint.megatron_lm import open_folder
from megatron_rl.checkpoint.roundtrip import compare_folders
from megatron_rl.commands.convert.source import read_model
from megatron_rl.config import RolloutConfig
from megatron_rl.distributed import topology
from megatron_rl.rollout.engines.embedded import TransformersEngine
from tests.equality.rig import Rig, any_tokenizer, config_of, equal_by_name
from tests.reference import make_samples, masked_logprobs, tiny_whole

TOLERANCE = 1e-5  # of a log-prob, float32, another order of summation: seen 1.4e-6
FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text")
OF_THE_TOWER = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
NUM_SAMPLES = 7


def write_whole(folder: pathlib.Path, family: str):
    """Write a folder as releases are: shards, a tower, layers that predict tokens, processors. Return its model."""
    model = tiny_whole(family)
    model.save_pretrained(folder, max_shard_size="100KB")
    index = folder / "model.safetensors.index.json"
    mapped = json.loads(index.read_text())
    further = {"mtp.fc.weight": torch.ones(64, 128), "mtp.layers.0.mlp.experts.down_proj": torch.ones(4, 64, 32)}
    save_file(further, folder / "further.safetensors")
    mapped["weight_map"] |= dict.fromkeys(further, "further.safetensors")
    index.write_text(json.dumps(mapped))
    for name in OF_THE_TOWER:
        (folder / name).write_text("{}")
    return model


def text_state(whole) -> dict[str, torch.Tensor]:
    """Return the state of a whole model's text part, under the names of the text model."""
    state = {f"model.{name}": x for name, x in whole.model.language_model.state_dict().items()}
    return state | {"lm_head.weight": whole.lm_head.weight.detach()}


def assert_equal_in_transformers(folder: pathlib.Path, whole) -> None:
    """Assert that transformers loads a folder as a text model with nothing missing, to the bit of the whole one's."""
    from transformers import AutoModelForCausalLM

    fields = json.loads((folder / "config.json").read_text())
    assert fields["model_type"] in FAMILIES and fields["architectures"][0].endswith("ForCausalLM")
    assert "text_config" not in fields and not any((folder / name).exists() for name in OF_THE_TOWER)
    names = {name for file in folder.glob("*.safetensors") for name in safe_open(file, "pt").keys()}  # noqa: SIM118
    assert not any(name.startswith(("model.visual.", "model.language_model.", "mtp.")) for name in names)
    back, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    assert equal_by_name(back.state_dict(), text_state(whole))


def loaded(rank: int, world: int, source: str, copy: str) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Return the log-probs of a folder's text part and what the embedded engine holds; write it as a folder too."""
    try:
        rig = Rig(backend=MegatronBackend(config_of(f"model.hf_path={source}")), model=None)
        rig.take(make_samples(NUM_SAMPLES))
        rig.backend.save_hugging_face(pathlib.Path(copy), any_tokenizer())
        cpu = dict(seed=0, dtype=torch.float32, device=torch.device("cpu"))
        engine = TransformersEngine(source, any_tokenizer(), RolloutConfig(), **cpu)
        engine.load_weights(rig.backend.export(), version=0)
        return rig.logprobs(), dict(engine._open_model().state_dict())
    finally:
        topology.destroy()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_part_has_transformers_logprobs_and_is_exported_as_a_text_model(pool, tmp_path, family):
    source, copy = tmp_path / "source", tmp_path / "copy"
    whole = write_whole(source, family)
    ((found, held),) = pool.run(1, loaded, str(source), str(copy), timeout_s=60)
    assert equal_by_name(held, text_state(whole))
    assert np.abs(found - masked_logprobs(whole, make_samples(NUM_SAMPLES))).max() < TOLERANCE
    assert_equal_in_transformers(copy, whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversion_there_and_back_gives_the_text_model(tmp_path, family):
    source, back = tmp_path / "source", tmp_path / "back"
    whole = write_whole(source, family)
    _, shape = read_model(source)
    import_folder(source, shape, tmp_path / "megatron", cut=Cut())
    held = open_folder(tmp_path / "megatron", None)
    export_folder(held, shape, held.hf, back)
    assert_equal_in_transformers(back, whole)
    assert compare_folders(source, back, None, shape)["different"] == []


def test_files_of_the_text_model_may_keep_the_names_of_the_whole_one(pool, tmp_path):
    """transformers writes them so, if it had loaded the text part of a vision-language folder."""
    from transformers import AutoModelForCausalLM

    source, text, copy = (tmp_path / name for name in ("source", "text", "copy"))
    whole = write_whole(source, "qwen3_5_text")
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(text)
    assert "model.language_model.norm.weight" in load_file(text / "model.safetensors")
    ((found, held),) = pool.run(1, loaded, str(text), str(copy), timeout_s=60)
    assert np.abs(found - masked_logprobs(whole, make_samples(NUM_SAMPLES))).max() < TOLERANCE
    assert_equal_in_transformers(copy, whole)
