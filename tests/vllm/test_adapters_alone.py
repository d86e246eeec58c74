"""A real engine that gets adapters alone computes as the model that they are merged into, after every sync.

The reference is Hugging Face's model with W + (alpha / rank) · B A, merged in float64. Rank 3 is padded to 8 by vLLM.
"""

from __future__ import annotations

import itertools
import os
import signal
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from megatron_rl.rollout.engine import NO_WEIGHTS, EngineLost, SyncReport
from megatron_rl.rollout.weight_sync.transport import is_adapter
from tests.adapted import adapt, adapters_of, merged
from tests.vllm.calls import Call, spans
from tests.vllm.rig import (
    DEADLINE_S,
    LOGPROB_TOLERANCE,
    Bench,
    hugging_face,
    make_prompts,
    model_folder,
    reference_logprobs,
    start_bench,
)

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("bounded")]

PROMPTS = make_prompts(5, 2, 40, 17, 100)
RANK, ALPHA = 3, 4.5
ALONE = (f"lora.rank={RANK}", f"lora.alpha={ALPHA}", "weight_sync.adapters=alone")
LAYER = "model.layers.0."


@dataclass
class Adapted:
    """An engine with adapters apart from its weights, and Hugging Face's model with both."""

    bench: Bench
    weights: Mapping[str, torch.Tensor]

    def pairs(self, seed: int) -> dict[str, torch.Tensor]:
        """Draw the adapters of a seed, under PEFT's names, as the trainer exports them."""
        model = hugging_face(self.bench.folder)
        adapt(model, rank=RANK, alpha=ALPHA, seed=seed)
        return adapters_of(model)

    def refer_to(self, seed: int) -> None:
        """Merge the adapters of a seed into the reference."""
        whole = merged({**self.weights, **self.pairs(seed)}, rank=RANK, alpha=ALPHA)
        self.bench.model.load_state_dict(whole, strict=False)

    def send(self, tensors: Mapping[str, torch.Tensor]) -> SyncReport:
        """Send tensors, after the weights where the engine lacks those, as the run's manager does."""
        weights = self.weights if self.bench.engine.lacks_weights else {}
        return self.bench.sync([*weights.items(), *tensors.items()])

    def load(self, seed: int) -> SyncReport:
        report = self.send(self.pairs(seed))
        assert not report.failed, report.failed
        self.refer_to(seed)
        return report


def started(inputs, root, family: str, *overrides: str, ranks: int = 1, tied: bool = True) -> Adapted:
    folder = model_folder(inputs / "model", root / "model", family, tied=tied)
    bench = start_bench(folder, root / "run", *ALONE, *overrides, ranks=ranks)
    return Adapted(bench, bench.weights(1))


@pytest.fixture(scope="module")
def adapted(inputs, tmp_path_factory) -> Iterator[Adapted]:
    """Start an engine that takes weights in flight; its calls last for some seconds where asked for 200 tokens."""
    found = started(
        inputs,
        tmp_path_factory.mktemp("alone"),
        "qwen2",
        "rollout.max_response_tokens=200",
        "rollout.request_s=200",
        "weight_sync.in_flight=true",
        "rollout.vllm={max_num_seqs: 4}",
    )
    found.bench.versions = itertools.count(0)
    try:
        found.bench.engine.recover(())
        yield found
    finally:
        found.bench.engine.close()


def test_after_every_sync_logprobs_equal_the_merged_models(adapted):
    """The weights travel once; what is sent afterwards is A and B alone, and is in use at once."""
    whole = sum(x.nbytes for x in adapted.weights.values())
    pairs = sum(x.nbytes for x in adapted.pairs(0).values())
    gaps, changes = [], []
    for number, seed in enumerate((1, 2, 3, 1)):
        report = adapted.load(seed)
        assert report.num_bytes == pairs + (0 if number else whole)
        rollouts = adapted.bench.engine.generate(PROMPTS, 2, max_tokens=[24] * len(PROMPTS))
        assert {x.weight_versions for x in rollouts} == {((report.version, len(x.response_ids)),) for x in rollouts}
        gaps.append(largest_gap(adapted, rollouts))
        adapted.refer_to(seed + 1)  # of adapters that it has not
        changes.append(largest_gap(adapted, rollouts))
    print("largest differences:", " ".join(f"{x:.1e}" for x in gaps), "| of others:", min(changes))
    assert max(gaps) < LOGPROB_TOLERANCE and min(changes) > 1000 * LOGPROB_TOLERANCE


def largest_gap(adapted: Adapted, rollouts) -> float:
    temperature = adapted.bench.config.rollout.temperature
    return max(
        np.abs(np.array(x.logprobs) - reference_logprobs(adapted.bench.model, x, temperature)).max() for x in rollouts
    )


def exact(adapted: Adapted, seed: int = 5) -> None:
    adapted.load(seed)
    rollouts = adapted.bench.engine.generate(PROMPTS, 2, max_tokens=[24] * len(PROMPTS))
    assert largest_gap(adapted, rollouts) < LOGPROB_TOLERANCE


def test_adapters_in_flight_are_those_that_a_tokens_span_names(adapted):
    """A token's log-prob is that of the adapters that its span names, two times changed in the middle of a call."""
    bench = adapted.bench
    before, bench.engine._stop_ids = bench.engine._stop_ids, ()  # all answers have their full length
    try:
        for _ in range(4):  # an update may fall between the last tokens of some answers and the first of the next
            adapted.load(1)
            versions, call = {bench.engine.weight_version: 1}, Call(bench, samples=2, few=9)
            for seed in (2, 3):
                call.wait_for_the_middle()
                versions[adapted.load(seed).version] = seed
            rollouts = call.result()
            named = {tuple(version for version, _ in x.weight_versions): x for x in rollouts}
            seen = {version for kind in named for version in kind} == set(versions)
            if spanned := seen and any(len(kind) > 1 for kind in named):
                break
    finally:
        bench.engine._stop_ids = before
    assert spanned
    gaps, others = dict.fromkeys(versions, 0.0), []
    for version, seed in versions.items():
        adapted.refer_to(seed)
        for rollout in named.values():
            wanted = reference_logprobs(bench.model, rollout, bench.config.rollout.temperature)
            gap = np.abs(np.array(rollout.logprobs) - wanted)
            for own, tokens in spans(rollout):
                if own == version:
                    gaps[version] = max(gaps[version], gap[tokens].max())
                else:
                    others.append(gap[tokens].max())
    print("largest differences:", gaps)
    assert max(gaps.values()) < LOGPROB_TOLERANCE and max(others) > 1000 * LOGPROB_TOLERANCE


@pytest.mark.parametrize(
    "change, words",
    [
        ({f"{LAYER}mlp.up_proj.lora_B.weight": None}, "1 halves of the adapters' pairs did not arrive"),
        (
            {f"{LAYER}mlp.up_proj.lora_{side}.weight": None for side in "AB"},
            f"layer {LAYER}mlp.gate_up_proj is [192, 64]",
        ),
        (
            {f"{LAYER}mlp.gate.lora_A.weight": (3, 64), f"{LAYER}mlp.gate.lora_B.weight": (2, 3)},
            f"no layer for 1 of the adapters: {LAYER}mlp.gate",
        ),
        ({f"{LAYER}self_attn.q_proj.lora_A.weight": (2, 64)}, "adapters of rank 3 are A [(2, 64), (3, 64)]"),
        ({f"{LAYER}self_attn.o_proj.lora_B.weight": (63, 3)}, f"layer {LAYER}self_attn.o_proj is [64, 64]"),
        ({f"{LAYER}self_attn.o_proj.lora_B.weight": (64, 2)}, f"layer {LAYER}self_attn.o_proj is [(64, 2)]"),
        ({"model.norm.weight": (64,)}, "15 of the engine's 16 parameters did not arrive"),
    ],
    ids=["half a pair", "one of two", "no such layer", "another rank", "too few rows", "rank of B", "some weights"],
)
def test_adapters_that_do_not_fit_are_named(adapted, change, words):
    """Adapters that do not fit the model are named, the engine then holds nothing, and a whole sync is exact.

    vLLM itself leaves them out, or copies what there is.
    """
    adapted.load(1)
    tensors = adapted.pairs(2)
    for name, size in change.items():
        tensors.pop(name, None)
        if size is not None:
            tensors[name] = torch.ones(size)
    report = adapted.send(tensors)
    (reason,) = report.failed.values()
    assert words in reason, reason
    assert adapted.bench.engine.weight_version == NO_WEIGHTS and adapted.bench.engine.lacks_weights
    exact(adapted)


def test_an_engine_killed_and_started_again_gets_all(adapted):
    """An engine that was killed lacks the weights, refuses adapters without them, and is exact after both."""
    bench = adapted.bench
    adapted.load(1)
    assert not bench.engine.lacks_weights
    os.kill(bench.pid, signal.SIGKILL)
    with pytest.raises(EngineLost):
        bench.engine.generate(PROMPTS, 1)
    bench.engine.recover(bench.engine.lost)
    assert bench.engine.lacks_weights
    (reason,) = bench.sync(adapted.pairs(2).items()).failed.values()
    assert "adapters came alone, and this engine has not the weights that they belong to" in reason
    assert adapted.load(3).num_tensors == len(adapted.weights) + len(adapted.pairs(3))
    exact(adapted)


@pytest.mark.parametrize("rank, alpha", [(1, 16.0), (3, 4.5), (16, 32.0), (512, 1e-3)])
def test_vllm_scales_and_names_as_the_trainer_does(rank, alpha):
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.utils import parse_fine_tuned_lora_name

    helper = PEFTHelper(r=rank, lora_alpha=alpha, target_modules=["q_proj"])
    name = f"{LAYER}self_attn.q_proj"
    assert helper.get_rank_and_scaling(name) == (rank, alpha / rank)
    assert parse_fine_tuned_lora_name(f"{name}.lora_A.weight") == (name, True)
    assert parse_fine_tuned_lora_name(f"{name}.lora_B.weight") == (name, False)
    assert is_adapter(f"{name}.lora_A.weight") and not is_adapter(f"{name}.weight")


def test_the_senders_memory_is_left_as_it_was():
    """VLLM multiplies B where it lies, so it gets copies: the sender may still digest the bucket, or use it again."""
    from vllm.lora.lora_weights import LoRALayerWeights

    from megatron_rl.rollout.weight_sync.adapter import adapter_model

    layer = types.SimpleNamespace(base_layer=types.SimpleNamespace(output_size=4, input_size=6))
    config = types.SimpleNamespace(max_lora_rank=8, lora_dtype=torch.float32)
    manager = types.SimpleNamespace(packed_modules={}, modules={"down": layer}, lora_config=config, vocab_size=9)
    sent = {"down.lora_A.weight": torch.ones(RANK, 6), "down.lora_B.weight": torch.ones(4, RANK)}
    (pair,) = adapter_model(sent, RANK, ALPHA, manager).loras.values()
    assert isinstance(pair.optimize(), LoRALayerWeights) and torch.equal(pair.lora_b, torch.full((4, RANK), 1.5))
    assert all(torch.equal(x, torch.ones_like(x)) for x in sent.values())


@pytest.mark.long
def test_two_workers_cut_the_adapters_for_themselves(inputs, tmp_path_factory):
    """An engine of two workers, each with half of every layer, is exact by either channel; both sign."""
    root = tmp_path_factory.mktemp("alone_pair")
    found = started(inputs, root, "qwen3", "rollout.tensor_parallel=2", ranks=2, tied=False)
    try:
        found.bench.engine.recover(())
        for seed in (1, 2):
            exact(found, seed)
        assert len(found.bench.replica.control("weights_received", {}, DEADLINE_S)) == 2
        pairs = found.pairs(3)
        del pairs[f"{LAYER}mlp.up_proj.lora_B.weight"]
        (reason,) = found.send(pairs).failed.values()
        assert "worker 0 of" in reason and "did not arrive" in reason
        exact(found, 4)
    finally:
        found.bench.engine.close()
