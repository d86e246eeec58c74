"""Checks tools/verify_topology.py without a process group.

Checked are its comparing and naming, the thin model, its samples, and its configurations.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.reference import tiny_config

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import verify_topology
from topology_check.compare import (
    CLASSES,
    Measured,
    Point,
    activation_errors,
    backward_order,
    class_errors,
    common_factor,
    explain_factor,
    first_gradient,
    relative_error,
    tensor_class,
)
from topology_check.faults import FAULTS
from topology_check.measure import join, token_holders
from topology_check.report import layout, verdict_line
from topology_check.thin import (
    Size,
    gradient_config,
    make_work,
    reference_config,
    thin_hf_config,
    thin_weights,
    user_config,
)
from topology_check.verdict import judge

from megatron_rl.config import load_config
from megatron_rl.errors import ConfigError

OVERLAPS = (
    "megatron.ddp.overlap_grad_reduce=true",
    "megatron.ddp.overlap_param_gather=true",
    "megatron.ddp.bucket_size=1000",
)
SP = ("parallel.tensor=2", "parallel.sequence_parallel=true")


def test_every_tensor_has_a_class():
    named = {
        "model.embed_tokens.weight": "embedding",
        "lm_head.weight": "lm head",
        "model.norm.weight": "norms",
        "model.layers.3.self_attn.k_proj.bias": "attention qkv",
        "model.layers.3.self_attn.k_norm.weight": "norms",
        "model.layers.3.self_attn.o_proj.weight": "attention output",
        "model.layers.3.input_layernorm.weight": "norms",
        "model.layers.3.mlp.up_proj.weight": "mlp gate/up",
        "model.layers.3.mlp.down_proj.weight": "mlp down",
        "model.layers.3.mlp.gate.weight": "router",
        "model.layers.3.mlp.router.bias": "router",
        "model.layers.3.self_attn.sinks": "attention qkv",
        "model.layers.3.mlp.experts.7.gate_up_proj_bias": "experts",
        "model.layers.3.block_sparse_moe.gate.weight": "router",
        "model.layers.3.mlp.experts.7.down_proj.weight": "experts",
        "model.layers.3.block_sparse_moe.experts.0.w1.weight": "experts",
    }
    assert {name: tensor_class(name) for name in named} == named and set(named.values()) == set(CLASSES)
    with pytest.raises(ValueError, match="model.mystery"):
        tensor_class("model.mystery")


def test_backward_order_runs_from_the_head_to_the_embedding():
    order = [
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.10.mlp.down_proj.weight",
        "model.layers.10.mlp.up_proj.weight",
        "model.layers.10.post_attention_layernorm.weight",
        "model.layers.10.self_attn.o_proj.weight",
        "model.layers.10.self_attn.q_proj.weight",
        "model.layers.10.input_layernorm.weight",
        "model.layers.9.mlp.experts.0.up_proj.weight",
        "model.layers.9.mlp.gate.weight",
        "model.embed_tokens.weight",
    ]
    assert backward_order(sorted(order)) == order


def test_relative_error_of_what_is_no_number_is_infinite():
    ones = torch.ones(4)
    assert relative_error(ones, ones) == 0.0 and relative_error(ones * 1.5, ones) == pytest.approx(0.5)
    assert relative_error(torch.zeros(4), torch.zeros(4)) == 0.0 and relative_error(ones, torch.zeros(4)) == math.inf
    assert (
        relative_error(torch.full((4,), math.nan), ones) == math.inf and relative_error(torch.ones(3), ones) == math.inf
    )


NAMES = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.k_proj.bias",
    "model.layers.1.self_attn.o_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
)


def gradients(**scaled: float) -> dict[str, torch.Tensor]:
    """Return fixed tensors; a keyword scales those whose name contains it."""
    generator = torch.Generator().manual_seed(0)
    found = {name: torch.randn(8, generator=generator) for name in NAMES}
    found["model.layers.0.self_attn.k_proj.bias"] *= 1e-9  # what is left of a gradient that cancels
    return {name: x * next((f for part, f in scaled.items() if part in name), 1.0) for name, x in found.items()}


def test_the_first_tensor_of_the_backward_pass_is_named_and_rounding_is_not():
    wanted = gradients()
    errors = class_errors(gradients(o_proj=1.1, embed_tokens=2.0), wanted, 1e-5)
    assert first_gradient(errors) == ("model.layers.1.self_attn.o_proj.weight", pytest.approx(0.1))
    assert errors["embedding"].error == pytest.approx(1.0) and errors["lm head"].error == 0.0
    faint = class_errors(gradients(bias=1.5), wanted, 1e-5)["attention qkv"]
    assert (
        faint.error < 1e-8 and faint.worst.endswith("k_proj.bias") and faint.tensors[faint.worst] == pytest.approx(0.5)
    )
    assert first_gradient({"attention qkv": faint}) is None
    lost = {name: x for name, x in wanted.items() if "o_proj" not in name}
    assert first_gradient(class_errors(lost, wanted, 1e-5)) == ("model.layers.1.self_attn.o_proj.weight", math.inf)


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


CORE, OUTPUT, EMBEDDING = (
    Point(layer=0, name="attention core"),
    Point(layer=0, name="attention output"),
    Point(layer=-1, name="embedding"),
)
NORM, NEXT = Point(layer=-1, name="final norm"), Point(layer=1, name="layer input")


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


def measured(**changes: object) -> Measured:
    facts = {"microbatches": [4], "skip_microbatches": [2], "dropped": 8, "holders": [0, 1, 1, 0, 0]}
    given = dict(
        logprobs={"s0": np.ones(3, dtype=np.float32), "s1": np.ones(2, dtype=np.float32)},
        gradient=gradients(),
        grad_norm=2.0,
        weights=gradients(),
        traces=[{EMBEDDING: [torch.ones(5, 3)], CORE: [torch.ones(5, 3)]}],
        skip_gradient=gradients(),
        facts=facts,
    )
    return Measured(**{**given, **changes})


SAID = {
    "activations": (
        dict(
            traces=[
                {EMBEDDING: [torch.ones(5, 3)], CORE: [torch.diag(torch.tensor([1.0, 2, 1, 1, 1])) @ torch.ones(5, 3)]}
            ]
        ),
        "at the attention core (model.layers.0.self_attn, before o_proj): relative error 4.5e-01; 1 of 5 tokens "
        "differ, the first is token 1, held by context rank 1. Look at",
    ),
    "log-probs": (
        dict(logprobs={"s0": np.ones(3, dtype=np.float32), "s1": np.zeros(2, dtype=np.float32)}),
        "one sample alone gives the same activations, and the log-probs of sample s1 among others do not agree "
        "(1.0e+00)",
    ),
    "factor": (
        dict(gradient={name: x / 4 for name, x in gradients().items()}, grad_norm=0.5),
        "activations and log-probs agree, and every gradient is 1/4 of the reference: divided by the 4 micro-batches.",
    ),
    "gradient": (
        dict(gradient=gradients(o_proj=1.1)),
        "differs is model.layers.1.self_attn.o_proj.weight, relative error 1.0e-01",
    ),
    "lost gradient": (dict(gradient=gradients(norm=math.nan)), "differs is model.norm.weight, relative error inf"),
    "norm": (dict(grad_norm=2.5), "every gradient agrees and their norm is 1.25 times the reference's"),
    "norm is no number": (dict(grad_norm=math.nan), "their norm is nan times"),
    "weights": (dict(weights=gradients(o_proj=1.1)), "the weights after 3 steps do not"),
    "skip": (
        dict(skip_gradient=gradients(lm_head=1.1)),
        "skip does not agree with dense: first, in backward order, lm_head.weight",
    ),
}


@pytest.mark.parametrize("case", SAID)
def test_the_verdict_names_where_the_difference_begins(case):
    changes, words = SAID[case]
    changes = {"skip_gradient": changes["gradient"], **changes} if "gradient" in changes else changes
    verdict = judge(measured(**changes), measured(), 1e-5, counts={"micro-batches": 4}, no_skip="")
    assert not verdict.passed and words in verdict.diagnosis, verdict.diagnosis
    assert verdict_line(verdict, 1e-5).startswith("verdict: FAILED, ")


def test_equal_measurements_pass_and_a_skip_that_is_not_compared_says_why():
    verdict = judge(
        measured(skip_gradient=None), measured(), 1e-5, counts={}, no_skip="loss.kl_coefficient=0.1 makes it another"
    )
    assert verdict.passed and verdict.rows[-1].error is None and "kl_coefficient" in verdict.rows[-1].note
    assert verdict_line(verdict, 1e-5).startswith("verdict: PASSED, 9 checks within 1e-05")


# ---- the thin model, its samples, its configurations ----------------------------------------------------------------


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


def test_the_thin_model_keeps_what_decides_the_layout(tmp_path):
    real = tiny_config("qwen3", layers=12, vocab_size=1003, hidden=128)
    config = load_config(
        None, ["parallel.tensor=2", "parallel.pipeline=2", "parallel.virtual_pipeline=3", "model.hf_path=here"]
    )
    thin = thin_hf_config(real, config, Size(layers_per_stage=2))
    kept = (
        "model_type",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "tie_word_embeddings",
        "rope_parameters",
        "rms_norm_eps",
    )
    assert {x: getattr(thin, x) for x in kept} == {x: getattr(real, x) for x in kept}
    assert (thin.num_hidden_layers, thin.hidden_size, thin.intermediate_size) == (12, 64, 96) and len(
        thin.layer_types
    ) == 12
    assert thin.vocab_size < 200 and thin.vocab_size % 2 == real.vocab_size % 2
    wide = thin_hf_config(real, config, Size(keep=("hidden", "ffn", "vocabulary")))
    assert (wide.hidden_size, wide.intermediate_size, wide.vocab_size, wide.num_hidden_layers) == (128, 192, 1003, 6)
    with pytest.raises(ConfigError, match="= ?6 does not divide num_hidden_layers=8 of here"):
        thin_hf_config(tiny_config("qwen3", layers=8), config, Size())
    mixture = tiny_config("mixtral", layers=12)
    assert thin_hf_config(mixture, config, Size()).num_local_experts == 4
    with pytest.raises(ConfigError, match="parallel.expert=3 does not divide num_experts=4"):
        thin_hf_config(
            mixture, dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, expert=3)), Size()
        )


def test_thin_weights_are_the_same_on_every_rank_and_lie_off_their_neutral_values():
    thin = thin_hf_config(tiny_config("qwen2_untied"), load_config(None, []), Size())
    first, second = thin_weights(thin, 0), thin_weights(thin, 0)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["model.norm.weight"].std() > 0.1 and first["model.layers.0.self_attn.q_proj.bias"].std() > 0.1


def test_two_groups_of_three_have_no_advantage_and_a_batch_has_several_micro_batches():
    config = load_config(
        None, ["parallel.tensor=2", "parallel.sequence_parallel=true", "plan.samples_per_microbatch=64"]
    )
    work = make_work(config, 128, 256, world=8)
    assert len(work.samples) == 4 * 3 * 4 and np.mean(work.advantages == 0.0) == pytest.approx(2 / 3)
    assert all(len(set(s.loss_mask)) == 2 for s in work.samples) and len(work.traced.token_ids) % 2 == 1
    user = user_config(config, "float32", work, world=8)
    longest = -(-max(len(s.token_ids) for s in work.samples) // 2) * 2
    assert longest <= user.plan.max_tokens_per_microbatch < 200 and user.plan.samples_per_microbatch == 3
    with pytest.raises(ConfigError, match="context is 16 tokens"):
        make_work(config, 128, 16, world=8)


def test_the_reference_has_one_process_and_what_only_serves_many_is_left_out():
    given = [
        *OVERLAPS,
        *SP,
        "megatron.transformer.recompute_granularity=full",
        "megatron.transformer.attention_softmax_in_fp32=true",
    ]
    config = load_config(None, [*given, "model.hf_path=here"])
    gradient, alone = gradient_config(config), reference_config(config)
    assert (
        gradient.megatron.ddp == {"overlap_grad_reduce": True, "bucket_size": 1000}
        and not gradient.optimizer.distributed
    )
    assert gradient.parallel == config.parallel and config.optimizer.distributed
    assert alone.parallel.tensor == 1 and not alone.parallel.sequence_parallel and alone.megatron.ddp == {}
    assert alone.megatron.transformer == {"attention_softmax_in_fp32": True} and alone.plan.samples_per_microbatch == 1
    assert layout(config.parallel, 4) == "TP2 SP · PP1 · DP2 (4 processes)"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--inject-layer", "1"], "--inject-layer 1 belongs to --inject tp_all_reduce"),
        (["--layers-per-stage", "0"], "--layers-per-stage 0 must be at least 1"),
        (["--tolerance", "0"], "--tolerance 0.0 must be above 0"),
        (["--inject", "gremlin"], "invalid choice"),
    ],
)
def test_arguments_that_cannot_work_are_named(capsys, arguments, words):
    with pytest.raises(SystemExit) as stopped:
        verify_topology.parse(arguments)
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_the_defaults_follow_the_dtype_and_every_fault_is_offered():
    assert (
        verify_topology.parse([]).tolerance == 1e-5 and verify_topology.parse(["--dtype", "bfloat16"]).tolerance == 5e-2
    )
    assert set(verify_topology.FAULT_NAMES) == set(FAULTS)
    mixed = verify_topology.parse(
        ["--config", "a.yaml", "parallel.tensor=2", "--layers-per-stage", "2", "parallel.pipeline=2"]
    )
    assert mixed.overrides == ["parallel.tensor=2", "parallel.pipeline=2"]
