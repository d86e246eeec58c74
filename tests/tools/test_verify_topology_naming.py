"""Checks what `megatron-rl verify` does without a process group: comparing, naming, the thin model, its samples."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl.commands.verify import command as verify_topology
from megatron_rl.commands.verify import compare, thin
from megatron_rl.commands.verify.compare import (
    Measured,
    Point,
    activation_errors,
    common_factor,
    explain_factor,
    relative_error,
)
from megatron_rl.commands.verify.faults import FAULTS
from megatron_rl.commands.verify.measure import join, token_holders
from megatron_rl.commands.verify.report import layout, verdict_line
from megatron_rl.commands.verify.verdict import judge
from megatron_rl.config import load_config
from megatron_rl.errors import ConfigError
from megatron_rl.model.settings import ModelSettings
from tests.reference import tiny_config
from tests.tools import words
from tests.tools.simulated_job import OVERLAPS, SP

KEYS = ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.k_proj.bias")
OUT = "model.layers.1.self_attn.o_proj.weight"
NAMES = ("model.embed_tokens.weight", *KEYS, OUT, "model.norm.weight", "lm_head.weight")
CORE, OUTPUT = (Point(layer=0, name=f"attention {name}") for name in ("core", "output"))
EMBEDDING = Point(layer=-1, name="embedding")
NORM, NEXT = Point(layer=-1, name="final norm"), Point(layer=1, name="layer input")


def test_every_tensor_has_a_class_and_backward_order_runs_from_the_head_to_the_embedding():
    tops = {"model.embed_tokens.weight": "embedding", "lm_head.weight": "lm head", "model.norm.weight": "norms"}
    inside = {
        "delta net projection": "linear_attn.in_proj_qkv.weight linear_attn.in_proj_ba.weight",
        "delta net decay": "linear_attn.conv1d.weight linear_attn.A_log linear_attn.dt_bias",
        "delta net output": "linear_attn.out_proj.weight",
        "norms": "linear_attn.norm.weight self_attn.k_norm.weight input_layernorm.weight",
        "attention qkv": "self_attn.k_proj.bias self_attn.sinks",
        "attention output": "self_attn.o_proj.weight",
        "mlp gate/up": "mlp.up_proj.weight",
        "mlp down": "mlp.down_proj.weight",
        "router": "mlp.gate.weight mlp.shared_expert_gate.weight mlp.router.bias block_sparse_moe.gate.weight",
        "experts": "mlp.experts.7.gate_up_proj_bias mlp.experts.7.down_proj.weight block_sparse_moe.experts.0.w1",
    }
    named = tops | {f"model.layers.3.{part}": kind for kind in inside for part in inside[kind].split()}
    assert {name: compare.tensor_class(name) for name in named} == named and set(named.values()) == set(compare.CLASSES)
    with pytest.raises(ValueError, match="model.mystery"):
        compare.tensor_class("model.mystery")
    tenth = "mlp.down_proj mlp.up_proj post_attention_layernorm self_attn.o_proj self_attn.q_proj input_layernorm"
    layers = [*(f"10.{part}" for part in words(tenth)), "9.mlp.experts.0.up_proj", "9.mlp.gate"]
    order = ["lm_head", "model.norm", *(f"model.layers.{part}" for part in layers), "model.embed_tokens"]
    order = [f"{name}.weight" for name in order]
    assert compare.backward_order(sorted(order)) == order


def test_relative_error_of_no_number_is_infinite_and_the_first_tensor_backwards_is_named():
    ones = torch.ones(4)
    assert relative_error(ones, ones) == 0.0 and relative_error(ones * 1.5, ones) == pytest.approx(0.5)
    assert relative_error(torch.zeros(4), torch.zeros(4)) == 0.0 and relative_error(ones, torch.zeros(4)) == math.inf
    assert relative_error(torch.full((4,), math.nan), ones) == math.inf == relative_error(torch.ones(3), ones)
    wanted = gradients()
    errors = compare.class_errors(gradients(o_proj=1.1, embed_tokens=2.0), wanted, 1e-5)
    assert compare.first_gradient(errors) == (OUT, pytest.approx(0.1))
    assert errors["embedding"].error == pytest.approx(1.0) and errors["lm head"].error == 0.0
    faint = compare.class_errors(gradients(bias=1.5), wanted, 1e-5)["attention qkv"]
    assert faint.error < 1e-8 and faint.worst == KEYS[1] and faint.tensors[faint.worst] == pytest.approx(0.5)
    assert compare.first_gradient({"attention qkv": faint}) is None
    lost = {name: x for name, x in wanted.items() if "o_proj" not in name}
    assert compare.first_gradient(compare.class_errors(lost, wanted, 1e-5)) == (OUT, math.inf)


def gradients(**scaled: float) -> dict[str, torch.Tensor]:
    """Return fixed tensors; a keyword scales those whose name contains it."""
    generator = torch.Generator().manual_seed(0)
    found = {name: torch.randn(8, generator=generator) for name in NAMES}
    found[KEYS[1]] *= 1e-9  # what is left of a gradient that cancels
    return {name: x * next((f for part, f in scaled.items() if part in name), 1.0) for name, x in found.items()}


def test_one_common_factor_is_found_and_put_in_words():
    wanted, quarter = gradients(), {name: x * 0.25 for name, x in gradients().items()}
    assert common_factor(quarter, wanted, 1e-5) == pytest.approx(0.25)
    assert common_factor(wanted, wanted, 1e-5) is None and common_factor(gradients(o_proj=0.25), wanted, 1e-5) is None
    assert common_factor({name: -x for name, x in wanted.items()}, wanted, 1e-5) == pytest.approx(-1.0)
    counts = {"micro-batches": 4, "tensor ranks": 2, "data-parallel replicas": 2}
    assert explain_factor(0.25, counts) == "every gradient is 1/4 of the reference: divided by the 4 micro-batches"
    summed = "every gradient is 2 times the reference: summed over the 2 tensor ranks or the 2 data-parallel replicas"
    assert explain_factor(2.0, counts) == summed
    assert explain_factor(1 / 3, counts) == "every gradient is 1/3 of the reference"
    assert "0.7 times" in explain_factor(0.7, counts) and "no count of this topology" in explain_factor(0.7, counts)


def test_the_first_activation_is_by_forward_order_over_replicas_and_copies():
    assert sorted([NORM, NEXT, OUTPUT, CORE, EMBEDDING], key=lambda p: p.order) == [EMBEDDING, CORE, OUTPUT, NEXT, NORM]
    truth = {point: [torch.ones(5, 3)] for point in (EMBEDDING, CORE, OUTPUT, NORM)}
    off = torch.ones(5, 3)
    off[3:] = 2.0
    good = {point: copies * 2 for point, copies in truth.items()}
    bad = {**good, OUTPUT: [torch.ones(5, 3), off], NORM: [torch.zeros(5, 3)]}
    first = next(x for x in activation_errors([good, bad], truth, 1e-5) if x.error > 1e-5)
    assert (first.replica, first.point, first.tokens, first.num_tokens) == (1, OUTPUT, (3, 4), 5)
    assert first.error == pytest.approx(math.sqrt(2 / 5))
    lacking = {point: copies for point, copies in good.items() if point != CORE}
    assert [(x.point, x.error) for x in activation_errors([lacking], truth, 1e-5) if x.error > 0] == [(CORE, math.inf)]


def traced(core: torch.Tensor) -> list[dict[Point, list[torch.Tensor]]]:
    return [{EMBEDDING: [torch.ones(5, 3)], CORE: [core]}]


def logprobs(second: float) -> dict[str, np.ndarray]:
    return {"s0": np.ones(3, dtype=np.float32), "s1": np.full(2, second, dtype=np.float32)}


def measured(**changes: object) -> Measured:
    facts = {"microbatches": [4], "skip_microbatches": [2], "dropped": 8, "holders": [0, 1, 1, 0, 0]}
    given = dict(logprobs=logprobs(1.0), gradient=gradients(), grad_norm=2.0, weights=gradients(), facts=facts)
    given |= dict(traces=traced(torch.ones(5, 3)), skip_gradient=gradients())
    return Measured(**given | changes)


SAID = {
    "activations": (
        dict(traces=traced(torch.tensor([1.0, 2, 1, 1, 1])[:, None] * torch.ones(5, 3))),
        "at the attention core (model.layers.0.self_attn, before o_proj): relative error 4.5e-01; 1 of 5 tokens "
        "differ, the first is token 1, held by context rank 1. Look at",
    ),
    "log-probs": (dict(logprobs=logprobs(0.0)),
                  "gives the same activations, and the log-probs of sample s1 among others do not agree (1.0e+00)"),
    "factor": (dict(gradient={name: x / 4 for name, x in gradients().items()}, grad_norm=0.5),
               "log-probs agree, and every gradient is 1/4 of the reference: divided by the 4 micro-batches."),
    "gradient": (dict(gradient=gradients(o_proj=1.1)), f"differs is {OUT}, relative error 1.0e-01"),
    "lost gradient": (dict(gradient=gradients(norm=math.nan)), "differs is model.norm.weight, relative error inf"),
    "norm": (dict(grad_norm=2.5), "every gradient agrees and their norm is 1.25 times the reference's"),
    "norm is no number": (dict(grad_norm=math.nan), "their norm is nan times"),
    "weights": (dict(weights=gradients(o_proj=1.1)), "the weights after 3 steps do not"),
    "skip": (dict(skip_gradient=gradients(lm_head=1.1)), "agree with dense: first, in backward order, lm_head.weight"),
}


@pytest.mark.parametrize("case", SAID)
def test_the_verdict_names_where_the_difference_begins(case):
    changes, words = SAID[case]
    changes = {"skip_gradient": changes["gradient"], **changes} if "gradient" in changes else changes
    verdict = judge(measured(**changes), measured(), 1e-5, counts={"micro-batches": 4}, no_skip="")
    assert not verdict.passed and words in verdict.diagnosis, verdict.diagnosis
    assert verdict_line(verdict, 1e-5).startswith("verdict: FAILED, ")


def test_equal_measurements_pass_and_a_skip_that_is_not_compared_says_why():
    verdict = judge(measured(skip_gradient=None), measured(), 1e-5, counts={}, no_skip="kl_coefficient=0.1 is why")
    assert verdict.passed and verdict.rows[-1].error is None and "kl_coefficient" in verdict.rows[-1].note
    assert verdict_line(verdict, 1e-5).startswith("verdict: PASSED, 9 checks within 1e-05")


def test_parts_of_an_activation_are_joined_as_ranks_hold_them():
    whole = torch.arange(24.0).view(8, 3)
    positions = {0: [0, 1, 6, 7], 1: [2, 3, 4, 5]}
    alone = {0: list(range(8))}
    (columns,) = join({(t, 0): x for t, x in enumerate(whole.split(1, dim=1))}, True, alone)
    (tokens,) = join({(t, 0): x for t, x in enumerate(whole.split(4))}, False, alone)
    copies = join({(0, 0): whole, (1, 0): whole + 1}, False, alone)
    assert torch.equal(columns, whole) and torch.equal(tokens, whole)
    assert torch.equal(copies[0], whole) and torch.equal(copies[1], whole + 1)
    (context,) = join({(0, c): whole[positions[c]] for c in (0, 1)}, False, positions)
    (both,) = join({(t, c): whole[positions[c]][2 * t : 2 * t + 2] for t in (0, 1) for c in (0, 1)}, False, positions)
    assert torch.equal(context, whole) and torch.equal(both, whole)
    backend = SimpleNamespace(topology=SimpleNamespace(context_size=2), rules=SimpleNamespace(pad_multiple=4))
    assert token_holders(backend, 7) == [0, 0, 1, 1, 1, 1, 0]


def test_the_thin_model_keeps_the_layout_and_its_weights_are_those_of_every_rank(tmp_path):
    real = tiny_config("qwen3", layers=12, vocab_size=1003, hidden=128)
    layout = words("parallel.tensor=2 parallel.pipeline=2 parallel.virtual_pipeline=3")
    config = load_config(None, [*layout, "model.hf_path=here"])
    small = thin.thin_hf_config(real, ModelSettings.of(config), thin.Size(layers_per_stage=2))
    kept = "model_type num_attention_heads num_key_value_heads head_dim tie_word_embeddings rms_norm_eps"
    kept = [*kept.split(), "rope_parameters"]
    assert {x: getattr(small, x) for x in kept} == {x: getattr(real, x) for x in kept}
    assert (small.num_hidden_layers, small.hidden_size, small.intermediate_size) == (12, 64, 96)
    assert len(small.layer_types) == 12 and small.vocab_size < 200 and small.vocab_size % 2 == real.vocab_size % 2
    wide = thin.thin_hf_config(real, ModelSettings.of(config), thin.Size(keep=("hidden", "ffn", "vocabulary")))
    assert (wide.hidden_size, wide.intermediate_size, wide.vocab_size, wide.num_hidden_layers) == (128, 192, 1003, 6)
    with pytest.raises(ConfigError, match="are 6 stages and qwen3 has num_hidden_layers=5; lower"):
        thin.thin_hf_config(tiny_config("qwen3", layers=5), ModelSettings.of(config), thin.Size())
    assert thin.thin_layout(tiny_config("qwen3", layers=8), ModelSettings.of(config), 1) == (1, 1, 1, 2, 2, 1)
    stated = load_config(None, ["parallel.pipeline=3", "parallel.pipeline_layout='E|tttt|ttttL'"])
    assert thin.thin_layout(tiny_config("qwen3", layers=8), ModelSettings.of(stated), 2) == (0, 2, 2)
    mixture = tiny_config("mixtral", layers=12)
    assert thin.thin_hf_config(mixture, ModelSettings.of(config), thin.Size()).num_local_experts == 4
    three = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, expert=3))
    with pytest.raises(ConfigError, match="parallel.expert=3 does not divide num_experts=4"):
        thin.thin_hf_config(mixture, ModelSettings.of(three), thin.Size())
    small = thin.thin_hf_config(tiny_config("qwen2_untied"), ModelSettings.of(load_config(None, [])), thin.Size())
    first, second = thin.thin_weights(small, 0), thin.thin_weights(small, 0)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["model.norm.weight"].std() > 0.1 and first["model.layers.0.self_attn.q_proj.bias"].std() > 0.1


def test_two_groups_of_three_have_no_advantage_and_a_batch_has_several_micro_batches():
    config = load_config(None, [*SP, "plan.samples_per_microbatch=64"])
    work = thin.make_work(config.parallel, 128, 256, world=8, seed=config.run.seed)
    assert len(work.samples) == 4 * 3 * 4 and np.mean(work.advantages == 0.0) == pytest.approx(2 / 3)
    assert all(len(set(s.loss_mask)) == 2 for s in work.samples) and len(work.traced.token_ids) % 2 == 1
    user = thin.user_config(config, "float32", work, world=8, layout=())
    longest = -(-max(len(s.token_ids) for s in work.samples) // 2) * 2
    assert longest <= user.plan.max_tokens_per_microbatch < 200 and user.plan.samples_per_microbatch == 3
    with pytest.raises(ConfigError, match="context is 16 tokens"):
        thin.make_work(config.parallel, 128, 16, world=8, seed=config.run.seed)


def test_the_reference_has_one_process_and_what_only_serves_many_is_left_out():
    given = ("recompute_granularity=full", "attention_softmax_in_fp32=true")
    config = load_config(None, [*OVERLAPS, *SP, *(f"megatron.transformer.{x}" for x in given), "model.hf_path=here"])
    optimizer, megatron = thin.whole_gradients(config.optimizer, config.megatron)
    alone = thin.reference_config(config)
    assert megatron.ddp == {"overlap_grad_reduce": True, "bucket_size": 1000}
    assert not optimizer.distributed and config.optimizer.distributed
    assert alone.parallel.tensor == 1 and not alone.parallel.sequence_parallel and alone.megatron.ddp == {}
    assert alone.megatron.transformer == {"attention_softmax_in_fp32": True} and alone.plan.samples_per_microbatch == 1
    assert layout(config.parallel, 4) == "TP2 SP · PP1 · DP2 (4 processes)"


def test_the_defaults_follow_the_dtype_and_every_fault_is_offered():
    assert verify_topology.parse([]).tolerance == 1e-5
    assert verify_topology.parse(["--dtype", "bfloat16"]).tolerance == 5e-2
    assert set(verify_topology.FAULT_NAMES) == set(FAULTS)
    mixed = verify_topology.parse(words("--config a.yaml parallel.tensor=2 --layers-per-stage 2 parallel.pipeline=2"))
    assert mixed.overrides == ["parallel.tensor=2", "parallel.pipeline=2"]
