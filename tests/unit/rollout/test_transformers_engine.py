"""The embedded engine against plain Hugging Face forwards."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, MixtralConfig, Qwen2Config, Qwen3MoeConfig

from megatron_rl.errors import ConfigError
from megatron_rl.rollout.engines.drawing import draw
from megatron_rl.rollout.engines.engine import sample_seed
from megatron_rl.types import Prompt, Rollout
from tests import reference
from tests.unit.rollout import tiny_model
from tests.unit.rollout.fake_engine import prompt_of
from tests.unit.rollout.tiny_model import EOS, ROUNDING, SIZES, VOCAB, _model, engine_of, forward_logprobs


def _prompts(*lengths: int) -> list[Prompt]:
    generator = np.random.default_rng(0)
    ids = [tuple(generator.integers(2, len(VOCAB), size=length).tolist()) for length in lengths]
    return [prompt_of(i, token_ids=token_ids) for i, token_ids in enumerate(ids)]


def _ids(rollouts: list[Rollout]) -> list[tuple[int, ...]]:
    return [rollout.response_ids for rollout in rollouts]


PROMPTS = _prompts(5, 2, 9, 5, 1, 3, 7)


def assert_forward_pass_gives_the_logprobs(model, rollouts: list[Rollout]) -> None:
    for rollout in rollouts:
        assert np.abs(forward_logprobs(model, rollout).numpy() - rollout.logprobs).max() < ROUNDING


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_logprobs_equal_full_forward(tmp_path, tied, greedy):
    model = _model(tied=tied)
    model.config.save_pretrained(tmp_path)
    engine = engine_of(tmp_path, model, max_batch_samples=16)
    rollouts = engine.generate(PROMPTS, 6, temperature=0.0 if greedy else None)
    assert [r.sample_id for r in rollouts] == [f"{i}@0#{s}" for i in range(len(PROMPTS)) for s in range(6)]
    assert_forward_pass_gives_the_logprobs(model, rollouts)
    reasons = {r.finish_reason for r in rollouts}
    assert greedy or reasons == {"stop", "length"}, "the sampled rows must cover both ends, or compaction is not tested"


def test_absolute_positions_equal_full_forward(tmp_path):
    # Rotary embeddings cannot see a constant shift of the positions; learned ones can.
    sizes = {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
    config = GPT2Config(vocab_size=len(VOCAB), bos_token_id=None, eos_token_id=EOS, **sizes)
    config.save_pretrained(tmp_path)
    model = GPT2LMHeadModel(config).eval()
    assert_forward_pass_gives_the_logprobs(model, engine_of(tmp_path, model).generate(PROMPTS, 4))


def test_greedy_equals_hf_generate(model, hf_path):
    rollouts = engine_of(hf_path, model).generate(PROMPTS, 1, temperature=0.0)
    for rollout in rollouts:
        ids = torch.tensor([rollout.prompt.token_ids])
        given = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 1}
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **given)
        assert list(rollout.response_ids) == expected[0, ids.shape[1] :].tolist()


def test_rows_do_not_depend_on_their_batch(model, hf_path):
    def tokens(prompts, **rollout):
        return {r.sample_id: r.response_ids for r in engine_of(hf_path, model, **rollout).generate(prompts, 5)}

    reference = tokens(PROMPTS, max_batch_samples=64)
    assert tokens(PROMPTS[::-1], max_batch_samples=10) == reference
    assert tokens(PROMPTS, max_batch_samples=3) == reference  # groups cut in slices
    assert tokens(PROMPTS[2:4]).items() <= reference.items()


@pytest.mark.parametrize("max_batch_samples, at_once", [(64, 7), (10, 2), (3, 1)])
def test_finished_groups_are_told_once_and_whole(hf_path, model, max_batch_samples, at_once):
    """Told after the internal batch that completed them: 7 prompts of 5 samples in batches of 64, 10 and 3 rows."""
    engine = engine_of(hf_path, model, max_batch_samples=max_batch_samples)
    told, batches = [], []
    decode = engine._decode
    engine._decode = lambda *arguments: (batches.append(len(told)), decode(*arguments))[1]
    rollouts = engine.generate(PROMPTS, 5, on_finished=lambda index, group: told.append((index, group)))
    assert sorted(index for index, _ in told) == list(range(len(PROMPTS)))
    assert [x for _, group in sorted(told) for x in group] == rollouts
    assert all([x.sample_index for x in group] == list(range(5)) for _, group in told)
    assert max(np.diff([*batches, len(told)])) == at_once


def test_draws_differ_by_sample_attempt_and_version_and_their_seeds_are_stable(model, hf_path):
    engine = engine_of(hf_path, model)
    ids = _ids(engine.generate(PROMPTS[:3], 8))
    assert len(set(ids[:8])) > 4 and _ids(engine.generate(PROMPTS[:3], 8)) == ids
    assert _ids(engine.generate([dataclasses.replace(prompt, attempt=1) for prompt in PROMPTS[:3]], 8)) != ids
    engine.load_weights(iter(model.state_dict().items()), version=2)
    second = engine.generate(PROMPTS[:3], 8)
    assert _ids(second) != ids and {r.weight_version for r in second} == {2}
    # A changed value here means that resumed runs draw other rollouts.
    assert sample_seed(0, "17@0", 0, 0, 0) == 6775039251563253706
    seeds = {sample_seed(*x) for x in itertools.product((0, 1), ("1@0", "11@0"), (0, 1, 11), (0, 1), (0, 1))}
    assert len(seeds) == 48 and all(0 <= seed < 2**64 for seed in seeds)


def test_a_calls_temperature_equals_the_configs(model, hf_path):
    """To the bit; the calls after it are at the config's temperature again. torch's own generator is left alone."""
    state = torch.random.get_rng_state()
    engine, colder = engine_of(hf_path, model), engine_of(hf_path, model, temperature=0.4)
    before, asked = engine.generate(PROMPTS, 4), engine.generate(PROMPTS, 4, temperature=0.4)
    assert asked == colder.generate(PROMPTS, 4) and engine.generate(PROMPTS, 4) == before != asked
    assert torch.equal(state, torch.random.get_rng_state())


def test_first_token_frequencies_match_softmax(model, hf_path):
    rounds = 2000
    rollouts = engine_of(hf_path, model, max_response_tokens=1, max_batch_samples=rounds).generate(PROMPTS[:1], rounds)
    found = np.bincount([r.response_ids[0] for r in rollouts], minlength=len(VOCAB))
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[0].token_ids])).logits[0, -1]
    expected = torch.softmax(logits.double() / tiny_model.TEMPERATURE, dim=-1).numpy() * rounds
    common = expected >= 5  # the usual rule for the chi-square approximation; the rest is one bin
    assert common.sum() >= 10 and expected[~common].sum() > 0
    observed, wanted = (np.append(x[common], x[~common].sum()) for x in (found, expected))
    degrees = len(wanted) - 1
    # Mean d, deviation sqrt(2d): five deviations, and the seed is fixed, so this cannot flake.
    assert ((observed - wanted) ** 2 / wanted).sum() < degrees + 5 * np.sqrt(2 * degrees)


def test_draw_never_takes_an_impossible_token():
    # softmax(1, 2, 3) = 0.0900, 0.2447, 0.6652
    logits = torch.tensor([[-torch.inf, 1.0, 2.0, 3.0, -torch.inf]]).repeat(4, 1)
    uniforms = torch.tensor([0.0, 1.0 - 2.0**-53, 0.09, 0.091], dtype=torch.float64)
    tokens, logprobs = draw(logits, 1.0, uniforms)
    assert tokens.tolist() == [1, 3, 1, 2]
    assert torch.equal(logprobs, torch.log_softmax(logits[0], dim=-1)[tokens])


def test_stop_tokens_end_a_row_are_no_text_and_generation_config_adds_some(model, hf_path, tmp_path):
    rollouts = engine_of(hf_path, model).generate(PROMPTS, 16)
    assert {r.finish_reason for r in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        stopped = rollout.finish_reason == "stop"
        assert len(rollout.logprobs) == len(rollout.response_ids) <= 12
        assert stopped == (rollout.response_ids[-1] == EOS) and EOS not in rollout.response_ids[:-1]
        assert stopped or len(rollout.response_ids) == 12
        body = rollout.response_ids[:-1] if stopped else rollout.response_ids
        assert rollout.text == tiny_model._tokenizer().decode(list(body), skip_special_tokens=True)
        assert "<eos>" not in rollout.text
    model.config.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9]}))
    rollouts = engine_of(tmp_path, model).generate(PROMPTS, 16)
    assert {r.response_ids[-1] for r in rollouts if r.finish_reason == "stop"} == {EOS, 5, 9}
    assert all(not {EOS, 5, 9} & set(r.response_ids[:-1]) for r in rollouts)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 999}))
    with pytest.raises(ConfigError, match="999"):
        engine_of(tmp_path, None)


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(("change", "message"), [
    (lambda items: [x for x in items if x[0] != NAME], f"1 of .* did not arrive: {NAME}"),
    (lambda items: [*items, items[0]], "model.embed_tokens.weight' arrived twice"),
    (lambda items: [*items, ("model.extra.weight", items[0][1])], "unknown weight 'model.extra.weight'"),
    (lambda items: [(n, t[:-1] if n == NAME else t) for n, t in items], r"up_proj.weight' has shape \(63, 32\)"),
])
def test_load_weights_errors(model, hf_path, change, message):
    engine = engine_of(hf_path, model)
    with pytest.raises(ValueError, match=message):
        engine.load_weights(iter(change(list(model.state_dict().items()))), version=2)
    with pytest.raises(RuntimeError, match="call load_weights first"):  # half-loaded weights are never sampled
        engine.generate(PROMPTS, 1)
    engine.load_weights(iter(model.state_dict().items()), version=2)
    assert engine.generate(PROMPTS, 1)[0].weight_version == 2


MIXTURE_SIZES = SIZES | {"initializer_range": 0.15, "num_experts_per_tok": 2}
QWEN3_MOE = Qwen3MoeConfig(**MIXTURE_SIZES, num_experts=4, moe_intermediate_size=16, head_dim=8)
MIXTURES = {
    "mixtral": (MixtralConfig(**MIXTURE_SIZES, num_local_experts=4), "block_sparse_moe.experts.2.w3"),
    "qwen3_moe": (QWEN3_MOE, "mlp.experts.2.up_proj"),
}


@pytest.mark.parametrize("family", sorted(MIXTURES))
def test_a_mixture_takes_the_names_of_its_files_and_names_what_is_wrong_with_one_expert(tmp_path, family):
    config, name = MIXTURES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()  # loops over them
    model.save_pretrained(tmp_path)
    items, name = list(load_file(tmp_path / "model.safetensors").items()), f"model.layers.1.{name}.weight"
    engine = engine_of(tmp_path, None)
    engine.load_weights(iter(items), version=0)
    loaded = engine._model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
    # here one grouped product of all experts is compared with a loop over them
    assert_forward_pass_gives_the_logprobs(model, engine.generate(PROMPTS, 4))
    fused = "model.layers.1.mlp.experts.gate_up_proj"
    for changed, message in (
        ([x for x in items if x[0] != name], f"1 of .* did not arrive: {name}"),
        ([*items, (name, dict(items)[name])], f"{name}' arrived twice"),
        ([(n, t.T if n == name else t) for n, t in items], rf"{name}' has shape \(32, \d+\), .* needs \(\d+, 32\)"),
        ([*items, (fused, model.state_dict()[fused])], f"unknown weight '{fused}'"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.load_weights(iter(changed), version=0)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_states_of_delta_nets_are_those_of_each_row_alone(tmp_path, family):
    """Pads before a prompt leave no trace in a state; a prompt's state is copied to its samples, which end apart.

    Prompts of one and two tokens are shorter than the convolution, which reads four.
    """
    config, model = reference.tiny_model(family)
    config.save_pretrained(tmp_path)
    prompts, weights = _prompts(5, 2, 9, 70, 1, 3, 7), reference.file_weights(model)
    found = {}
    for most in (64, 1):
        engine = engine_of(tmp_path, None, max_batch_samples=most)
        engine.load_weights(iter(weights.items()), version=1)
        found[most] = engine.generate(prompts, 6)
        assert_forward_pass_gives_the_logprobs(model, found[most])
    assert _ids(found[64]) == _ids(found[1])
    lengths = {len(x.response_ids) for x in found[64]}
    assert {x.finish_reason for x in found[64]} == {"stop", "length"} and len(lengths) > 3, lengths


def test_tied_lm_head_may_be_absent_or_equal(tmp_path):
    model = _model(tied=True)
    model.config.save_pretrained(tmp_path)
    engine = engine_of(tmp_path, None)
    parameters = dict(model.named_parameters())
    assert "lm_head.weight" not in parameters
    engine.load_weights(iter(parameters.items()), version=0)
    absent = engine.generate(PROMPTS, 1)
    embedding = parameters["model.embed_tokens.weight"]
    engine.load_weights(iter([*parameters.items(), ("lm_head.weight", embedding)]), version=0)
    assert engine.generate(PROMPTS, 1) == absent
    with pytest.raises(ValueError, match="tied to 'model.embed_tokens.weight'"):
        engine.load_weights(iter([*parameters.items(), ("lm_head.weight", embedding + 1)]), version=0)


def test_unusable_calls_and_a_large_model_are_config_errors(tmp_path, model, hf_path):
    # 5 TB in float32: only a count without storage can answer at all.
    large = {"vocab_size": 10**6, "hidden_size": 2**16, "intermediate_size": 2**16, "num_hidden_layers": 40}
    Qwen2Config(**large, num_attention_heads=64).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"[\d,]{13,} parameters.*rollout.allow_large_embedded_model=true"):
        engine_of(tmp_path, None)
    engine = engine_of(hf_path, model, max_response_tokens=60)
    unusable = {"0 tokens": (_prompts(3, 0), 1), "above .*=64": (_prompts(5), 1), "samples_per_prompt=0": (PROMPTS, 0)}
    for words, (prompts, samples) in unusable.items():
        with pytest.raises(ConfigError, match=words):
            engine.generate(prompts, samples)
    for bounds in ([3], [0, 3], [3, 61]):
        with pytest.raises(ValueError, match="max_tokens=.*for 2 prompts.*from 1 to rollout.max_response_tokens=60"):
            engine.generate(_prompts(3, 1), 1, max_tokens=bounds)
    assert engine.generate([], 4) == []
    with pytest.raises(ConfigError, match="config.json"):
        engine_of(tmp_path / "nothing", None)
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate(PROMPTS, 1)


def test_broken_weights_are_named(model, hf_path):
    engine = engine_of(hf_path, None)
    broken = {name: torch.full_like(t, torch.nan) if name == NAME else t for name, t in model.state_dict().items()}
    engine.load_weights(iter(broken.items()), version=4)
    with pytest.raises(RuntimeError, match="not finite at weight version 4"):
        engine.generate(PROMPTS, 2)


@pytest.mark.parametrize("temperature", [None, 0.0])
def test_a_bound_on_tokens_cuts_what_a_call_without_it_gives(model, hf_path, temperature):
    """Batches have uneven bounds, so that their rows leave at different steps."""
    prompts = [prompt_of(k, token_ids=(3, 4 + k, 2)[: 1 + k % 3]) for k in range(9)]
    bounds = [1 + (5 * k) % 12 for k in range(9)]
    engine = engine_of(hf_path, model, max_batch_samples=8)
    whole = engine.generate(prompts, 3, temperature=temperature)
    found = engine.generate(prompts, 3, temperature=temperature, max_tokens=bounds)
    for rollout, wanted, bound in zip(found, whole, (b for b in bounds for _ in range(3)), strict=True):
        assert rollout.response_ids == wanted.response_ids[:bound]
        assert np.allclose(rollout.logprobs, wanted.logprobs[:bound], atol=1e-5)
        assert rollout.finish_reason == ("stop" if rollout.response_ids[-1] == EOS else "length")
        assert rollout.weight_versions == ((1, len(rollout.response_ids)),)
    assert {x.finish_reason for x in found} == {"stop", "length"} or temperature == 0.0
