"""Thin copies of released models: their configs' kinds and flags, small sizes, log-probs equal to transformers'."""

import json
import pathlib

import numpy as np
import pytest
import torch

from megatron_rl.backend import MegatronBackend
from megatron_rl.distributed import topology
from megatron_rl.weights.config_json import read_hf_config
from tests.equality.rig import Rig, config_of, equal_by_name
from tests.published.configs import ELEMENTS, VOCABULARY, is_refused, thin_fields
from tests.reference import away_from_neutral, file_weights, make_samples, masked_logprobs

TOLERANCE = 1e-5  # float32 and another order of summation, |logprob| < 20: seen 2e-6; a lost flag shows at 1e-2
NUM_SAMPLES = 7


def drawn(folder: pathlib.Path):
    """Return transformers' model of a folder's config; biases and norms are away from their neutral values."""
    from transformers import AutoModelForCausalLM

    config = read_hf_config(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").float().eval()
    away_from_neutral(model)
    return config, model


def gap(rank: int, world: int, folder: str) -> tuple[float, bool]:
    """Return the largest gap of a log-prob to transformers', and whether the weights come out as they went in."""
    hf_config, model = drawn(pathlib.Path(folder))
    samples = make_samples(NUM_SAMPLES, vocab_size=VOCABULARY)
    wanted = masked_logprobs(model, samples)
    loaded = file_weights(model)
    if hf_config.tie_word_embeddings:
        del loaded["lm_head.weight"]
    try:
        rig = Rig(backend=MegatronBackend(config_of(), hf_config=hf_config, weights=loaded), model=model)
        rig.take(samples)
        logprobs = rig.logprobs()
        exported = rig.weights()
    finally:
        topology.destroy()
    return float(np.abs(logprobs - wanted).max()), equal_by_name(exported, loaded)


@pytest.mark.parametrize("name", ELEMENTS)
def test_logprobs_of_a_thin_copy_equal_hugging_faces(pool, tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(thin_fields(name)))
    if is_refused(name, tmp_path):
        return
    ((found, same),) = pool.run(1, gap, str(tmp_path), timeout_s=60)
    assert found < TOLERANCE and same
