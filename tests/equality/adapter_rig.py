"""Opens a rig whose model carries random adapters, on the topologies of the adapter tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from megatron_rl.model.adapter import fill_adapters
from megatron_rl.weights.reader import MemoryReader
from tests.adapted import PROJECTIONS, adapt, adapters_of
from tests.equality.matrix import CP2, EP2, PP2, RECOMPUTE, SP, TP2, VPP2
from tests.equality.rig import Rig, config_of, layers_of, open_rig
from tests.equality.shared_samples import SHARED, group_samples
from tests.reference import LAYERS, make_samples, near_policy, tiny_model

NUM_SAMPLES, PER_MINI_BATCH, LR, DECAY, CLIP = 11, 4, 1e-2, 0.1, 0.5
RANK, ALPHA = 3, 5.0
LORA = (f"lora.rank={RANK}", f"lora.alpha={ALPHA}")
STEPS = (
    f"train.samples_per_mini_batch={PER_MINI_BATCH}",
    f"optimizer.lr={LR}",
    f"optimizer.weight_decay={DECAY}",
    f"optimizer.clip_grad={CLIP}",
)
ATTENTION = "lora.targets=[linear_qkv,linear_proj]"
ETP1 = "expert_tensor=1"
# (processes, model, what of parallel.*, anything else)
TOPOLOGIES = {
    "1 process": (1, "qwen3", (), ()),
    "recomputed": (1, "qwen2_tied", (), RECOMPUTE),
    "DP2": (2, "llama3_rope", (), ()),
    "TP2": (2, "qwen2_tied", (TP2,), ()),
    "TP2-SP": (2, "qwen3", (TP2, SP), ()),
    "TP2-norms-behind": (2, "olmo2", (TP2,), ()),
    "TP2-norms-around": (2, "gemma3_text", (TP2,), ()),
    "PP2-tied": (2, "qwen2_tied", (PP2,), ()),
    "PP2-recomputed": (2, "qwen2_untied", (PP2,), RECOMPUTE),
    "PP2-VPP2": (2, "qwen2_tied", (PP2, VPP2), ()),
    "CP2": (2, "llama3_rope", (CP2,), ()),
    "EP2": (2, "qwen3_moe", (EP2,), (ATTENTION,)),
    "EP2-sinks": (2, "gpt_oss", (EP2,), (ATTENTION,)),
    "TP2-PP2": (4, "qwen2_untied", (TP2, PP2), ()),
    "TP2-SP-PP2-VPP2": (4, "qwen3", (TP2, SP, PP2, VPP2), ()),
    "PP2-DP2": (4, "qwen2_tied", (PP2,), ()),
    "TP2-SP-CP2": (4, "qwen2_untied", (TP2, SP, CP2), ()),
    "TP2-SP-EP2": (4, "mixtral", (TP2, SP, EP2), (ATTENTION,)),
    "experts": (1, "glm4_moe", (), ()),
    "experts-EP2": (2, "qwen3_moe", (EP2,), ()),
    "experts-TP2-SP": (2, "glm4_moe", (TP2, SP), ()),
    "experts-TP2-SP-ETP1": (2, "mixtral", (TP2, SP, ETP1), ()),
    "experts-TP2-SP-EP2-ETP1": (2, "qwen3_moe", (TP2, SP, EP2, ETP1), ()),
    "experts-PP2": (2, "qwen3_moe", (PP2,), ()),
    "experts-TP2-SP-EP2": (4, "mixtral", (TP2, SP, EP2), ()),
}


def targets_of(extra: tuple[str, ...]) -> tuple[str, ...]:
    return ("linear_qkv", "linear_proj") if ATTENTION in extra else tuple(PROJECTIONS)


def overrides_of(parallel: tuple[str, ...], extra: tuple[str, ...]) -> tuple[str, ...]:
    return (*LORA, *(f"parallel.{x}" for x in parallel), *extra)


def adapted_model(family: str, extra: tuple[str, ...] = (), layers: int = LAYERS) -> torch.nn.Module:
    _, model = tiny_model(family, layers=layers)
    adapt(model, rank=RANK, alpha=ALPHA, targets=targets_of(extra))
    return model


@contextlib.contextmanager
def open_adapted(family, parallel, extra=(), *, samples=NUM_SAMPLES) -> Iterator[Rig]:
    """Open a rig with ``adapted_model``'s adapters; under SHARED its samples are those of shared_samples.py."""
    model = adapted_model(family, extra, layers_of(config_of(*overrides_of(parallel, extra))))
    with open_rig(family, *overrides_of(parallel, extra), total_steps=20) as rig:
        backend = rig.backend
        fill_adapters(
            [chunk.module for chunk in backend.chunks],
            backend.shape,
            backend.topology,
            MemoryReader(adapters_of(model)),
        )
        backend.optimizer.megatron.reload_model_params()
        rig.model = model
        if SHARED in extra:
            given, groups = group_samples()
            rig.take(near_policy(model, given), groups)
        elif samples:
            rig.take(near_policy(model, make_samples(samples)))
        yield rig
