"""Checks backend/routed_rows.py: a row of a packed micro-batch gets the experts of the first sample that knows them."""

import numpy as np

from megatron_rl.backend.routed_rows import RouterRows, lay_experts
from megatron_rl.model.attention.layout import lay_out
from megatron_rl.types import Sample

PROMPT, LAYERS, TOP_K = 6, 3, 2


def sample_of(number: int, response: int, experts: np.ndarray | None) -> Sample:
    return Sample(sample_id=f"s{number}", prompt_tokens=PROMPT, token_ids=np.arange(PROMPT + response),
                  loss_mask=np.ones(response, dtype=bool), logprobs=np.zeros(response, dtype=np.float32),
                  routed_experts=experts)


def test_a_shared_prompts_rows_have_the_experts_of_the_first_sample_that_knows_them() -> None:
    """Four samples of one prompt know other tokens each and disagree, and one knows none: equal to a loop over rows."""
    random, read = np.random.default_rng(0), np.array([3, 0, 4, 2, 1])
    samples = []
    for number, response in enumerate(read.tolist()):
        experts = random.integers(0, 99, (PROMPT + max(response, 1), LAYERS, TOP_K)).astype(np.int16)
        experts[random.random(len(experts)) < 0.5] = -1
        samples.append(sample_of(number, max(response, 1), None if number == 1 else experts))
    layout = lay_out(np.full(5, PROMPT), read, np.zeros(5, dtype=np.int64), pad_multiple=4)
    rows = RouterRows(layers=(2, 0), num_layers=LAYERS, top_k=TOP_K)
    wanted = np.full((len(rows.layers), layout.num_tokens, TOP_K), -1)
    for slot, sample in enumerate(samples):
        places = [layout.prompts[slot] + token for token in range(PROMPT)]
        places += [layout.responses[slot] + token for token in range(read[slot])]
        for token, place in enumerate(places if sample.routed_experts is not None else []):
            for index, layer in enumerate(rows.layers):
                if wanted[index, place, 0] < 0:
                    wanted[index, place] = sample.routed_experts[token, layer]
    found = lay_experts(layout, samples, read, np.arange(layout.num_tokens), rows)
    assert found.dtype == np.int16 and np.array_equal(found, wanted)
