"""The search for settings under which a job that is too large would fit on its GPUs.

First one setting at a time is changed, such as the token limit of a micro-batch. If none is enough,
several degrees of parallelism are changed together, on the same number of GPUs. If the engine is
short of memory too, the engine's share of the GPU or its tensor parallelism is also changed. The
memory forecast of a job decides whether a change fits.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from megatron_rl.config.model import ParallelConfig
from megatron_rl.errors import ConfigError
from megatron_rl.simulator.degrees import degrees_of
from megatron_rl.simulator.engine_memory import GpuNeeds, engine_memory, gib, gpu_needs, shortfalls
from megatron_rl.simulator.forecast import Job, ReadShape, critic_memory, memory_of, with_critic, with_teacher
from megatron_rl.simulator.memory import StageMemory, stage_memory
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
DEGREES = (1, *FACTORS)
MOST_LAYOUTS, MOST_PLANNED = 3, 40  # layouts that are named; layouts that are planned in the search
ROUGHLY = 0.8  # factor on the usual largest micro-batch: under other degrees it is hardly smaller


def needs_of(job: Job, gpu_bytes: float) -> GpuNeeds:
    """Return the bytes that a job needs on a GPU of ``gpu_bytes`` if no sample is dropped.

    Raises ConfigError if the job's micro-batches cannot be planned.
    """
    return _beside_engine(job, _trainer_memory(job), gpu_bytes)


Stages = tuple[StageMemory, ...]


def _trainer_memory(job: Job) -> tuple[Stages, Stages]:
    """Return (memory of each pipeline stage of the policy, the same of a critic on separate ranks).

    The second element is () if no critic has separate ranks. The memory is that of an update which
    drops no sample.
    """
    plan = job.plan(job.rules(), job.signal(), drops=False)
    separate = critic_memory(job.critic) if job.critic and job.config.critic.placement == "separate" else ()
    return memory_of(job, plan), separate


def _beside_engine(job: Job, memory: tuple[Stages, Stages], gpu_bytes: float) -> GpuNeeds:
    policy, separate = memory
    return gpu_needs(policy, engine_memory(job, gpu_bytes), separate)


def _needs_at(job: Job, gpu_bytes: float, *, tokens: int, microbatches: int) -> GpuNeeds:
    """Return the bytes that a job needs for a given size of its largest micro-batch, without bytes for logits.

    tokens: the tokens of the largest micro-batch; with 0, activations count as 0 bytes.
    microbatches: the most micro-batches of a data-parallel rank.
    """
    size = {"tokens": tokens, "loss_tokens": 0, "microbatches": microbatches}
    stages = range(job.degrees.pipeline_size)
    memory = tuple(stage_memory(job.placed, stage, **size) for stage in stages)
    return _beside_engine(job, (memory, ()), gpu_bytes)


def remedies(job: Job, read_shape: ReadShape, gpu_bytes: float, gpus_per_node: int) -> list[str]:
    """Return changes of settings under which the job fits, as text, each with the bytes that it would need.

    read_shape: a function that returns the shape of a configuration's model (simulator/command.py).
    gpu_bytes: the memory of a GPU.
    gpus_per_node: the most ranks of tensor parallelism, which stays within a node.

    First one setting at a time is changed, and the smallest change of each setting that fits is
    returned. If no change fits, each is tried again with full recompute added, then bfloat16, then
    both. If still none fits, changes of several degrees of parallelism are returned.
    """
    families = list(_families(job, int(job.padded(job.rules()).whole.max(initial=1)), gpus_per_node))
    bases: list[Change] = [{}]
    if not job.placed.full_recompute:
        bases.append(RECOMPUTE)
    if job.config.model.dtype == "float32":
        bases += [{**base, **BFLOAT16} for base in bases]
    for base in bases:
        found = [_mildest([{**base, **change} for change in family], job, read_shape, gpu_bytes) for family in families]
        if any(found):
            return [each for each in found if each]
    return _other_degrees(job, read_shape, gpu_bytes, gpus_per_node)


def _other_degrees(job: Job, read_shape: ReadShape, gpu_bytes: float, gpus_per_node: int) -> list[str]:
    """Return up to 3 changes of the degrees of parallelism under which the job fits, as text.

    The number of GPUs stays. The engine's share of the GPU or its tensor parallelism is changed too
    if needed. Changes of fewer settings come first.
    """
    ways, seen, planned = [], set(), 0
    engines: list[Change] = [{}, *_engine_changes(job, gpus_per_node)]
    usual = _largest_microbatch(job)
    for change in _layouts(job, gpus_per_node):
        other = None if _but_experts(change) in seen else _changed_job(job, change, read_shape)
        if other is None or _falls_short(other, _without_engine(_rough_needs(other, usual, gpu_bytes)), gpu_bytes):
            continue
        planned += 1
        if planned > MOST_PLANNED:
            break
        memory = _trainer_memory(other)
        for beside in engines:
            whole = _changed_job(other, beside, read_shape) if beside else other
            needs = _beside_engine(whole, memory, gpu_bytes) if whole else None
            if needs is not None and not _falls_short(whole, needs, gpu_bytes):
                ways.append(_words({**change, **beside}, needs))
                seen.add(_but_experts(change))
                break
        if len(ways) == MOST_LAYOUTS:
            break
    return ways


def _but_experts(change: Change) -> tuple[tuple[str, object], ...]:
    return tuple((name, value) for name, value in change.items() if name != "parallel.expert")


def _largest_microbatch(job: Job) -> int:
    """Return the number of tokens in the largest micro-batch if no sample is dropped."""
    rules = job.rules()
    padded, plan = job.padded(rules), job.plan(rules, job.signal(), drops=False)
    steps = [step for step in plan.mini_batches if len(step.order)]
    return max((int(padded.sums(x.order, x.microbatch_offsets)[0].max()) for x in steps), default=0)


def _rough_needs(job: Job, usual: int, gpu_bytes: float) -> GpuNeeds:
    """Return roughly the bytes that a job needs on a GPU; no plan is made, since planning takes seconds.

    job: a job under changed degrees of parallelism.
    usual: the tokens of the largest micro-batch under the degrees before the change. For ``job``, 0.8
        times as many are assumed: other degrees hardly make it smaller.
    """
    total = int(job.padded(job.rules()).whole.sum())
    many = max(1, total // max(1, usual * job.degrees.data_size))
    return _needs_at(job, gpu_bytes, tokens=round(ROUGHLY * usual), microbatches=many)


def _without_engine(needs: GpuNeeds) -> GpuNeeds:
    """Return ``needs`` without the engine's bytes, for a search that chooses the engine's share later."""
    none = dataclasses.replace(needs.engine, while_training=0, while_generating=0, needed=0)
    training, stage = needs.training
    return dataclasses.replace(
        needs, engine=none, training=(training - needs.engine.while_training, stage), generating=(0, stage)
    )


def _layouts(job: Job, gpus_per_node: int) -> list[Change]:
    """Return changes of two or more settings, among degrees of parallelism and full recompute.

    Each change is {``section.key``: new value}. They are sorted by the number of changed settings,
    then by the number of ranks of a replica. Tensor parallelism is at most ``gpus_per_node``.
    """
    parallel, experts = job.config.parallel, job.shape.num_experts
    tensors = [n for n in DEGREES if parallel.tensor <= n <= gpus_per_node]
    widths = [n for n in range(parallel.expert, (experts or 1) + 1) if experts and experts % n == 0] or [1]
    recomputes = [False] if job.placed.full_recompute else [False, True]
    pipelines = [parallel.pipeline * n for n in DEGREES]
    contexts = [parallel.context * n for n in DEGREES[:3]]
    ranked = []
    for tensor, pipeline, context, expert, recompute in itertools.product(
        tensors, pipelines, contexts, widths, recomputes
    ):
        change: dict[str, object] = {}
        if tensor != parallel.tensor:
            change |= {"parallel.tensor": tensor, "parallel.sequence_parallel": True}
            if experts and parallel.expert_tensor is None:
                change["parallel.expert_tensor"] = 1
        wanted = {"pipeline": pipeline, "context": context, "expert": expert}
        change |= {f"parallel.{name}": n for name, n in wanted.items() if n != vars(parallel)[name]}
        change |= _freed_layout(parallel) if "parallel.pipeline" in change else {}
        count = len([name for name in change if name.split(".")[1] in ("tensor", *wanted)]) + recompute
        split = tensor * pipeline * context
        if count > 1 and job.degrees.world_size % split == 0:
            ranked.append(((count, split, expert, recompute), change | (RECOMPUTE if recompute else {})))
    return [change for _, change in sorted(ranked, key=lambda each: each[0])]


def _freed_layout(parallel: ParallelConfig) -> Change:
    """Return the change that removes ``parallel.pipeline_layout``; {} if the configuration has none.

    A pipeline layout fits only one number of pipeline stages, so another number needs its removal.
    """
    return {"parallel.pipeline_layout": ()} if parallel.pipeline_layout else {}


def _engine_changes(job: Job, gpus_per_node: int) -> Iterator[Change]:
    """Yield changes of the vLLM engine's share of a GPU, first with its present tensor parallelism, then with more.

    The shares nearest to the present one come first. Tensor parallelism is at most ``gpus_per_node``.
    Yields nothing if the GPUs have no vLLM engine.
    """
    rollout = job.config.rollout
    if rollout.engine != "vllm" or rollout.servers or not job.config.generates:
        return
    shares = [share / 20 for share in _shares(rollout.gpu_memory_utilization)]
    widths = [rollout.tensor_parallel * n for n in DEGREES if rollout.tensor_parallel * n <= gpus_per_node]
    for width, share in itertools.product(widths, shares):
        wider: Change = {} if width == rollout.tensor_parallel else {"rollout.tensor_parallel": width}
        yield {**wider, "rollout.gpu_memory_utilization": share}


def _families(job: Job, longest: int, gpus_per_node: int) -> Iterator[Sequence[Change]]:
    """Yield a list for each setting that may save memory: the changes of this setting, the smallest first.

    Example: if ``parallel.tensor`` is 1, its changes set it to 2, 4, 8 and 16.

    longest: the tokens of the longest sample. A micro-batch's token limit is not set below it.
    gpus_per_node: the most ranks of tensor parallelism.
    """
    config, parallel, rollout = job.config, job.config.parallel, job.config.rollout
    cap = config.plan.max_tokens_per_microbatch
    yield [] if job.placed.full_recompute else [RECOMPUTE]
    yield [{"plan.max_tokens_per_microbatch": cap // n} for n in FACTORS if cap // n >= longest]
    yield [
        {"parallel.tensor": parallel.tensor * n, "parallel.sequence_parallel": True}
        for n in FACTORS
        if parallel.tensor * n <= gpus_per_node
    ]
    yield [{"parallel.pipeline": parallel.pipeline * n, **_freed_layout(parallel)} for n in FACTORS]
    yield [{"parallel.context": parallel.context * n} for n in FACTORS]
    yield [{"parallel.expert": parallel.expert * n} for n in FACTORS]
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
    """Return the integers 2 to 18 (twentieths of a GPU's memory), sorted by distance from the share ``current``."""
    return sorted(range(2, 19), key=lambda twentieths: abs(twentieths / 20 - current))


def _mildest(family: Sequence[Change], job: Job, read_shape: ReadShape, gpu_bytes: float) -> str | None:
    """Return the first change of ``family`` under which the job fits, as text with its bytes; None if there is none.

    family: the changes of one setting, the smallest change first.
    """
    for change in family:
        other = _changed_job(job, change, read_shape)
        if other is None or _falls_short(other, _needs_at(other, gpu_bytes, tokens=0, microbatches=0), gpu_bytes):
            continue  # skip it without a plan, which takes seconds for a large rollout
        try:
            needs = needs_of(other, gpu_bytes)
        except ConfigError:  # a cap below a sample's length: no way out
            continue
        if not _falls_short(other, needs, gpu_bytes):
            return _words(change, needs)
    return None


def _changed_job(job: Job, change: Change, read_shape: ReadShape) -> Job | None:
    """Return the job under changed settings; None if a run would refuse them.

    change: {``section.key`` of a setting: its new value}.
    read_shape: a function that returns the shape of a configuration's model (simulator/command.py).
    """
    config = job.config
    try:
        for key, value in change.items():
            section, name, *rest = key.split(".")
            part = vars(config)[section]
            new = {**vars(part)[name], rest[0]: value} if rest else value
            config = dataclasses.replace(config, **{section: dataclasses.replace(part, **{name: new})})
        validate_config(config)
        degrees = degrees_of(config.parallel, job.degrees.world_size)
        shape, costs = read_shape(config, degrees), dataclasses.replace(job.costs, from_run=False)
        other = dataclasses.replace(job, config=config, degrees=degrees, shape=shape, costs=costs)
        return with_teacher(with_critic(other, read_shape), read_shape)
    except ConfigError:
        return None


def _falls_short(job: Job, needs: GpuNeeds, gpu_bytes: float) -> bool:
    return bool(shortfalls(needs, job.config.rollout, gpu_bytes))


def _words(change: Change, needs: GpuNeeds) -> str:
    settings = " ".join(f"{key}={'[]' if value == () else str(value).lower()}" for key, value in change.items())
    return f"{settings} ({gib(needs.most)} GiB)"
