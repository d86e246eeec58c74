"""The loaded model computes what the Hugging Face model computes, and exports what it was given, to the bit."""

import json
import math
import pathlib
import subprocess
import sys
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.backend import MegatronBackend
from megatron_rl.config import RolloutConfig, load_config
from megatron_rl.distributed import topology
from megatron_rl.rollout.engines.embedded import TransformersEngine
from megatron_rl.weights.export import load_weights, named_weights
from megatron_rl.weights.fused import file_tensors
from megatron_rl.weights.reader import HuggingFaceReader
from tests.equality.layouts import EP2, ETP1, PP2, SP, TP2, VPP2
from tests.equality.rig import DEFAULTS, any_tokenizer, equal_by_name, open_rig, ragged_advantages, sizes
from tests.equality.rows import row
from tests.pairwise import quick
from tests.patience import patient
from tests.reference import (
    FAMILIES,
    MIXTURES,
    WINDOWED,
    file_weights,
    make_samples,
    masked_logprobs,
    reference_logprobs,
    tiny_model,
)

# Two implementations of a forward pass in float32 (4 layers, |logprob| < 20): seen 2e-6; a lost bias or a wrong rotary
# frequency shows at 1e-2 and above.
LOGPROB_TOLERANCE = 1e-4
TEMPERATURE = 0.7  # not 1, so that a log-prob at the wrong temperature shows

SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2)]
FILES = (*("PP2 qwen2_tied", "TP2 llama", "TP2-PP2 phi3", "TP2 olmo2", "PP2 gemma3_text", "one qwen3_moe"),
         *("TP2-SP glm4_moe", "TP2-SP deepseek_v3", "EP2 moonlight", "TP2-SP-EP2-ETP1 gpt_oss", "EP2 llama4"),
         *("TP2-SP llama4_interleaved", "TP2-SP-EP2-ETP1 mixtral", "TP2-SP qwen3_moe"),
         *("TP2 qwen3_5_text", "TP2-SP qwen3_next", "EP2 qwen3_5_moe_text"))
LONG_FILES = (
    *("TP2 qwen2_tied", "TP2-PP2 qwen2_tied", "PP2 llama", "TP2-PP2 llama", "EP2 glm4_moe", "PP2 glm4_moe"),
    *("EP2 gpt_oss", "EP2 qwen3_moe", "EP2 mixtral", "TP2 olmo3", "TP2-SP-EP2 mixtral", "EP2-PP2-VPP2 qwen3_moe"),
)
LORA = ("lora.rank=2", "lora.targets=[linear_qkv]")


def test_device_contexts_work_beside_megatron():
    """transformers builds models under ``torch.device("meta")``, which our view of the host must leave alone."""
    code = """
import torch, megatron_rl.distributed.platform
with torch.device("meta"):
    built = (torch.arange(2), torch.empty(2), torch.ones(2), torch.tensor([1.0]))
assert all(x.is_meta for x in built), [x.device for x in built]
"""  # a process of its own: torch builds its list of factories once
    subprocess.run([sys.executable, "-c", code], check=True, timeout=patient(600),
                   cwd=pathlib.Path(__file__).parents[2])


def gaps_of(rank: int, world: int, families: Iterable[str], layout: tuple[str, ...]) -> dict[str, tuple[float, bool]]:
    """Return each family's largest gap of a log-prob to the reference, and whether the export equals the import."""
    found = {}
    for family in families:
        whole = (ETP1,) if family == "gpt_oss" else ()  # experts with biases are not split
        with open_rig(family, f"rollout.temperature={TEMPERATURE}", *layout, *whole, samples=7) as rig:
            gap = float(np.abs(rig.logprobs() - masked_logprobs(rig.model, rig.samples, TEMPERATURE)).max())
            loaded, exported = file_weights(rig.model), rig.weights()
            if rig.model.config.tie_word_embeddings:
                del loaded["lm_head.weight"]
            found[family] = (gap, equal_by_name(exported, loaded))
    return found


def assert_equal(pool, world: int, families: Iterable[str], *layout: str) -> None:
    for found in pool.run(world, gaps_of, tuple(families), layout, timeout_s=60):
        assert max(gap for gap, _ in found.values()) < LOGPROB_TOLERANCE, found
        assert all(same for _, same in found.values()), found


@pytest.mark.parametrize(("tensor", "pipeline"),
                         [*SHAPES[:2], *(pytest.param(*x, marks=pytest.mark.long) for x in SHAPES[2:])])
def test_logprobs_equal_hugging_face_and_export_equals_import(pool, tensor, pipeline):
    mixtures = MIXTURES if tensor == 1 else ()  # several tensor ranks and experts need sequence parallelism
    assert_equal(pool, tensor * pipeline, (*FAMILIES, *mixtures), *sizes(tensor, pipeline))


def test_logprobs_under_sequence_parallelism_equal_hugging_face(pool):
    assert_equal(pool, 2, (*FAMILIES, *MIXTURES), TP2, SP)


def test_logprobs_under_interleaved_stages_equal_hugging_face(pool):
    """Stages of one chunk each are its case [1-2], which is long."""
    assert_equal(pool, 2, (*FAMILIES, *MIXTURES), PP2, VPP2)


def test_logprobs_within_a_sliding_window_equal_hugging_face(pool):
    """Windows of 5 tokens, in all layers or in the second half: each stage knows its layers' own."""
    assert_equal(pool, 2, WINDOWED, PP2)


class CountingReader(HuggingFaceReader):
    """Adds up the elements that pass through it."""

    elements = 0

    def read(self, *given):
        part = super().read(*given)
        self.elements += part.numel()
        return part


def load_from_files(rank: int, world: int, path: str, overrides: tuple[str, ...], save_to: str) -> dict[str, object]:
    config = load_config(None, [*DEFAULTS, *overrides, f"model.hf_path={path}"])
    try:
        backend = MegatronBackend(config)
        model, place = backend.chunks[0].module, backend.topology
        exported = {name: tensor.clone() for name, tensor in backend.export()}
        reader = CountingReader(path)
        load_weights([model], backend.shape, place, reader)
        width = backend.shape.padded_vocab_size // place.tensor_size
        pad_rows = width - min(width, backend.shape.vocab_size - place.tensor_rank * width)
        tables = [x for name, x in model.named_parameters() if "embedding" in name or "output" in name]
        pads = sum(pad_rows * x.shape[1] for x in tables if x.shape[0] == width)
        owned = sum(x.numel() for x in named_weights(model).values()) - pads
        backend.save_hugging_face(pathlib.Path(save_to), any_tokenizer())
        return {"exported": exported, "read": reader.elements, "owned": owned}
    finally:
        topology.destroy()


@pytest.mark.parametrize("name", quick((*FILES, *LONG_FILES), *FILES))
def test_files_load_in_slices_and_come_back(pool, tmp_path, name):
    """Each rank reads exactly the elements of its own parameters; whole directories come out."""
    from transformers import AutoModelForCausalLM

    world, family, overrides = row(name)
    _, model = tiny_model(family, layers=4)
    source, copy = tmp_path / "source", tmp_path / "copy"
    model.save_pretrained(source, max_shard_size="100KB")
    wanted = {k: v for file in source.glob("*.safetensors") for k, v in load_file(file).items()}
    wanted = file_tensors(wanted, model.config.model_type)
    assert len(list(source.glob("*.safetensors"))) > 3
    (source / "additional_chat_templates").mkdir()
    travels = ["generation_config.json", "tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model", "LICENSE"]
    travels += ["chat_template.jinja", "special_tokens_map.json", "additional_chat_templates/tools.jinja"]
    stays = ["modeling_own.py", "adapter_config.json", "quantize_config.json", "optimizer.pt"]
    for name in (*travels, *stays):
        (source / name).write_text(json.dumps({"of": name}))
    (tmp_path / "copy_adapter").mkdir()
    results = pool.run(world, load_from_files, str(source), overrides, str(copy), timeout_s=60)
    total = sum(math.prod(x.shape) for x in wanted.values())
    for result in results:
        assert equal_by_name(result["exported"], wanted) and result["read"] == result["owned"]
        assert (result["owned"] < total) == (world > 1)
    assert {name: (copy / name).read_text() for name in travels} == {x: json.dumps({"of": x}) for x in travels}
    assert not any((copy / name).exists() for name in stays) and not (tmp_path / "copy_adapter").exists()
    eager = {"experts_implementation": "eager"} if family in MIXTURES else {}
    back = AutoModelForCausalLM.from_pretrained(copy, **eager).eval()
    assert all(torch.equal(back.state_dict()[k], v) for k, v in model.state_dict().items())
    sample = make_samples(1)[0]
    with torch.no_grad():
        assert torch.equal(reference_logprobs(back, sample)[0], reference_logprobs(model, sample)[0])


def biases_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in tensors if name.endswith("e_score_correction_bias")}


def half_precision_bias(rank: int, world: int, path: str, overrides: tuple[str, ...]) -> dict[str, object]:
    """Return the router biases of a bfloat16 policy before and after two steps, and of an engine that took them."""
    with open_rig("glm4_moe", *overrides, "model.dtype=bfloat16", f"model.hf_path={path}", samples=8) as rig:
        first = biases_of(rig.backend.export())
        for _ in range(2):
            rig.step(ragged_advantages(8), drops=True)
        last = biases_of(rig.backend.export())
        cpu = dict(seed=0, dtype=torch.bfloat16, device=torch.device("cpu"))
        engine = TransformersEngine(path, any_tokenizer(), RolloutConfig(), **cpu)
        engine.load_weights(rig.backend.export(), version=0)
        return {"first": first, "last": last, "engine": biases_of(engine._open_model().state_dict().items())}


@pytest.mark.parametrize("overrides", quick([(EP2,), (PP2,), LORA], (EP2,), LORA), ids=str)
def test_a_routers_bias_stays_float32_to_the_bit(pool, tmp_path, overrides):
    """Most of its bits are below bfloat16's. The files also hold a layer that predicts further tokens: left out."""
    _, model = tiny_model("glm4_moe")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    wanted = biases_of(tensors.items())
    tensors |= {"model.layers.2.eh_proj.weight": torch.zeros(4, 4), "model.layers.2.enorm.weight": torch.zeros(4)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert wanted and all(not torch.equal(x, x.bfloat16().float()) for x in wanted.values())
    for found in pool.run(1 if overrides == LORA else 2, half_precision_bias, str(tmp_path), overrides, timeout_s=60):
        for place, biases in found.items():
            assert set(biases) == set(wanted), place
            assert all(x.dtype == torch.float32 and torch.equal(x, wanted[k]) for k, x in biases.items()), place


@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_names_in_memory_become_those_of_files(tmp_path, family):
    """They are views, so that writing to one fills the model."""
    _, model = tiny_model(family)
    model.save_pretrained(tmp_path)
    # experts that files stack too go by a name each, on either side
    written = file_tensors(load_file(tmp_path / "model.safetensors"), model.config.model_type)
    found = file_weights(model)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert set(found) == set(written) | tied and all(torch.equal(found[k], written[k]) for k in written)
    storages = {x.untyped_storage().data_ptr() for x in model.state_dict().values()}
    assert {x.untyped_storage().data_ptr() for x in found.values()} == storages
