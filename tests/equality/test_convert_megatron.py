"""Checkpoints that Megatron-Core's own code saved, exported; and imported ones loaded by it, under tensor parallelism.

The model here is Megatron-Core's alone: its layer spec, its attention and rotary embedding over padded rows, its
sharded state dict, its save and load. Nothing of megatron_rl stands between it and the files but the conversion, so
that two mistakes cannot cancel.
"""

import json
import pathlib

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from megatron_rl.checkpoint import model_state
from megatron_rl.checkpoint.convert import Cut, export_folder, import_folder
from megatron_rl.checkpoint.megatron_lm import open_folder
from megatron_rl.checkpoint.torch_dist import TorchDistReader
from megatron_rl.config import ParallelConfig
from megatron_rl.distributed import topology
from megatron_rl.model.hf_config import read_shape
from tests.equality.layouts import PP2, SHARDED, TP2
from tests.equality.rig import open_rig, ragged_advantages
from tests.pairwise import pairwise, quick
from tests.reference import tiny_config, tiny_model

from megatron.core import dist_checkpointing  # isort: skip  (after platform)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # isort: skip
from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

PADDED = 128  # Megatron-LM's --make-vocab-size-divisible-by; the vocabulary has 99
TOLERANCE = 1e-5  # of a log-prob, float32, two implementations of 4 layers
SAVED = {"TP2-qwen2_untied": (2, "qwen2_untied", {}),
         "TP2-llama-of-layers": (2, "llama", {"non_homogeneous_layers": True}),
         "TP2-mistral-of-shards": (2, "mistral", {"singleton_local_shards": True}),
         "TP1-mixtral": (1, "mixtral", {}),
         "TP1-qwen3_moe-of-shards": (1, "qwen3_moe", {"singleton_local_shards": True}),
         "TP2-qwen3": (2, "qwen3", {}),
         "TP1-qwen2_tied": (1, "qwen2_tied", {})}


def megatron_model(family: str, tensor: int) -> GPTModel:
    """Build a GPTModel of ``tiny_config(family)``'s shape with weights of its own."""
    hf = tiny_config(family)
    mixture = family in ("mixtral", "qwen3_moe")
    ffn = hf.moe_intermediate_size if family == "qwen3_moe" else hf.intermediate_size
    experts = dict(num_moe_experts=4, moe_ffn_hidden_size=ffn, moe_router_topk=2, moe_token_dispatcher_type="alltoall")
    unfused = ("gradient_accumulation_fusion", "masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion")
    sizes = dict(num_layers=hf.num_hidden_layers, hidden_size=hf.hidden_size, ffn_hidden_size=ffn)
    sizes |= dict(num_attention_heads=4, num_query_groups=2, tensor_model_parallel_size=tensor)
    layer = dict(gated_linear_unit=True, activation_func=F.silu, normalization="RMSNorm", add_bias_linear=False)
    start = dict(params_dtype=torch.float32, use_cpu_initialization=True, init_method_std=0.08)
    config = TransformerConfig(**(sizes | layer | start | dict.fromkeys(("attention_dropout", "hidden_dropout"), 0.0)),
                               kv_channels=hf.to_dict().get("head_dim") or hf.hidden_size // 4,
                               layernorm_epsilon=hf.rms_norm_eps, add_qkv_bias=family.startswith("qwen2"),
                               qk_layernorm=family.startswith("qwen3"), **dict.fromkeys(unfused, False),
                               **(experts | dict(moe_router_load_balancing_type="none") if mixture else {}))
    kind = dict(normalization="RMSNorm", qk_layernorm=config.qk_layernorm, moe_grouped_gemm=False)
    spec = get_gpt_layer_local_spec(**kind, num_experts=4 if mixture else None)
    torch.manual_seed(0)  # the initialisation makes whole matrices on every rank and cuts them
    return GPTModel(config, spec, vocab_size=PADDED, max_sequence_length=256, position_embedding_type="rope",
                    parallel_output=False, rotary_base=hf.rope_parameters["rope_theta"],
                    share_embeddings_and_output_weights=hf.tie_word_embeddings).eval()


@torch.no_grad()
def megatron_logprobs(model: GPTModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probs of a Megatron-Core model, [rows, tokens, 99]."""
    places = torch.arange(tokens.shape[1])[None].expand_as(tokens)
    return model(tokens, places, None)[..., :99].float().log_softmax(-1)


def tokens() -> torch.Tensor:
    return torch.randint(99, (3, 24), generator=torch.Generator().manual_seed(5))


def saved_by_megatron(rank: int, world: int, family: str, folder: str, metadata: dict) -> torch.Tensor:
    place = topology.initialize(ParallelConfig(tensor=world), deadline_s=60)
    try:
        model = megatron_model(family, place.tensor_size)
        path = pathlib.Path(folder, "iter_0000100")
        path.mkdir(parents=True, exist_ok=True)
        state = {"model": model.sharded_state_dict(metadata=metadata), "iteration": 100, "checkpoint_version": 3.0}
        dist_checkpointing.save(state, str(path))
        pathlib.Path(folder, "latest_checkpointed_iteration.txt").write_text("100")
        return megatron_logprobs(model, tokens())
    finally:
        topology.destroy()


def loaded_by_megatron(rank: int, world: int, family: str, folder: str) -> torch.Tensor:
    place = topology.initialize(ParallelConfig(tensor=world), deadline_s=60)
    try:
        model = megatron_model(family, place.tensor_size)
        loaded = dist_checkpointing.load({"model": model.sharded_state_dict(metadata={})}, folder)
        assert loaded["iteration"] == 0
        model.load_state_dict(loaded["model"])
        return megatron_logprobs(model, tokens())
    finally:
        topology.destroy()


@torch.no_grad()
def transformers_logprobs(path: pathlib.Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    mixture = json.loads((path / "config.json").read_text())["model_type"] in ("mixtral", "qwen3_moe")
    eager = {"experts_implementation": "eager"} if mixture else {}
    return AutoModelForCausalLM.from_pretrained(path, **eager).eval()(tokens()).logits.float().log_softmax(-1)


def exported(source, family: str, folder: pathlib.Path) -> dict[str, torch.Tensor]:
    """Export a checkpoint into ``folder / "out"`` and return the file's tensors."""
    hf_config = tiny_config(family)
    hf_config.save_pretrained(folder / "hf")
    export_folder(source, read_shape(hf_config, layer_spec="torch"), folder / "hf", folder / "out")
    return load_file(folder / "out" / "model.safetensors")


@pytest.mark.parametrize("name", quick(SAVED, *(x for x in SAVED if x not in ("TP2-mistral-of-shards", "TP2-qwen3"))))
def test_a_checkpoint_of_megatron_core_exports_to_the_same_model(pool, tmp_path, name):
    """The checkpoint has 128 rows of embedding, the exported file the vocabulary's 99."""
    world, family, metadata = SAVED[name]
    wanted = pool.run(world, saved_by_megatron, family, str(tmp_path / "megatron"), metadata, timeout_s=60)[0]
    source = open_folder(tmp_path / "megatron")
    assert source.name == "iter_0000100"
    found = exported(source, family, tmp_path)
    assert found["model.embed_tokens.weight"].shape == (99, 64)
    assert ("lm_head.weight" in found) is not tiny_config(family).tie_word_embeddings
    assert (transformers_logprobs(tmp_path / "out") - wanted).abs().max().item() < TOLERANCE and wanted.std() > 0.1


@pytest.mark.parametrize(("family", "cut"), pairwise(["qwen2_untied", "qwen3", "mixtral"], [2, 1], strength=1))
def test_an_imported_checkpoint_loads_in_megatron_core_under_another_topology(pool, tmp_path, family, cut):
    """It is cut for TP1 or TP2 and loaded by TP2; a mixture by TP1, as experts want sequence parallelism beside TP."""
    _, model = tiny_model(family)
    model.save_pretrained(tmp_path / "hf")
    shape = read_shape(model.config, layer_spec="torch", vocab_multiple=cut)
    path = import_folder(tmp_path / "hf", shape, tmp_path / "megatron", cut=Cut(tensor=cut, pipeline=2))
    assert path.name == (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").read_text() == "release"
    found = pool.run(1 if family == "mixtral" else 2, loaded_by_megatron, family, str(path), timeout_s=60)
    wanted = transformers_logprobs(tmp_path / "hf")
    assert all((x - wanted).abs().max() < TOLERANCE for x in found)


def saved_by_training(rank: int, world: int, root: str, topology: tuple[str, ...]) -> dict[str, torch.Tensor]:
    with open_rig("qwen3", *topology, "optimizer.lr=0.01", "model.dtype=bfloat16", samples=8, total_steps=4) as rig:
        rig.backend.keep_reference()
        rig.step(ragged_advantages(8), drops=True)
        model_state.save(rig.backend, pathlib.Path(root), 7, {"state.json": "{}"}).finish()
        return rig.weights()


@pytest.mark.parametrize("topology",
                         [pytest.param((TP2,), marks=pytest.mark.long(seconds=20), id="TP2"), (PP2, *SHARDED)])
def test_a_training_runs_checkpoint_exports_its_weights(pool, nursery, tmp_path, topology):
    """AdamW's states and the reference policy lie beside them and stay behind."""
    trained = pool.run(2, saved_by_training, str(tmp_path / "checkpoints"), topology, timeout_s=60)[0]
    source = open_folder(tmp_path / "checkpoints")
    assert source.name == "iter_0000007"
    assert any(x.startswith("optimizer.state.exp_avg.") for x in TorchDistReader(source.path).tensors)
    found = exported(source, "qwen3", tmp_path)
    assert set(found) == set(trained)
    assert all(found[k].dtype == torch.bfloat16 and torch.equal(found[k], v.cpu()) for k, v in trained.items())
    out = tmp_path / "again"
    given = ("export", str(tmp_path / "checkpoints"), str(out), "--hf", str(tmp_path / "hf"), "--overwrite")
    code, said = nursery.run_script("megatron_rl.commands.convert", *given)
    assert code == 0 and (out / "model.safetensors").exists(), said
    largest = max(source.path.glob("*.distcp"), key=lambda x: x.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    code, said = nursery.run_script("megatron_rl.commands.convert", *given)
    assert code == 2 and f"{largest} has SHA-256" in said, said
