"""Under rollout.bitwise the engine's log-probs are the trainer's, bit by bit, however samples are packed."""

import dataclasses
import json

import numpy as np
import pytest

from megatron_rl.errors import ConfigError
from megatron_rl.model.invariant.visible_keys import KEY_BLOCK
from megatron_rl.model.settings import ModelSettings
from megatron_rl.rollout.engines.bitwise import BitwiseEngine
from megatron_rl.rollout.job import to_sample
from megatron_rl.types import Prompt, Sample
from tests.equality.rig import Rig, open_rig, ragged_advantages
from tests.equality.rows import measured
from tests.pairwise import pairwise, quick
from tests.reference import masked_logprobs, relative_error
from tests.unit.rollout.tiny_model import _tokenizer

BITWISE = (*("rollout.bitwise=true", "rollout.temperature=0.8", "rollout.max_response_tokens=70"),
           *("rollout.max_batch_samples=12", "loss.policy=importance_sampling"))
PROMPTS = (3, KEY_BLOCK + 6, 1, KEY_BLOCK - 1, 17)
SAMPLES = 2
CUTS = (dict(max_tokens=10_000),
        dict(max_tokens=300),
        dict(max_tokens=1),  # every sample alone
        dict(samples_per_microbatch=3),
        dict(max_tokens=300, share_prompts=False),
        dict(max_tokens=10_000, share_prompts=False, pad_multiple=8))
FAMILIES = ("qwen2_tied", "qwen3", "llama3_rope", "mistral")
LAYOUTS = (*("DP2 qwen2_tied", "TP2-bf16 qwen2_tied", "PP2 qwen2_tied"),
           *("TP2 qwen2_tied", "PP2-VPP2-DP2 qwen2_tied", "TP2-PP2-bf16 qwen2_tied"))
ORDINARY = ("one qwen3", "one llama3_rope", "TP2 qwen2_tied", "one qwen2_tied", "one qwen2_untied", "TP2-PP2 qwen3")


def engine_of(rig: Rig, folder) -> BitwiseEngine:
    (folder / "config.json").write_text(json.dumps(rig.backend.hf_config.to_dict()))
    config = rig.backend.config
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, hf_path=str(folder)))
    return BitwiseEngine(ModelSettings.of(config), _tokenizer(), config.rollout, deadline_s=config.run.deadline_s)


def sampled(engine: BitwiseEngine, lengths=PROMPTS) -> tuple[list[Sample], list[int]]:
    """Sample prompts of these lengths; return the samples as the trainer takes them, and their groups."""
    random = np.random.default_rng(3)
    prompts = [Prompt(prompt_id=f"{i}@0", text="", token_ids=tuple(random.integers(2, 22, n).tolist()), columns={})
               for i, n in enumerate(lengths)]
    samples = [to_sample(x, included=True) for x in engine.generate(prompts, SAMPLES)]
    return samples, [i // SAMPLES for i in range(len(samples))]


def every_cut(rank: int, world: int, family: str, given: tuple[str, ...], folder) -> dict[str, object]:
    """Return, for every cut, the largest gap of a log-prob pass and of an update, and which tokens differ."""
    found: dict[str, object] = {}
    with open_rig(family, *BITWISE, *given) as rig:
        own = folder / str(rank)
        own.mkdir()
        engine = engine_of(rig, own)
        engine.load_weights(rig.backend.export(), version=0)
        samples, groups = sampled(engine)
        rig.take(samples, groups)
        wanted = np.concatenate([s.logprobs for s in samples])
        advantages = ragged_advantages(len(samples))
        for cut in CUTS:
            rig.rules(**cut)
            for chosen in (rig.everyone, advantages != 0):
                passed = rig.backend.logprobs(rig.batch, chosen)
                tokens = np.repeat(chosen, [len(s.logprobs) for s in samples])
                found[f"pass {cut} {chosen.sum()}"] = int((passed.flat != np.where(tokens, wanted, 0)).sum())
                assert passed.sums["logprob_gap_max"] == 0.0 and passed.sums["tokens"] == tokens.sum()
        # The update's own forward, which has a gradient: π_old is the engine's, and the ratio exactly 1.
        plan = rig.plan(advantages, drops=True)
        rig.accumulate(advantages, plan)
        sums = rig.backend.optim_step(plan.mini_batches[0].kind).sums
        found["update gap"], found["update ratio"] = sums["logprob_gap_max"], sums["ratio"] / sums["tokens"]
        found["update entropy"] = float(not sums["entropy"] > 0)
    found["lengths"] = sorted(len(s.logprobs) for s in samples)
    return found


@pytest.mark.parametrize(("family", "dtype"), pairwise(FAMILIES, ["float32", "bfloat16"], strength=1))
def test_engine_equals_trainer(pool, tmp_path, family, dtype):
    (found,) = pool.run(1, every_cut, family, (f"model.dtype={dtype}",), tmp_path, timeout_s=120)
    lengths = found.pop("lengths")
    assert lengths[-1] > KEY_BLOCK and lengths[0] < 20, "responses reach into a second block of keys, and end early"
    assert found.pop("update ratio") == 1.0
    assert len(found) == 2 * len(CUTS) + 2 and not any(found.values()), found


@pytest.mark.parametrize("name", quick(LAYOUTS, *LAYOUTS[:3]))
def test_layouts_equal_the_engine(pool, tmp_path, name):
    """Each rank's engine has the model whole and samples for itself; the trainer spreads the samples by its plan."""
    for found in measured(pool, name, every_cut, tmp_path):
        assert found.pop("update ratio") == 1.0 and found.pop("lengths")
        assert not any(found.values()), found


def ordinary(rank: int, world: int, family: str, layout: tuple[str, ...]) -> tuple[float, float]:
    """Return the largest difference of log-probs to a plain loop, and the gradient's to that of the ordinary layers."""
    gradients, differences, advantages = [], [], ragged_advantages(10)
    for given in (("rollout.bitwise=true",), ()):
        with open_rig(family, *given, *layout, samples=10) as rig:
            differences.append(float(np.abs(rig.logprobs() - masked_logprobs(rig.model, rig.samples)).max()))
            gradients.append(rig.gradient(advantages, rig.plan(advantages, drops=True)))
    return differences[0], relative_error(*gradients)


@pytest.mark.parametrize("name", quick(ORDINARY, *ORDINARY[:3]))
def test_log_probs_and_gradients_equal_those_of_the_ordinary_layers(pool, name):
    for errors in measured(pool, name, ordinary):
        assert max(errors) < 1e-5  # float32, summed in another order


def wrong_weights(rank: int, world: int, folder) -> list[str]:
    """Return what the engine says to weights that are not the model's."""
    said = []
    with open_rig("qwen2_tied", *BITWISE) as rig:
        engine = engine_of(rig, folder)
        weights = rig.weights()
        name = "model.norm.weight"
        wrong = {"missing": {k: v for k, v in weights.items() if k != name}.items(),
                 "unknown": {**weights, "odd": weights[name]}.items(),
                 "twice": [*weights.items(), (name, weights[name])],
                 "shape": {**weights, name: weights[name][:5]}.items()}
        for tensors in wrong.values():
            with pytest.raises(ValueError, match="load_weights") as caught:
                engine.load_weights(iter(tensors), version=1)
            said.append(str(caught.value))
            with pytest.raises(RuntimeError, match="no complete set of weights"):
                sampled(engine, (3,))
        report = engine.load_weights(iter(weights.items()), version=1)
        assert report.num_tensors == len(weights) and engine.weight_version == 1
    return said


def test_weights_that_are_not_the_models_are_refused(pool, tmp_path):
    (said,) = pool.run(1, wrong_weights, tmp_path, timeout_s=60)
    assert ["model.norm.weight" in said[i] for i in (0, 2, 3)] == [True] * 3 and "odd" in said[1], said


def mixture(rank: int, world: int) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.bitwise=true is for dense models, and this one mixes 4 experts"):
        open_rig("mixtral", "rollout.bitwise=true").__enter__()


def test_a_mixture_is_refused(pool):
    pool.run(1, mixture, timeout_s=60)
