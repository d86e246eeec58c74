"""The bytes that the engine which generates samples takes on each GPU, beside the trainer or in turns with it.

vLLM takes ``rollout.gpu_memory_utilization`` of the GPU, whatever it needs. Unless
``rollout.sleep=never``, vLLM and the trainer take turns: vLLM frees its memory while the trainer
trains, and gradients and optimizer state leave the GPU while vLLM generates. The embedded engine
always keeps a whole copy of the weights, and its KV cache while it generates. Servers that already
run (``rollout.servers``) take nothing on these GPUs. Every GPU is counted as if it had an engine.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron_rl.config import RolloutConfig
from megatron_rl.simulator.degrees import Degrees
from megatron_rl.simulator.forecast import Job
from megatron_rl.simulator.memory import StageMemory, stage_parameters
from megatron_rl.weights.model_shape import ModelShape

GIB = 2**30
ONE_GPU = Degrees(
    world_size=1,
    tensor_size=1,
    pipeline_size=1,
    virtual_size=1,
    context_size=1,
    data_size=1,
    expert_size=1,
    expert_tensor_size=1,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Holds the bytes that an engine takes on one GPU.

    while_training: the bytes that it takes while the trainer trains.
    while_generating: the bytes that it takes while it generates.
    needed: the fewest bytes with which it works: its weights, and for one sample of the largest
        length the KV cache and the states of gated delta nets.
    takes_turns: whether trainer and engine take turns on the GPU.
    """

    while_training: int
    while_generating: int
    needed: int
    takes_turns: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNeeds:
    """Holds the most bytes that any GPU needs, and the pipeline stage whose GPUs need them.

    training: (most bytes, number of the stage) while the trainer trains.
    generating: (most bytes, number of the stage) while the engine generates.
    engine: the engine's bytes, which are included in both.
    critic: (most bytes, number of its stage) of a critic on separate ranks; None without one.
    """

    training: tuple[int, int]
    generating: tuple[int, int]
    engine: EngineMemory
    critic: tuple[int, int] | None = None

    @property
    def most(self) -> int:
        return max(self.training[0], self.generating[0], self.critic[0] if self.critic else 0)


def engine_memory(job: Job, gpu_bytes: float) -> EngineMemory:
    """Return the bytes that the engine takes on a GPU of ``gpu_bytes``; zeros if the GPU has no engine."""
    config, shape, size = job.config, job.shape, job.placed.element_bytes
    rollout = config.rollout
    if rollout.servers or not config.generates:
        return EngineMemory(while_training=0, while_generating=0, needed=0, takes_turns=False)
    plain = dataclasses.replace(shape, lora_rank=0, lora_targets=())  # adapters are sent merged into the weights
    weights = sum(stage_parameters(plain, ONE_GPU, 0)) * size
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    cached, states = cached_elements(shape, longest)
    sample = (cached + states) * size
    if rollout.engine == "vllm":
        width = rollout.tensor_parallel
        share, turns = int(rollout.gpu_memory_utilization * gpu_bytes), rollout.sleep != "never"
        shards = 1 if shape.kv_lora_rank else min(width, shape.num_kv_heads)  # latents are whole on every rank
        needed = weights // width + (cached // shards + states // width) * size
        return EngineMemory(
            while_training=0 if turns else share, while_generating=share, needed=needed, takes_turns=turns
        )
    samples = -(-config.train.prompts_per_rollout * rollout.samples_per_prompt // job.degrees.world_size)
    rows = min(rollout.max_batch_samples, samples)
    return EngineMemory(
        while_training=weights,
        while_generating=weights + rows * sample,
        needed=weights + sample,
        takes_turns=False,
    )


def cached_elements(shape: ModelShape, tokens: int) -> tuple[int, int]:
    """Return the elements that an engine keeps for one sample, as (KV cache, states of gated delta nets).

    A layer with attention keeps keys and values of each token, or of the tokens in its window. A
    gated delta net keeps a state, whatever the sample's length.

    tokens: the sample's number of tokens.
    """
    windows = shape.windows or (0,) * shape.num_layers
    cached = sum(min(tokens, window or tokens) for i, window in enumerate(windows) if not shape.has_delta_net(i))
    states = len(shape.delta.layers) * shape.delta.state_elements if shape.delta else 0
    return shape.cached_elements * cached, states


def gib(size: float) -> str:
    """Return a number of bytes as text in GiB, without the unit: ``48.3``, ``0.0031``."""
    return f"{size / GIB:.1f}" if size >= GIB else f"{size / GIB:.2g}"


def gpu_needs(memory: tuple[StageMemory, ...], engine: EngineMemory, critic: tuple[StageMemory, ...] = ()) -> GpuNeeds:
    """Return the most bytes that a GPU of any pipeline stage needs, the engine's included.

    memory: the memory of each of the policy's stages.
    critic: the memory of each stage of a critic on separate ranks; () without one.
    """
    training = max((stage.total + engine.while_training, stage.stage) for stage in memory)
    generating = max(
        (stage.kept_while_generating(engine.takes_turns) + engine.while_generating, stage.stage) for stage in memory
    )
    of_critic = max(((stage.total, stage.stage) for stage in critic), default=None)
    return GpuNeeds(training=training, generating=generating, engine=engine, critic=of_critic)


def shortfalls(needs: GpuNeeds, rollout: RolloutConfig, gpu_bytes: float) -> list[str]:
    """Return a sentence for each number of ``needs`` that exceeds a GPU's ``gpu_bytes``; [] if the job fits."""
    sentences, whole = [], f"{gpu_bytes / GIB:g} GiB"
    engine = f"the {rollout.engine} engine"
    for time, (most, stage), part in (
        ("training", needs.training, needs.engine.while_training),
        ("generating", needs.generating, needs.engine.while_generating),
    ):
        if most > gpu_bytes:
            share = f", {gib(part)} of them for {engine}" if part else ""
            sentences.append(f"{time} needs {gib(most)} GiB of {whole} on a GPU of stage {stage}{share}")
    if needs.critic and needs.critic[0] > gpu_bytes:
        most, stage = needs.critic
        sentences.append(f"training the critic needs {gib(most)} GiB of {whole} on a GPU of its stage {stage}")
    if rollout.engine == "vllm" and needs.engine.needed > needs.engine.while_generating:
        sentences.append(
            f"{engine} needs {gib(needs.engine.needed)} GiB for its weights and one longest sample, and "
            f"rollout.gpu_memory_utilization={rollout.gpu_memory_utilization:g} of {whole} is "
            f"{gib(needs.engine.while_generating)} GiB"
        )
    return sentences
