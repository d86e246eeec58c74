"""What the adapter tests measure on a topology: gradient, merged weights and steps, against a plain loop's."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.model.adapter import adapters_of as own_adapters
from megatron_rl.model.adapter import adapters_off
from megatron_rl.weights.export import load_weights
from megatron_rl.weights.reader import MemoryReader
from tests.adapted import adapters_of, merged, without_adapters
from tests.equality.adapter_rig import ALPHA, CLIP, DECAY, LR, NUM_SAMPLES, PER_MINI_BATCH, RANK, STEPS, open_settings
from tests.equality.rig import Rig, open_rig, ragged_advantages
from tests.equality.shared_samples import SHARED, advantages_of
from tests.reference import file_weights, masked_logprobs, reference_gradient, relative_error, tiny_model


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
    others = [x for x in settings if not x.startswith("lora.")]
    with open_rig(family, *others) as rig:
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
        found = {name: x.clone() for name, x in rig.backend.export_adapters()}
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
