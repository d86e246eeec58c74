"""The class of the whole configuration: a frozen dataclass whose fields are frozen sections.

Each section checks its own values and their relations. megatron_rl/validate/ checks relations
between sections. Every error is a ConfigError that names the key, the value and the way out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_rl.config.checks import check_ranges
from megatron_rl.config.correction import CorrectionConfig
from megatron_rl.config.critic import CriticConfig
from megatron_rl.config.data import DataConfig, ReplayConfig, RerollConfig
from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.config.evaluation import EvalConfig
from megatron_rl.config.lora import LoraConfig
from megatron_rl.config.model import MegatronConfig, ModelConfig, ParallelConfig
from megatron_rl.config.objective import AdvantageConfig, LossConfig, SkipConfig
from megatron_rl.config.optimizer import OptimizerConfig, PlanConfig
from megatron_rl.config.preference import PreferenceConfig
from megatron_rl.config.reference import ReferenceConfig, TeacherConfig
from megatron_rl.config.reward import RewardConfig
from megatron_rl.config.rollout import RolloutConfig, WeightSyncConfig
from megatron_rl.config.run import CheckpointConfig, MetricsConfig, ProfileConfig, RunConfig
from megatron_rl.config.serve import ServeConfig
from megatron_rl.config.train import SftConfig, TrainConfig


@dataclass(frozen=True, kw_only=True)
class Config:
    """Holds every section of the configuration; the class of each field describes the section's keys."""

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
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def has_critic(self) -> bool:
        return self.advantage.estimator == "gae"

    @property
    def trained_critic(self) -> CriticConfig | None:
        """Return the section ``critic``; None in a run without a critic."""
        return self.critic if self.has_critic else None

    @property
    def separate_critic_ranks(self) -> int:
        """Return the number of ranks that hold only the critic; 0 if no critic has ranks of its own."""
        return (self.critic.ranks or 0) if self.has_critic else 0

    @property
    def has_teacher(self) -> bool:
        return self.advantage.estimator == "distillation"

    @property
    def kl_in_loss(self) -> bool:
        return self.loss.kl_coefficient != 0 and self.reference.kl_in == "loss"

    @property
    def kl_in_reward(self) -> bool:
        return self.loss.kl_coefficient != 0 and self.reference.kl_in == "reward"

    @property
    def logprobs_make_advantages(self) -> bool:
        """Return whether advantages are made from log-probs; no sample is then dropped before the log-prob passes."""
        return self.kl_in_reward or self.has_teacher

    @property
    def trains_reward_model(self) -> bool:
        """Return whether the run trains a reward model, with a value head in place of the LM head, and no policy."""
        return self.preference.loss == "bradley_terry"

    @property
    def generates(self) -> bool:
        """Return whether the run ever generates completions: for RL, or for an evaluation with rewards."""
        return self.train.num_rollouts != 0 or bool(self.eval.named_sets and self.reward.functions)

    @property
    def plays_episodes(self) -> bool:
        """Return whether samples are episodes of several turns, with an environment or by an agent."""
        return self.environment.name is not None or self.rollout.endpoint.agent is not None

    @property
    def saves_checkpoints(self) -> bool:
        """Return whether the run saves checkpoints; if so, a signal such as SIGTERM makes it save one and end."""
        return self.checkpoint.save_every_rollouts > 0 or (self.sft.is_on and self.sft.save_every_steps > 0)
