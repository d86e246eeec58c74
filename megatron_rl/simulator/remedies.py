"""Finds the settings under which a job fits on its GPUs: each is counted as the job itself was."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from megatron_rl.config import Config
from megatron_rl.errors import ConfigError
from megatron_rl.simulator.degrees import degrees_of
from megatron_rl.simulator.engine_memory import GpuNeeds, engine_memory, gib, gpu_needs, shortfalls
from megatron_rl.simulator.forecast import Job, ReadShape, critic_memory, memory_of, with_critic, with_teacher
from megatron_rl.simulator.memory import full_recompute
from megatron_rl.validate import validate_config
from megatron_rl.validate.critic import critic_config

Change = Mapping[str, object]
RECOMPUTE: Change = {
    "megatron.transformer.recompute_granularity": "full",
    "megatron.transformer.recompute_method": "uniform",
    "megatron.transformer.recompute_num_layers": 1,
}
BFLOAT16: Change = {"model.dtype": "bfloat16"}
FACTORS = (2, 4, 8, 16)


def changed(config: Config, change: Change) -> Config:
    """Return the configuration with other values under dotted keys; raise ConfigError where they cannot work."""
    for key, value in change.items():
        section, name, *rest = key.split(".")
        part = vars(config)[section]
        new = {**vars(part)[name], rest[0]: value} if rest else value
        config = dataclasses.replace(config, **{section: dataclasses.replace(part, **{name: new})})
    validate_config(config)
    return config


def needs_of(job: Job, gpu_bytes: float) -> GpuNeeds:
    """Return the bytes that a job needs on a GPU, by the dense run's plan. Raises ConfigError if it has none."""
    plan = job.plan(job.rules(), job.workload.signal(job.config), drops=False)
    engine = engine_memory(job.config, job.shape, job.degrees, gpu_bytes)
    separate = critic_memory(job.critic) if job.critic and job.config.critic.placement == "separate" else ()
    return gpu_needs(memory_of(job, plan), engine, separate)


def remedies(job: Job, read_shape: ReadShape, gpu_bytes: float, gpus_per_node: int) -> list[str]:
    """Return the changes under which the job fits, each with its largest need, the fewest settings first.

    read_shape: gives a configuration's shape of the model (simulator/command.py).

    One setting of each kind is tried by itself, and if none is enough together with full recompute, with bfloat16, and
    with both; the mildest value of each kind that fits is returned.
    """
    families = list(_families(job.config, int(job.padded(job.rules()).whole.max(initial=1)), gpus_per_node))
    bases: list[Change] = [{}]
    if not full_recompute(job.config):
        bases.append(RECOMPUTE)
    if job.config.model.dtype == "float32":
        bases += [{**base, **BFLOAT16} for base in bases]
    for base in bases:
        found = [_mildest([{**base, **change} for change in family], job, read_shape, gpu_bytes) for family in families]
        if any(found):
            return [each for each in found if each]
    return []


def _families(config: Config, longest: int, gpus_per_node: int) -> Iterator[Sequence[Change]]:
    """Yield the changes of each kind, the mildest first."""
    parallel, rollout, cap = config.parallel, config.rollout, config.plan.max_tokens_per_microbatch
    yield [] if full_recompute(config) else [RECOMPUTE]
    yield [{"plan.max_tokens_per_microbatch": cap // n} for n in FACTORS if cap // n >= longest]
    yield [
        {"parallel.tensor": parallel.tensor * n, "parallel.sequence_parallel": True}
        for n in FACTORS
        if parallel.tensor * n <= gpus_per_node
    ]
    freed = {"parallel.pipeline_layout": ()} if parallel.pipeline_layout else {}
    yield [{"parallel.pipeline": parallel.pipeline * n, **freed} for n in FACTORS]
    yield [{"parallel.context": parallel.context * n} for n in FACTORS]
    if config.has_critic:
        tensor = critic_config(config).parallel.tensor
        yield [
            {"critic.parallel.tensor": tensor * n, "critic.parallel.sequence_parallel": True}
            for n in FACTORS
            if tensor * n <= gpus_per_node
        ]
    yield [] if config.optimizer.distributed else [{"optimizer.distributed": True}]
    yield [{"reference.placement": "host"}] if config.reference.placement == "device" else []
    yield [BFLOAT16] if config.model.dtype == "float32" else []
    if rollout.engine == "vllm" and not rollout.servers:
        yield [{"rollout.sleep": "auto"}] if rollout.sleep == "never" else []
        yield [{"rollout.gpu_memory_utilization": share / 20} for share in _shares(rollout.gpu_memory_utilization)]
        yield [{"rollout.tensor_parallel": n * rollout.tensor_parallel} for n in (2, 4, 8)]
    elif rollout.engine == "transformers":
        yield [{"rollout.max_batch_samples": rollout.max_batch_samples // n} for n in FACTORS]


def _shares(current: float) -> list[int]:
    """Return twentieths of a GPU, those nearest to the current share first."""
    return sorted(range(2, 19), key=lambda twentieths: abs(twentieths / 20 - current))


def _mildest(family: Sequence[Change], job: Job, read_shape: ReadShape, gpu_bytes: float) -> str | None:
    """Return the first change of a family under which the job fits, in words; None if none of them can."""
    for change in family:
        try:
            config = changed(job.config, change)
            degrees = degrees_of(config, job.degrees.world_size)
            other = dataclasses.replace(
                job,
                config=config,
                degrees=degrees,
                shape=read_shape(config, degrees),
                costs=dataclasses.replace(job.costs, from_run=False),
            )
            needs = needs_of(with_teacher(with_critic(other, read_shape), read_shape), gpu_bytes)
        except ConfigError:  # a degree that does not divide, a cap below a sample: no way out
            continue
        if not shortfalls(needs, config, gpu_bytes):
            settings = " ".join(f"{key}={str(value).lower()}" for key, value in change.items())
            return f"{settings} ({gib(needs.most)} GiB)"
    return None
