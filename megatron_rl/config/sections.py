"""One frozen dataclass per stage, composed; each checks its own values, and ``ParallelConfig`` those that only make
sense together.

Every error is a ConfigError that names the key, the value and the way out. Nothing changes a config after it was built.
"""

from __future__ import annotations

import pathlib
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.checks import at_least, choose
from megatron_rl.config.correction import CorrectionConfig
from megatron_rl.config.critic import CriticConfig
from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.config.evaluation import EvalConfig
from megatron_rl.config.lora import LoraConfig
from megatron_rl.config.objective import AdvantageConfig, LossConfig, SkipConfig
from megatron_rl.config.reference import ReferenceConfig
from megatron_rl.config.replay import ReplayConfig, RerollConfig
from megatron_rl.config.rollout import RolloutConfig, WeightSyncConfig
from megatron_rl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """``dir`` holds metrics.jsonl, config.yaml, report.html and checkpoints/; default runs/<name>."""

    name: str = "run"
    dir: str | None = None
    seed: int = 0
    deadline_s: float = 1800.0  # every collective's and every engine's wait

    def __post_init__(self) -> None:
        at_least("run.deadline_s", self.deadline_s, 1.0)

    @property
    def path(self) -> pathlib.Path:
        return pathlib.Path(self.dir) if self.dir else pathlib.Path("runs") / self.name


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """``hf_path``: a Hugging Face directory. ``init``: its weights, or random ones of its config."""

    hf_path: str = ""
    tokenizer_path: str | None = None
    dtype: str = "float32"
    init: str = "pretrained"
    layer_spec: str = "auto"

    def __post_init__(self) -> None:
        choose("model.dtype", self.dtype, ("float32", "bfloat16"))
        choose("model.init", self.init, ("pretrained", "random"))
        choose("model.layer_spec", self.layer_spec, ("auto", "transformer_engine", "torch"))


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Degrees of parallelism; data parallel is what is left of the world size. ``virtual_pipeline``: model chunks per
    stage.

    ``context`` splits each sequence. ``expert`` splits a mixture's experts over ranks that are tensor, context or data
    parallel elsewhere; ``expert_tensor`` splits each expert (null: as ``tensor``).
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        at_least("parallel.tensor", self.tensor, 1)
        at_least("parallel.pipeline", self.pipeline, 1)
        at_least("parallel.virtual_pipeline", self.virtual_pipeline, 1)
        at_least("parallel.context", self.context, 1)
        at_least("parallel.expert", self.expert, 1)
        at_least("parallel.expert_tensor", self.expert_tensor, 1)
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ConfigError(
                f"parallel.virtual_pipeline={self.virtual_pipeline} interleaves pipeline stages and parallel.pipeline "
                "is 1; raise that one"
            )
        if self.sequence_parallel and self.tensor == 1:
            raise ConfigError(
                "parallel.sequence_parallel=true needs parallel.tensor >= 2 and it is 1; raise it or turn it off"
            )


@dataclass(frozen=True, kw_only=True)
class MegatronConfig:
    """Any field of Megatron-Core's TransformerConfig, DistributedDataParallelConfig and OptimizerConfig, passed
    through."""

    transformer: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """``train``: a JSONL path. ``prompt_key`` and ``answer_key`` name its columns; ``solution_key`` is what a warm-up
    imitates.

    ``template``: "{prompt}" is replaced by the column's text; "chat" uses the tokenizer's chat template, and takes
        columns of messages.
    """

    train: str = ""
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    solution_key: str = "solution"
    template: str = "{prompt}"
    max_prompt_tokens: int = 512
    on_long_prompt: str = "fail"
    shuffle: bool = True

    def __post_init__(self) -> None:
        choose("data.on_long_prompt", self.on_long_prompt, ("fail", "drop"))
        at_least("data.max_prompt_tokens", self.max_prompt_tokens, 1)
        if self.template != "chat" and "{prompt}" not in self.template:
            raise ConfigError(f"data.template={self.template!r} has no {{prompt}} in it; add it, or use 'chat'")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """``functions``: names (``arithmetic``, ``math_verify``, ``environment``) or ``module:function``; ``weights`` one
    each, default 1.

    ``num_workers``: processes per rank that call them; 0: the rank's own. ``deadline_s``: of a sample in a worker.
    ``in_process``: of the functions, those that the rank's own process calls all the same (one that holds a model,
    say). ``overlong_buffer_tokens``: tokens before ``rollout.max_response_tokens`` over which the total reward falls by
    ``overlong_penalty`` (reward/overlong.py); 0: it does not.
    """

    functions: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    on_error: str = "fail"
    num_workers: int = 0
    deadline_s: float = 30.0
    in_process: tuple[str, ...] = ()
    overlong_buffer_tokens: int = 0
    overlong_penalty: float = 1.0

    def __post_init__(self) -> None:
        choose("reward.on_error", self.on_error, ("fail", "drop", "zero"))
        if self.weights and len(self.weights) != len(self.functions):
            raise ConfigError(
                f"reward.weights has {len(self.weights)} numbers and reward.functions {len(self.functions)} names; "
                "give one weight each"
            )
        at_least("reward.num_workers", self.num_workers, 0)
        at_least("reward.deadline_s", self.deadline_s, 0.0, exclusive=True)
        at_least("reward.overlong_buffer_tokens", self.overlong_buffer_tokens, 0)
        at_least("reward.overlong_penalty", self.overlong_penalty, 0.0)
        for name in self.in_process:
            choose("reward.in_process", name, self.functions)
        if self.functions and self.num_workers and set(self.in_process) == set(self.functions):
            raise ConfigError(
                "reward.in_process names every one of reward.functions, which leaves nothing for "
                f"reward.num_workers={self.num_workers}; set that to 0, or leave a function to the workers"
            )

    @property
    def resolved_weights(self) -> tuple[float, ...]:
        return self.weights or (1.0,) * len(self.functions)


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """How survivors are cut into micro-batches. ``samples_per_microbatch`` (static) replaces the token cap.

    ``on_long_sample``: a sample above the cap gets a micro-batch of its own, or is an error (``fail``).
    ``calibrate``: plans by what micro-batches were measured to take; without it by the prior, so that a run repeats to
    the bit. ``repack: false`` cuts before the drop and removes whole micro-batches only: bitwise the dense run's
    gradient.
    """

    max_tokens_per_microbatch: int = 8192
    samples_per_microbatch: int | None = None
    repack: bool = True
    microbatch_overhead_tokens: int = 256
    on_long_sample: str = "own_microbatch"
    calibrate: bool = False

    def __post_init__(self) -> None:
        at_least("plan.max_tokens_per_microbatch", self.max_tokens_per_microbatch, 1)
        at_least("plan.samples_per_microbatch", self.samples_per_microbatch, 1)
        at_least("plan.microbatch_overhead_tokens", self.microbatch_overhead_tokens, 0)
        choose("plan.on_long_sample", self.on_long_sample, ("own_microbatch", "fail"))


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule: linear warm-up over ``warmup_steps``, then constant, or cosine or linear down to
    ``min_lr``."""

    lr: float = 1e-6
    min_lr: float = 0.0
    schedule: str = "constant"
    warmup_steps: int = 0
    decay_steps: int | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    kernel: str = "auto"
    distributed: bool = True
    on_nonfinite: str = "fail"

    def __post_init__(self) -> None:
        choose("optimizer.schedule", self.schedule, ("constant", "cosine", "linear"))
        choose("optimizer.kernel", self.kernel, ("auto", "transformer_engine", "apex", "torch"))
        choose("optimizer.on_nonfinite", self.on_nonfinite, ("fail", "skip"))
        at_least("optimizer.lr", self.lr, 0.0)
        at_least("optimizer.clip_grad", self.clip_grad, 0.0)


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """Supervised steps before RL, on ``data.solution_key``; its own learning rate. 0 steps: none."""

    steps: int = 0
    samples_per_step: int = 64
    lr: float = 1e-3
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        at_least("sft.steps", self.steps, 0)
        at_least("sft.samples_per_step", self.samples_per_step, 1)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """``num_rollouts`` rollouts of ``prompts_per_rollout`` prompts; each is trained in mini-batches of
    ``samples_per_mini_batch``. ``epochs`` with ``num_rollouts: null``: as many rollouts as it takes to train every
    prompt so often."""

    num_rollouts: int | None = 100
    epochs: int | None = None
    prompts_per_rollout: int = 64
    samples_per_mini_batch: int | None = None
    epochs_per_rollout: int = 1
    export_every_rollouts: int | None = None
    export_last: bool = True

    def __post_init__(self) -> None:
        at_least("train.num_rollouts", self.num_rollouts, 0)
        at_least("train.epochs", self.epochs, 1)
        if (self.num_rollouts is None) == (self.epochs is None):
            raise ConfigError(
                f"train.num_rollouts={self.num_rollouts} and train.epochs={self.epochs}: one of the two says when the "
                "run ends; set the other to null"
            )
        at_least("train.prompts_per_rollout", self.prompts_per_rollout, 1)
        at_least("train.samples_per_mini_batch", self.samples_per_mini_batch, 1)
        at_least("train.epochs_per_rollout", self.epochs_per_rollout, 1)
        at_least("train.export_every_rollouts", self.export_every_rollouts, 1)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Under <run.dir>/checkpoints: every ``save_every_rollouts`` rollouts (0: never), after the last one, and when
    SIGTERM or SIGUSR1 arrives.

    ``keep_last``: so many are kept (null: all). ``asynchronous``: files are written while the run goes on. ``resume``:
    ``auto`` goes on from the newest good one, ``never`` sets those of an earlier run aside. ``on_damage``: a damaged
    one is passed over for the one before it (``previous``) or ends the run (``fail``). ``on_error``: a checkpoint that
    cannot be written ends the run (``fail``) or not (``continue``).
    """

    save_every_rollouts: int = 0
    keep_last: int | None = 2
    asynchronous: bool = True
    resume: str = "auto"
    on_damage: str = "previous"
    on_error: str = "fail"

    def __post_init__(self) -> None:
        at_least("checkpoint.save_every_rollouts", self.save_every_rollouts, 0)
        at_least("checkpoint.keep_last", self.keep_last, 1)
        choose("checkpoint.resume", self.resume, ("auto", "never"))
        choose("checkpoint.on_damage", self.on_damage, ("previous", "fail"))
        choose("checkpoint.on_error", self.on_error, ("fail", "continue"))


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    tensorboard: bool = False
    wandb_project: str | None = None
    progress: bool = True
    dense_every_rollouts: int = 20
    dense_samples: int = 4
    save_plans: bool = False


@dataclass(frozen=True, kw_only=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    reroll: RerollConfig = field(default_factory=RerollConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    skip: SkipConfig = field(default_factory=SkipConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)

    @property
    def has_critic(self) -> bool:
        return self.advantage.estimator == "gae"

    @property
    def kl_in_loss(self) -> bool:
        return self.loss.kl_coefficient != 0 and self.reference.kl_in == "loss"

    @property
    def kl_in_reward(self) -> bool:
        return self.loss.kl_coefficient != 0 and self.reference.kl_in == "reward"
