"""Checks the shape that a Hugging Face config becomes, and its refusals, without a model being built."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.config import LoraConfig, load_config
from megatron_rl.errors import ConfigError
from megatron_rl.model.costs import adapter_parameters, flops_per_token
from megatron_rl.model.gpt_oss import put_gpt_oss_layers
from megatron_rl.model.hf_config import inverse_frequencies, latent_angles, model_shape, softmax_scale
from megatron_rl.model.latent_attention import latent_fields
from megatron_rl.model.lora import adapters as adapter
from megatron_rl.model.lora.adapters import put_adapters
from megatron_rl.model.post_norm import put_norms_behind
from megatron_rl.model.settings import ModelSettings
from megatron_rl.weights.mapping import adapter_entries
from tests.adapted import adapt
from tests.reference import FAMILIES, LAYERS, MIXTURES, tiny_config, tiny_model


def shape_of(hf_config, **parallel: int | bool):
    """Return the shape under ``parallel.*``, with sizes as topology.initialize would report them."""
    config = load_config(None, [f"parallel.{name}={value}" for name, value in parallel.items()])
    degrees = config.parallel
    place = SimpleNamespace(
        tensor_size=degrees.tensor,
        pipeline_size=degrees.pipeline,
        virtual_size=degrees.virtual_pipeline,
        expert_size=degrees.expert,
        expert_tensor_size=degrees.expert_tensor or degrees.tensor,
    )
    return model_shape(hf_config, ModelSettings.of(config), place, layer_spec="torch")


def changed(family: str, **values: object):
    config = tiny_config(family)
    for name, value in values.items():
        setattr(config, name, value)
    return config


SPLIT = dict(tensor=2, sequence_parallel=True)
YARN, LINEAR = {"rope_type": "yarn", "rope_theta": 1e4}, dict(rope_type="linear", rope_theta=1e4, factor=2.0)
REFUSED = [
    (changed("qwen3"), dict(expert=2), "parallel.expert=2 splits experts and qwen3 has none; set parallel.expert=1"),
    (changed("llama"), dict(expert_tensor=2), "parallel.expert_tensor=2 splits .* llama has none; leave it null"),
    (changed("mixtral"), dict(expert=3), "parallel.expert=3 does not divide num_experts=4 of mixtral"),
    (changed("qwen3_moe"), dict(expert=8), "parallel.expert=8 does not divide num_experts=4 of qwen3_moe"),
    (changed("mixtral", intermediate_size=97), dict(expert_tensor=2), "expert_tensor=2 does not divide .*_size=97"),
    (changed("qwen3_moe", moe_intermediate_size=33), dict(expert_tensor=2), "does not divide moe_intermediate_size=33"),
    (changed("mixtral"), dict(tensor=2), "parallel.tensor=2 with experts needs parallel.sequence_parallel=true"),
    (changed("mixtral", router_jitter_noise=0.1), {}, "router_jitter_noise=0.1 of mixtral is not supported"),
    (changed("mistral", sliding_window=0), {}, "sliding_window=0 of mistral with sliding_attention is no number"),
    (changed("qwen2_tied", layer_types=["full_attention", "chunked_attention"]), {}, "chunked_attention.* of qwen2"),
    (changed("olmo2", layer_types=["sliding_attention"] * 2), {}, "sliding_attention.* of olmo2 is not supported"),
    (changed("gemma3_text", final_logit_softcapping=30.0), {}, "final_logit_softcapping=30.0 of gemma3_text is not"),
    (changed("gemma3_text", attn_logit_softcapping=50.0), {}, "attn_logit_softcapping=50.0 of gemma3_text is not"),
    (changed("gemma3_text", use_bidirectional_attention=True), {}, "use_bidirectional_attention=true of gemma3_text"),
    (changed("gemma3_text", is_causal=False), {}, "is_causal=False of gemma3_text is not supported"),
    (changed("llama4", is_causal=False), {}, "is_causal=False of llama4_text is not supported"),
    (changed("gemma3_text", hidden_activation="silu"), {}, "hidden_activation='silu' of gemma3_text is not supported"),
    (changed("phi3", resid_pdrop=0.1), {}, "resid_pdrop=0.1 of phi3 is not supported: set it to 0.0"),
    (changed("olmo2", attention_bias=True), {}, "a olmo2 model with attention_bias is not supported"),
    (changed("qwen3_moe", attention_bias=True), {}, "a qwen3_moe model with attention_bias is not supported"),
    (changed("qwen3_moe", decoder_sparse_step=2), {}, "decoder_sparse_step=2 .* of qwen3_moe leave dense layers"),
    (changed("qwen3_moe", mlp_only_layers=[1]), {}, "mlp_only_layers=.1. of qwen3_moe leave dense layers"),
    (changed("glm4_moe", norm_topk_prob=False), {}, "norm_topk_prob=false of glm4_moe with num_experts_per_tok=4"),
    (changed("glm4_moe", num_experts_per_tok=1), {}, "norm_topk_prob=true of glm4_moe with num_experts_per_tok=1"),
    (changed("glm4_moe", num_experts_per_tok=6), {}, "n_group=3 and topk_group=2 .* num_experts_per_tok=6 are not"),
    (changed("glm4_moe", n_shared_experts=0), {}, "n_shared_experts=0 of glm4_moe is not supported"),
    (changed("gpt_oss", attention_bias=False), {}, "attention_bias=false of gpt_oss is not supported"),
    (changed("gpt_oss", swiglu_alpha=1.5), {}, "swiglu_alpha=1.5 of gpt_oss is not supported; only 1.702 is"),
    (changed("gpt_oss"), SPLIT, "the experts of gpt_oss have biases, .* 2 ranks; set parallel.expert_tensor=1"),
    (changed("glm4_moe"), dict(tensor=2), "parallel.tensor=2 with experts needs parallel.sequence_parallel=true"),
    (changed("glm4_moe", intermediate_size=97), SPLIT, "parallel.tensor=2 does not divide intermediate_size=97"),
    (
        changed("glm4_moe", n_shared_experts=1, moe_intermediate_size=33),
        SPLIT | dict(expert_tensor=1),
        "parallel.tensor=2 does not divide the shared experts' width=33",
    ),
    (
        changed("qwen3_5_text", num_attention_heads=8, num_key_value_heads=4),
        dict(tensor=4),
        "parallel.tensor=4 does not divide linear_num_key_heads=2 of qwen3_5_text; use a divisor",
    ),
    (changed("llama4", num_experts_per_tok=2), {}, "num_experts_per_tok=2 of llama4_text is not supported: Megatron"),
    (changed("llama4", attention_bias=True), {}, "a llama4_text model with attention_bias is not supported"),
    (changed("llama4", hidden_act="gelu"), {}, "hidden_act='gelu' of llama4_text is not supported"),
    (changed("llama4", router_jitter_noise=0.1), {}, "router_jitter_noise=0.1 of llama4_text is not supported"),
    (changed("llama4", attention_chunk_size=None), {}, "attention_chunk_size=None of llama4_text is not supported"),
    (changed("llama4", moe_layers=[]), {}, "moe_layers=.* of llama4_text leaves no mixture"),
    (changed("llama4", no_rope_layers=[1]), {}, "no_rope_layers of llama4_text has 1 entries, below"),
    (changed("llama4", layer_types=["sliding_attention"] * 2), {}, "layer_types=.* of llama4_text is not supported"),
    (changed("llama4", rope_parameters=YARN), {}, "rope_type='yarn' of llama4_text .*; default, linear, llama3 are"),
    (changed("qwen3_moe"), dict(pipeline=3), "are 3 stages and qwen3_moe has num_hidden_layers=2"),
    (changed("deepseek_v3", rope_interleave=False), {}, "rope_interleave=false of deepseek_v3 is not supported"),
    (changed("deepseek_v3", scoring_func="softmax"), {}, "scoring_func='softmax' of deepseek_v3 is not supported"),
    (changed("deepseek_v3", num_key_value_heads=2), {}, "num_key_value_heads=2 of deepseek_v3 is not supported"),
    (changed("deepseek_v3", attention_bias=True), {}, "a deepseek_v3 model with attention_bias is not supported"),
    (changed("moonlight", rope_parameters=LINEAR), {}, "rope_type='linear' of deepseek_v3 .*; default and yarn are"),
]


@pytest.mark.parametrize(("hf_config", "parallel", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_what_cannot_be_built_is_named(hf_config, parallel: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape_of(hf_config, **parallel)


def test_experts_are_split_by_their_own_ranks_and_the_routers_weights_add_up_to_one() -> None:
    shape = shape_of(changed("mixtral", intermediate_size=97), tensor=2, sequence_parallel=True, expert_tensor=1)
    assert shape.ffn_hidden_size == 97 and shape.num_experts == 4 and shape.experts_per_token == 2
    pre_softmax = [family for family in MIXTURES if shape_of(tiny_config(family)).router_pre_softmax]
    assert pre_softmax == ["qwen3_moe_unnormalised"]


def test_a_part_of_each_head_turns_where_the_family_says_so() -> None:
    """Half of glm4_moe's pairs turn; a family whose modules do not read the field is refused."""
    config = tiny_config("glm4_moe")
    assert len(inverse_frequencies(config, 32)) == 8 and len(inverse_frequencies(tiny_config("qwen3"), 32)) == 16
    config.rope_parameters["rope_type"] = "linear"
    with pytest.raises(ConfigError, match="partial_rotary_factor=0.5 of glm4_moe with rope_type='linear'"):
        inverse_frequencies(config, 32)
    olmo3 = changed("olmo3", partial_rotary_factor=0.5)  # which transformers' yarn takes from beside rope_parameters
    latent = changed("deepseek_v3", head_dim=20)
    for own, angles in (
        (16, lambda: inverse_frequencies(olmo3, 16, "full_attention")),
        (8, lambda: latent_angles(latent, shape_of(latent))),
    ):
        with pytest.raises(ConfigError, match=f"turn [0-9]+ of {own} elements of a head, which is not supported"):
            angles()
    other = tiny_config("qwen3")
    other.rope_parameters["partial_rotary_factor"] = 0.5
    with pytest.raises(ConfigError, match="partial_rotary_factor=0.5 of qwen3"):
        inverse_frequencies(other, 32)


@pytest.mark.parametrize(
    "changes",
    [{}, {"attention_factor": 0.9}, {"mscale": 1.5, "mscale_all_dim": 0.5}, {"beta_fast": 16, "truncate": False}],
    ids=lambda x: ",".join(x) or "default",
)
def test_yarn_turns_and_scales_as_transformers(changes: dict) -> None:
    """Scores of q and k at their positions are those under transformers' cosines and sines, which hold the factor."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

    config = tiny_config("qwen3_yarn")
    config.rope_parameters |= changes
    random = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 40, 32, dtype=torch.float64, generator=random)
    positions = torch.arange(40)
    cos, sin = (x.double() for x in Qwen3RotaryEmbedding(config)(q.float(), positions[None]))
    wanted = torch.matmul(*(x if i == 0 else x.mT for i, x in enumerate(apply_rotary_pos_emb(q, k, cos, sin))))
    angles = torch.outer(positions.float(), inverse_frequencies(config, 32)).double().repeat(1, 2)
    turned = apply_rotary_pos_emb(q, k, angles.cos()[None], angles.sin()[None])
    found = torch.matmul(turned[0], turned[1].mT) * softmax_scale(config, 32)
    torch.testing.assert_close(found, wanted * 32**-0.5, rtol=1e-5, atol=1e-5)
    assert abs(softmax_scale(config, 32) * 32**0.5 - 1) > 0.05 and softmax_scale(tiny_config("qwen3"), 32) is None


@pytest.mark.parametrize("put", [put_norms_behind, put_gpt_oss_layers])
def test_layers_that_were_shown_on_torchs_alone_refuse_transformer_engines(put) -> None:
    with pytest.raises(ConfigError, match="model.layer_spec=transformer_engine: .* set model.layer_spec=torch"):
        put(SimpleNamespace(layer_specs=[]), "transformer_engine")


def test_values_wider_than_keys_refuse_transformer_engines_layers() -> None:
    config = tiny_config("deepseek_v3_wide")
    shape = dataclasses.replace(shape_of(config), layer_spec="transformer_engine")
    with pytest.raises(ConfigError, match="v_head_dim=40 above .*=24 .* set model.layer_spec=torch"):
        latent_fields(shape, config, {})


@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_flops_count_the_matrices_that_a_token_passes(family: str) -> None:
    """6 flops per element of every matrix but the embedding; an expert's by its share of the choices: 2 of 4, say.

    Those of a gated delta net's rule are checked by tests/unit/model/test_delta_costs.py.
    """
    config, model = tiny_model(family)
    share = 1
    if family in MIXTURES:
        experts = config.num_experts if family.startswith(("qwen3_next", "qwen3_5")) else config.num_local_experts
        share = experts / config.num_experts_per_tok
    passed = model.lm_head.weight.numel()
    for name, parameter in model.model.layers.named_parameters():
        if parameter.dim() > 1 and not name.endswith("_bias"):
            passed += parameter.numel() / (share if ".experts." in name else 1)
    shape = shape_of(config)
    rule = len(shape.delta.layers) * shape.delta.rule_cost if shape.delta else 0
    assert flops_per_token(shape, 0.0) == 6 * (passed + rule)
    # a chunk's tokens see half of it on average
    kinds = config.to_dict().get("layer_types") or ["full_attention"] * LAYERS
    lengths = {"linear_attention": 0}
    if "chunked_attention" in kinds:
        lengths["chunked_attention"] = config.attention_chunk_size / 2
    seen = sum(lengths.get(kind, 10) for kind in kinds)
    widths = shape.head_dim + getattr(config, "v_head_dim", shape.head_dim)  # q times k, probabilities times v
    assert flops_per_token(shape, 10.0) - flops_per_token(shape, 0.0) == 6 * seen * shape.num_heads * widths


def test_flops_of_adapters_on_experts_count_those_that_a_token_passes() -> None:
    """Of the adapters of 12 experts a token passes 4, in the layers that are mixtures."""
    config, model = tiny_model("glm4_moe")
    adapt(model, rank=3, alpha=5.0)
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    routed = sum(count for name, count in trained.items() if ".experts." in name)
    passed = sum(trained.values()) - routed + routed * config.num_experts_per_tok // config.n_routed_experts
    assert adapter_parameters(shape_of(config).with_adapters(LoraConfig(rank=3))) == passed


def test_flops_of_adapters_count_frozen_matrices_without_their_own_gradient() -> None:
    """A token takes 4 flops per element of a frozen matrix, and 6 per element of A and B."""
    config, model = tiny_model("qwen3")
    matrices = [model.lm_head.weight, *(p for p in model.model.layers.parameters() if p.dim() > 1)]
    frozen = sum(p.numel() for p in matrices)
    adapt(model, rank=3, alpha=5.0)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    shape = shape_of(config)
    assert shape.with_adapters(LoraConfig()) is shape
    found = flops_per_token(shape.with_adapters(LoraConfig(rank=3)), 0.0)
    assert found == pytest.approx(4 * frozen + 6 * trained, rel=1e-12)


@pytest.mark.parametrize(
    "family,overlaps,found,words",
    [
        ("phi3", False, None, ["linear_qkv", "self_attn.qkv_proj.weight", "set lora.targets=[linear_proj,linear_fc2]"]),
        ("glm4_moe", True, None, ["linear_fc1", "moe_shared_expert_overlap=true", "[linear_qkv,linear_proj]"]),
        ("llama", False, (), ["lora.targets=", "linear_qkv", "llama has no linear layer of that name"]),
        ("moonlight", False, None, ["linear_qkv", "deepseek_v3", "set lora.targets=[linear_proj]"]),
        ("gpt_oss", False, None, ["linear_fc1", "were not tested for gpt_oss", "[linear_qkv,linear_proj]"]),
    ],
)
def test_adapters_that_the_layers_have_no_place_for_are_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, family: str, overlaps: bool, found: tuple | None, words: list[str]
) -> None:
    """found: the layers' weights that are targets, in place of the family's own."""
    if found is not None:
        monkeypatch.setattr(adapter, "target_entries", lambda *given: found)
    chunk = SimpleNamespace(config=SimpleNamespace(moe_shared_expert_overlap=overlaps))
    with pytest.raises(ConfigError) as error:
        put_adapters([chunk], shape_of(tiny_config(family)), LoraConfig(rank=3), SimpleNamespace(), 0)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("name", ["resid_pdrop", "embd_pdrop"])
def test_each_dropout_of_phi3_is_refused_by_its_own_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=0.1 of phi3 is not supported: set it to 0.0"):
        shape_of(changed("phi3", **{name: 0.1}))


@pytest.mark.parametrize(("tuned", "scale"), [(True, 0.3), (False, 0.0)])
def test_queries_of_llama_4_are_scaled_by_position_where_the_config_says_so(tuned: bool, scale: float) -> None:
    config = changed("llama4", attn_temperature_tuning=tuned, attn_scale=0.3)
    assert shape_of(config).chunked.scale == scale


def test_untrained_adapters_of_experts_too_fill_the_range_of_their_inputs_whatever_the_rank() -> None:
    """A is uniform within ±1/√in as PEFT's, B is 0, and no two are drawn alike."""
    shape = shape_of(tiny_config("qwen3_moe")).with_adapters(LoraConfig(rank=3))
    start, drawn = adapter._Start(shape, seed=5), []
    for entry in adapter_entries(shape, 0, 1):
        (name,) = entry.held_by(0, shape, 1).hf
        values = start.read(name, 0, 0, start.size(name)[0])
        if ".lora_B." in name:
            assert not values.any()
            continue
        bound = values.shape[1] ** -0.5
        assert 0.8 * bound < values.max() <= bound and -bound <= values.min() < -0.8 * bound, name
        drawn.append((name, values.flatten()[0].item()))
    assert any(".experts." in name for name, _ in drawn)
    assert len({value for _, value in drawn}) == len(drawn)
