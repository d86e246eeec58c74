"""Samples of speculative decoding equal the samples of the plain loop, whatever the drafter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rl.errors import ConfigError
from megatron_rl.rollout.engines.sampling import SampleRequest
from megatron_rl.types import Prompt, Rollout
from tests import reference
from tests.unit.rollout.fake_engine import prompt_of
from tests.unit.rollout.speculation.drafters import InTurn, KnownDrafter, speculating
from tests.unit.rollout.tiny_model import ROUNDING, VOCAB, _model, engine_of

FAMILIES = ("qwen3", "llama", "mistral", "olmo3", "gemma3_text", "gpt_oss", "deepseek_v3", "mixtral_window", "glm4_moe")
GREEDY = 0.0


def prompts_of(*lengths: int, vocab_size: int = len(VOCAB)) -> list[Prompt]:
    drawn = np.random.default_rng(0)
    return [
        prompt_of(i, token_ids=tuple(drawn.integers(2, vocab_size, size=length).tolist()))
        for i, length in enumerate(lengths)
    ]


def assert_equal_samples(found: list[Rollout], want: list[Rollout]) -> None:
    assert [x.response_ids for x in found] == [x.response_ids for x in want]
    assert [(x.sample_id, x.finish_reason) for x in found] == [(x.sample_id, x.finish_reason) for x in want]
    for one, other in zip(found, want, strict=True):
        assert np.abs(np.array(one.logprobs) - other.logprobs).max() < ROUNDING


@pytest.mark.parametrize("temperature", [None, GREEDY])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_samples_equal_those_without_drafts(model, hf_path, share, temperature):
    """Drafts that are right, partly right and random; ends by stop tokens and by bounds that differ by prompt."""
    prompts, bounds = prompts_of(5, 2, 9, 5, 1, 3, 7), [12, 3, 12, 1, 2, 12, 7]
    engine = engine_of(hf_path, model)
    want = engine.generate(prompts, 6, temperature=temperature, max_tokens=bounds)
    assert temperature == GREEDY or {x.finish_reason for x in want} == {"stop", "length"}
    drafter = KnownDrafter(want, share, len(VOCAB))
    decoder = speculating(engine, drafter)
    assert_equal_samples(engine.generate(prompts, 6, temperature=temperature, max_tokens=bounds), want)
    assert sorted(drafter.ends) == sorted(list(x.response_ids) for x in want)
    counts = decoder.counts
    tokens = sum(len(x.response_ids) - 1 for x in want)  # the first comes with the prompt's pass
    if share == 0.0:  # a pass gives five tokens, or what is left of the sample; fewer where a sample leaves its leader
        fewest = sum(-(-(len(x.response_ids) - 1) // 5) for x in want)
        assert counts.passes == fewest if temperature == GREEDY else fewest <= counts.passes < 1.3 * fewest
    assert counts.accepted <= counts.drafted and tokens - counts.passes <= counts.accepted < tokens


@pytest.mark.parametrize("temperature", [None, GREEDY])
def test_samples_of_equal_tokens_share_a_row_and_its_draft(model, hf_path, temperature):
    """Greedy samples of a prompt are one row to their end; drawn ones part, and go on with what they have accepted."""
    prompts = prompts_of(5, 2, 9)
    engine = engine_of(hf_path, model, temperature=0.3)
    want = engine.generate(prompts, 8, temperature=temperature)
    drafter = KnownDrafter(want, 0.2, len(VOCAB))
    decoder, sizes = speculating(engine, drafter), []
    engine._model.register_forward_pre_hook(
        lambda module, _, given: sizes.append(len(given["input_ids"])), with_kwargs=True
    )
    assert_equal_samples(engine.generate(prompts, 8, temperature=temperature), want)
    assert sorted(drafter.ends) == sorted(list(x.response_ids) for x in want)
    assert sizes[0] == len(prompts)
    rows, passes = sum(sizes[1:]), decoder.counts.passes  # a pass counts once for each sample in it
    assert passes == 8 * rows if temperature == GREEDY else rows < passes


def test_batches_without_drafts_fill_the_history_for_those_with(model, hf_path):
    """The second visit under equal weights drafts what the first, without drafts, has answered: nearly all holds."""
    prompts = prompts_of(5, 2, 9)
    engine = engine_of(hf_path, model)
    want = engine.generate(prompts, 4)
    switch = InTurn(False, True)
    decoder = speculating(engine, switch=switch)
    assert_equal_samples(engine.generate(prompts, 4), want)
    tokens = sum(len(x.response_ids) - 1 for x in want)
    assert decoder.counts.take() == {"speculation/drafted": 0, "speculation/accepted": 0, "speculation/passes": tokens}
    assert_equal_samples(engine.generate(prompts, 4), want)
    assert switch.noted == [(12, False, False), (12, True, True)]
    assert tokens - decoder.counts.passes <= decoder.counts.accepted < tokens and decoder.counts.passes < 0.5 * tokens


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_early_ends_of_unequal_groups_equal_those_without_drafts(model, hf_path, share):
    """A sample ends within a draft where ``reward.decided`` ends it, and keeps none of the tokens after it."""

    class Third:
        every_tokens = 3

        def ends(self, prompt: Prompt, sample_index: int, token_ids: list[int]) -> bool:
            return sum(token_ids) % 3 == 0

    prompts, sizes = prompts_of(5, 2, 9, 5), [5, 1, 3, 6]
    engine = engine_of(hf_path, model)
    engine.early_end = Third()
    want = engine.generate(prompts, sizes)
    assert {x.finish_reason for x in want} >= {"stop", "decided"}
    speculating(engine, KnownDrafter(want, share, len(VOCAB)))
    assert_equal_samples(engine.generate(prompts, sizes), want)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_attention_equals_that_without_drafts(tmp_path, family):
    """Windows shorter than the samples, sinks, latent keys; rows of unequal length leave the batch at other times."""
    config, made = reference.tiny_model(family)
    config.save_pretrained(tmp_path)
    prompts = prompts_of(5, 2, 17, 5, 3, vocab_size=config.vocab_size)
    engine = engine_of(tmp_path, None, max_response_tokens=24, temperature=0.3)
    engine.load_weights(iter(reference.file_weights(made).items()), version=1)
    want = engine.generate(prompts, 4)
    speculating(engine, KnownDrafter(want, 0.3, config.vocab_size))
    assert_equal_samples(engine.generate(prompts, 4), want)


@pytest.mark.parametrize("family", ["qwen3_next", "llama4"])
def test_a_model_whose_states_do_not_go_back_is_refused(tmp_path, family):
    config, _ = reference.tiny_model(family)
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"rollout.speculation=history cannot serve this '{family}.*=off"):
        engine_of(tmp_path, None, speculation="history")


def test_requests_with_cuts_top_tokens_and_stop_texts_equal_those_without_drafts(model, hf_path):
    shared = {"token_ids": (4, 9, 3), "num_samples": 5, "max_tokens": 12}
    requests = [
        SampleRequest(request_id="a", seed=3, temperature=1.0, top_k=5, top=3, **shared),
        SampleRequest(request_id="b", seed=90, temperature=1.5, top_p=0.7, stop_texts=("3", "- +"), **shared),
        SampleRequest(request_id="c", seed=5, temperature=0.0, stop_ids=(0, 7), **shared | {"token_ids": (8,)}),
    ]
    engine = engine_of(hf_path, model)
    want = engine.sample(requests)
    decoder = speculating(engine)
    for _ in range(2):  # the second time from the first time's answers
        for one, other in zip(engine.sample(requests), want, strict=True):
            for sequence, expected in zip(one.sequences, other.sequences, strict=True):
                assert sequence.token_ids.tolist() == expected.token_ids.tolist()
                assert sequence.finish_reason == expected.finish_reason
                assert np.abs(sequence.logprobs - expected.logprobs).max() < ROUNDING
                if expected.top is not None:
                    assert np.array_equal(sequence.top.token_ids, expected.top.token_ids)
    assert decoder.counts.accepted > 0
    assert {x.finish_reason for result in want for x in result.sequences} == {"stop", "length"}


def test_a_second_rollout_and_greedy_siblings_take_fewer_passes(model, hf_path):
    engine = engine_of(hf_path, model)
    want = engine.generate(prompts_of(5, 9), 6)
    decoder = speculating(engine)
    passes = []
    for _ in range(2):
        assert_equal_samples(engine.generate(prompts_of(5, 9), 6), want)
        passes.append(decoder.counts.take()["speculation/passes"])
    assert passes[1] < 0.7 * passes[0]


def chi_square(counts: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Return the statistic and a bound: five deviations above its mean, over bins of at least five expected."""
    common = expected >= 5
    observed, wanted = (np.append(x[common], x[~common].sum()) for x in (counts, expected))
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    degrees = len(wanted) - 1
    return float(((observed - wanted) ** 2 / wanted).sum()), degrees + 5 * (2 * degrees) ** 0.5


@pytest.mark.parametrize("share, temperature", [(None, 0.7), (0.0, 1.6), (0.5, 0.7), (1.0, 1.6)])
def test_triples_of_tokens_have_the_models_distribution(tmp_path, share, temperature):
    """Of a vocabulary of 6: all 216 triples enumerated, 2,500 samples, a seed that is fixed.

    A triple's second and third token come from one pass, over a draft of two tokens.
    """
    made, rounds, size = _model(scale=0.6), 2500, 6
    made.resize_token_embeddings(size, mean_resizing=False)
    made.config.save_pretrained(tmp_path)
    prompt = prompt_of(0, token_ids=(3, 5, 2))
    engine = engine_of(tmp_path, made, max_response_tokens=4, max_batch_samples=rounds, temperature=temperature)
    engine._stop_ids = ()  # every sample has four tokens
    want = engine.generate([prompt], rounds)
    decoder = speculating(engine, None if share is None else KnownDrafter(want, share, size), asked=2)
    for _ in range(2 if share is None else 1):  # from the history of the first time
        rollouts = engine.generate([prompt], rounds)
    # A draft is checked for all samples that begin alike, so a drawn one holds for few of them, or for many.
    assert decoder.counts.drafted > 1.5 * rounds and decoder.counts.accepted > (0.2 if share is None else 0.03) * rounds
    found = np.bincount([np.dot(x.response_ids[:3], (size**2, size, 1)) for x in rollouts], minlength=size**3)
    statistic, bound = chi_square(found, rounds * enumerated(made, prompt.token_ids, temperature, size))
    assert statistic < bound


@torch.no_grad()
def enumerated(model, prompt: tuple[int, ...], temperature: float, size: int) -> np.ndarray:
    """Return the probability of each triple of tokens, by one plain forward pass over all of them."""
    triples = torch.cartesian_prod(*[torch.arange(size)] * 3)
    rows = torch.cat([torch.tensor([prompt]).expand(len(triples), -1), triples], dim=1)
    logprobs = torch.log_softmax(model(rows).logits[:, len(prompt) - 1 : -1].double() / temperature, dim=-1)
    return logprobs.gather(2, triples[:, :, None]).sum(dim=(1, 2)).exp().numpy()
