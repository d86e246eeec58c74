"""Training requests, cut and mixed as a client likes, have the gradient, log-probs and losses of a plain loop."""

import dataclasses

import numpy as np
import pytest

from megatron_rl.serve.losses import LOSSES
from megatron_rl.serve.updates import prepare, run
from megatron_rl.serve.values import TrainingCall
from tests.equality.adapter_rig import open_either
from tests.equality.layouts import TOLERANCE
from tests.equality.rows import measured
from tests.equality.served_rig import SETTINGS, make_data, naive_gradient
from tests.pairwise import quick
from tests.reference import relative_error

PLACES = (*("PP2 qwen2_tied", "TP2-SP qwen3", "EP2 qwen3_moe", "CP2 qwen3", "DP2-sharded qwen2_tied", "dense qwen3"),
          *("PP2-LoRA qwen2_untied", "TP2-LoRA qwen2_tied", "LoRA qwen3"),
          *("one qwen3", "TP2 qwen2_untied", "DP2 llama3_rope"))
# a loss is computed where the log-probs of whole sequences are: ranks that share a sequence or gather its parts meet
# one loss by tokens and one by sequences
EVERY_LOSS, FEW_LOSSES = ("dense qwen3", "DP2-sharded qwen2_tied", *PLACES[9:]), ("cross_entropy", "gspo")


def call_of(loss: str, data: list, **changes: object) -> TrainingCall:
    call = TrainingCall(model_id="m", seq_id=1, loss=loss, settings=SETTINGS[loss], forward_only=False, data=data)
    return dataclasses.replace(call, **changes)


def cut(data: list, seed: int) -> list[list]:
    """Cut data into requests of odd sizes."""
    random, parts = np.random.default_rng(seed), []
    while data:
        size = int(random.integers(1, 4))
        parts, data = [*parts, data[:size]], data[size:]
    return parts


def requests(losses: tuple[str, ...]) -> list[tuple[str, list]]:
    """Return the requests of every loss, cut up and in an order of chance, and one of several targets a token."""
    calls = [(loss, part) for i, loss in enumerate(losses) for part in cut(make_data(loss, 7, seed=i), i)]
    calls.append(("cross_entropy", make_data("cross_entropy", 4, seed=9, wide=True)))
    return [calls[i] for i in np.random.default_rng(5).permutation(len(calls))]


def errors_of(rig, calls: list[tuple[str, list]], want: dict, losses: list[float], read: list, mode: str) -> dict:
    """Run the requests and return the largest errors: of gradient, log-probs and losses."""
    found = {"logprobs": 0.0, "loss": 0.0}
    for (loss, data), total, values in zip(calls, losses, read, strict=True):
        answer = run(rig.backend, prepare(rig.backend, call_of(loss, data), logprobs=mode))
        assert answer.metrics["num_data:sum"] == len(data)
        found["loss"] = max(found["loss"], abs(answer.metrics["loss:sum"] - total) / max(1.0, abs(total)))
        for datum, got, wanted in zip(data, answer.logprobs, values, strict=True):
            wanted = wanted[:, 0] if datum.flat else wanted
            assert got.shape == wanted.shape
            seen = np.ones_like(got, dtype=bool) if mode == "all" else got != 0
            found["logprobs"] = max(found["logprobs"], float(np.abs(got - wanted)[seen].max(initial=0.0)))
    gradient = rig.backend.gradient()
    rig.backend.zero_grad()
    return {**found, "gradient": relative_error(gradient, want)}


def errors(rank: int, world: int, family: str, layout: tuple[str, ...], losses: tuple[str, ...]) -> list[dict]:
    with open_either(family, layout, samples=0) as rig:
        calls = requests(("cross_entropy", "ppo") if rig.backend.shape.lora_rank else losses)
        want, totals, read = naive_gradient(rig.model, calls)
        return [errors_of(rig, calls, want, totals, read, mode) for mode in ("all", "trained")]


@pytest.mark.parametrize("place", quick(PLACES, *PLACES[:8]))
def test_requests_have_the_plain_loops_gradient(pool, place):
    for found in measured(pool, place, errors, LOSSES if place in EVERY_LOSS else FEW_LOSSES)[0]:
        assert max(found.values()) < TOLERANCE, found
