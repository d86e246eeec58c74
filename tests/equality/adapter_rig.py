"""Opens a rig whose model carries random adapters, on the topologies of the adapter tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from megatron_rl.model.adapter import fill_adapters
from megatron_rl.weights.reader import MemoryReader
from tests.adapted import PROJECTIONS, adapt, adapters_of
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
        chunks = [chunk.module for chunk in backend.chunks]
        fill_adapters(chunks, backend.shape, backend.topology, MemoryReader(adapters_of(model)))
        backend.optimizer.megatron.reload_model_params()
        rig.model = model
        if SHARED in extra:
            given, groups = group_samples()
            rig.take(near_policy(model, given), groups)
        elif samples:
            rig.take(near_policy(model, make_samples(samples)))
        yield rig


def open_settings(family: str, settings: tuple[str, ...], *, samples: int = NUM_SAMPLES):
    """Open a rig with adapters under settings that name their ``parallel.*`` in full."""
    parallel = tuple(x.removeprefix("parallel.") for x in settings if x.startswith("parallel."))
    others = tuple(x for x in settings if not x.startswith("parallel."))
    return open_adapted(family, parallel, others, samples=samples)


def open_either(family: str, overrides: tuple[str, ...], *more: str, samples: int):
    """Open a rig, whose model carries the random adapters where ``overrides`` ask for LoRA."""
    if not any(x.startswith("lora.") for x in overrides):
        return open_rig(family, *overrides, *more, samples=samples)
    return open_settings(family, (*overrides, *more), samples=samples)
