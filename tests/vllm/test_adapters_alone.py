"""A real engine that gets adapters alone computes as the model that they are merged into, after every sync.

The reference is Hugging Face's model with W + (alpha / rank) · B A, merged in float64. Rank 3 is padded to 8 by vLLM.
"""

import contextlib
import os
import signal
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
import torch

from megatron_rl.rollout.engines.engine import NO_WEIGHTS, EngineLost, SyncReport
from megatron_rl.rollout.weight_sync.transport import is_adapter
from megatron_rl.types import Rollout
from tests.adapted import adapt, adapters_of, merged
from tests.pairwise import quick
from tests.vllm.calls import LONG, spans_hold
from tests.vllm.rig import DEADLINE_S, LOGPROB_TOLERANCE, Bench, hugging_face, make_prompts, running

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
    first: SyncReport | None = None

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

    def draw(self) -> list[Rollout]:
        return self.bench.engine.generate(PROMPTS, 2, max_tokens=[24] * len(PROMPTS))

    def is_exact(self, seed: int = 5) -> None:
        self.load(seed)
        assert self.bench.worst(self.draw()) < LOGPROB_TOLERANCE


@contextlib.contextmanager
def started(inputs, root, family: str, *overrides: str, **options) -> Iterator[Adapted]:
    with running(inputs, root, family, *ALONE, *overrides, **options) as bench:
        yield Adapted(bench, bench.weights(1))


@pytest.fixture(scope="module")
def adapted(inputs, tmp_path_factory) -> Iterator[Adapted]:
    """Start an engine that takes weights in flight; its calls last for some seconds where asked for 100 tokens."""
    settings = (*LONG, "rollout.vllm={max_num_seqs: 4}")
    with started(inputs, tmp_path_factory.mktemp("alone"), "qwen2", *settings) as found:
        found.first = found.load(4)
        yield found


def test_after_every_sync_logprobs_equal_the_merged_models(adapted):
    """The weights travel once; what is sent afterwards is A and B alone, and is in use at once."""
    whole = sum(x.nbytes for x in adapted.weights.values())
    pairs = sum(x.nbytes for x in adapted.pairs(0).values())
    gaps, changes = [], []
    assert adapted.first.num_bytes == pairs + whole
    for seed in (1, 2, 3, 1):
        report = adapted.load(seed)
        assert report.num_bytes == pairs
        rollouts = adapted.draw()
        assert {x.weight_versions for x in rollouts} == {((report.version, len(x.response_ids)),) for x in rollouts}
        gaps.append(adapted.bench.worst(rollouts))
        adapted.refer_to(seed + 1)  # of adapters that it has not
        changes.append(adapted.bench.worst(rollouts))
    assert max(gaps) < LOGPROB_TOLERANCE and min(changes) > 1000 * LOGPROB_TOLERANCE


def test_adapters_in_flight_are_those_that_a_tokens_span_names(adapted, monkeypatch):
    monkeypatch.setattr(adapted.bench.engine, "_stop_ids", ())  # all answers have their full length
    pairs = {seed: adapted.pairs(seed) for seed in (1, 2, 3)}  # drawn before the call, which goes on meanwhile

    def load(seed: int) -> int:
        report = adapted.send(pairs[seed])
        assert not report.failed, report.failed
        return report.version

    spans_hold(adapted.bench, load, adapted.refer_to, few=8)


UP, OUTPUT = f"{LAYER}mlp.up_proj.lora_", f"{LAYER}self_attn.o_proj.lora_"
MISFITS = {
    "half a pair": ({f"{UP}B.weight": None}, "1 halves of the adapters' pairs did not arrive"),
    "one of two": (dict.fromkeys((f"{UP}A.weight", f"{UP}B.weight")), f"layer {LAYER}mlp.gate_up_proj is [192, 64]"),
    "no such layer": ({f"{LAYER}mlp.gate.lora_A.weight": (3, 64), f"{LAYER}mlp.gate.lora_B.weight": (2, 3)},
                      f"no layer for 1 of the adapters: {LAYER}mlp.gate"),
    "another rank": ({f"{UP}A.weight": (2, 64)}, "adapters of rank 3 are A [(2, 64), (3, 64)]"),
    "too few rows": ({f"{OUTPUT}B.weight": (63, 3)}, f"layer {LAYER}self_attn.o_proj is [64, 64]"),
    "rank of B": ({f"{OUTPUT}B.weight": (64, 2)}, f"layer {LAYER}self_attn.o_proj is [(64, 2)]"),
    "some weights": ({"model.norm.weight": (64,)}, "15 of the engine's 16 parameters did not arrive"),
}


@pytest.mark.parametrize("misfit", quick(MISFITS, "half a pair", "one of two", "some weights"))
def test_adapters_that_do_not_fit_are_named(adapted, misfit):
    """vLLM leaves them out, or copies what there is; here the engine then holds nothing, and a whole sync is exact."""
    change, words = MISFITS[misfit]
    adapted.load(1)
    tensors = adapted.pairs(2)
    for name, size in change.items():
        tensors.pop(name, None)
        if size is not None:
            tensors[name] = torch.ones(size)
    (reason,) = adapted.send(tensors).failed.values()
    assert words in reason, reason
    assert adapted.bench.engine.weight_version == NO_WEIGHTS and adapted.bench.engine.lacks_weights
    adapted.is_exact()


@pytest.mark.long
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
    assert "adapters arrived without their base weights, which this engine does not hold" in reason
    assert adapted.load(3).num_tensors == len(adapted.weights) + len(adapted.pairs(3))
    adapted.is_exact()


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
    with started(inputs, root, "qwen3", "rollout.tensor_parallel=2", ranks=2, tied=False) as found:
        for seed in (1, 2):
            found.is_exact(seed)
        assert len(found.bench.replica.control("weights_received", {}, DEADLINE_S)) == 2
        pairs = found.pairs(3)
        del pairs[f"{UP}B.weight"]
        (reason,) = found.send(pairs).failed.values()
        assert "worker 0 of" in reason and "did not arrive" in reason
        found.is_exact(4)
