"""A rig whose model carries random adapters, and what is measured on it: gradient, merged weights and steps."""

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.model.lora.adapters import adapters_of as own_adapters
from megatron_rl.model.lora.adapters import adapters_off, fill_adapters
from megatron_rl.weights.export import load_weights
from megatron_rl.weights.reader import MemoryReader
from tests.adapted import PROJECTIONS, adapt, adapters_of, merged, without_adapters
from tests.equality.rig import Rig, config_of, layers_of, open_rig, ragged_advantages
from tests.equality.shared_samples import SHARED, advantages_of, group_samples
from tests.reference import (
    LAYERS,
    file_weights,
    make_samples,
    masked_logprobs,
    near_policy,
    reference_gradient,
    relative_error,
    tiny_model,
)

NUM_SAMPLES, PER_MINI_BATCH, LR, DECAY, CLIP = 11, 4, 1e-2, 0.1, 0.5
RANK, ALPHA = 3, 5.0
LORA = (f"lora.rank={RANK}", f"lora.alpha={ALPHA}")
STEPS = (f"train.samples_per_mini_batch={PER_MINI_BATCH}", f"optimizer.lr={LR}", f"optimizer.weight_decay={DECAY}",
         f"optimizer.clip_grad={CLIP}")
ATTENTION = "lora.targets=[linear_qkv,linear_proj]"


def overrides_of(parallel: tuple[str, ...], extra: tuple[str, ...]) -> tuple[str, ...]:
    return (*LORA, *(f"parallel.{x}" for x in parallel), *extra)


def adapted_model(family: str, extra: tuple[str, ...] = (), layers: int = LAYERS) -> torch.nn.Module:
    _, model = tiny_model(family, layers=layers)
    (named,) = [x for x in extra if x.startswith("lora.targets=")] or [""]
    targets = named.removeprefix("lora.targets=[").rstrip("]").split(",") if named else tuple(PROJECTIONS)
    adapt(model, rank=RANK, alpha=ALPHA, targets=targets)
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
    return open_adapted(family, (), settings, samples=samples)


def open_either(family: str, overrides: tuple[str, ...], *more: str, samples: int):
    """Open a rig, whose model carries the random adapters where ``overrides`` ask for LoRA."""
    if not any(x.startswith("lora.") for x in overrides):
        return open_rig(family, *overrides, *more, samples=samples)
    return open_settings(family, (*overrides, *more), samples=samples)


def gradients(rank: int, world: int, family: str, settings: tuple[str, ...]) -> dict[str, float]:
    """Return relative errors of the dense and of the skip run's gradient; log-probs are where the gradient is taken."""
    with open_settings(family, settings) as rig:
        count = len(rig.samples)
        advantages = advantages_of(count) if SHARED in settings else ragged_advantages(count)
        want, _ = reference_gradient(rig.model, rig.samples, rig.groups, list(advantages))
        assert set(want) == set(adapters_of(rig.model))
        return rig.errors(advantages, want)


def merged_apart(rank: int, world: int, family: str, settings: tuple[str, ...]) -> float:
    """Return the largest gap of log-probs of adapters beside weights to merged ones, ours and transformers'."""
    with open_settings(family, settings) as rig:
        samples, beside, weights = rig.samples, rig.logprobs(), rig.weights()
    with open_rig(family, *[x for x in settings if not x.startswith("lora.")]) as rig:
        backend, chunks = rig.backend, [chunk.module for chunk in rig.backend.chunks]
        rig.take(samples)
        base = rig.logprobs()
        load_weights(chunks, backend.shape, backend.topology, MemoryReader(weights))
        gap = float(np.abs(rig.logprobs() - beside).max())
        with torch.no_grad():
            for name, tensor in file_weights(rig.model).items():
                tensor.copy_(weights.get(name, tensor))
        gap = max(gap, float(np.abs(masked_logprobs(rig.model, samples) - beside * rig.loss_mask).max()))
        assert float(np.abs(base - beside).max()) > 0.01, "the adapters do something"
    return gap


def reference_steps(model: torch.nn.Module, samples: list, groups: list[int], advantages: list[float]) -> list[float]:
    """Return the gradient norms of torch's AdamW over the same mini-batches; the adapters end where they are wanted."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=DECAY)
    norms = []
    for start in range(0, NUM_SAMPLES, PER_MINI_BATCH):
        part = slice(start, min(start + PER_MINI_BATCH, NUM_SAMPLES))
        reference_gradient(model, samples[part], groups[part], advantages[part])
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, CLIP)))
        optimizer.step()
    return norms


def replicas_agree(rig: Rig) -> bool:
    """Return whether every tensor rank holds the same bits of what is not split: the first rank's were exported."""
    same = True
    for adapter in own_adapters(rig.backend.chunks):
        group = adapter.tp_group
        for parameter in (p for name, p in adapter.named_parameters() if name not in adapter.split):
            first = parameter.detach().clone()
            dist.broadcast(first, dist.get_process_group_ranks(group)[0], group=group)
            same &= torch.equal(first, parameter)
    return same


def three_steps(rank: int, world: int, family: str, settings: tuple[str, ...]) -> dict[str, object]:
    """Return the errors of three steps against torch's AdamW; ``frozen`` says whether W is still what it was."""
    advantages = ragged_advantages(NUM_SAMPLES)
    with open_settings(family, (*settings, *STEPS)) as rig:
        before, old = adapters_of(rig.model), np.concatenate([s.logprobs for s in rig.samples])
        norms = reference_steps(rig.model, rig.samples, rig.groups, list(advantages))
        results = rig.step(advantages, drops=True, old=old)
        found = rig.trained()
        after = adapters_of(rig.model)
        whole = merged({**file_weights(without_adapters(rig.model)), **found}, rank=RANK, alpha=ALPHA)
        exported = rig.weights()
        with adapters_off([chunk.module for chunk in rig.backend.chunks]):
            frozen = rig.weights()
        apart = {name: x.clone() for name, x in rig.backend.export(merges=False)}  # what adapters alone belong to
        base = file_weights(tiny_model(family, layers=rig.model.config.num_hidden_layers)[1])
        return {
            "norm": abs(results[0].grad_norm / norms[0] - 1),
            "moved": relative_error({k: found[k] - before[k] for k in found}, {k: after[k] - before[k] for k in found}),
            "export": relative_error(exported, {k: whole[k] for k in exported}),
            "trained": relative_error(exported, {k: base[k] for k in exported}) > 1e-2,
            "frozen": set(apart) == set(frozen) == set(exported)
            and all(torch.equal(x, base[k]) and torch.equal(x, apart[k]) for k, x in frozen.items()),
            "replicas": replicas_agree(rig),
        }
