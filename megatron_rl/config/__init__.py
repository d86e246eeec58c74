"""The configuration of a run: defaults, then a YAML file, then key=value overrides; checked at the start and frozen.

Every error is a ConfigError that names the key, the value and the way out. The string below each
field of a section gives the field's meaning, in Markdown. `make docs` writes docs/configuration.md
from these strings and from the sections' docstrings.
"""

from megatron_rl.config.correction import CORRECTIONS, CorrectionConfig
from megatron_rl.config.critic import CriticConfig
from megatron_rl.config.data import DataConfig, ReplayConfig, RerollConfig
from megatron_rl.config.environment import EndpointConfig, EnvironmentConfig
from megatron_rl.config.evaluation import EvalConfig
from megatron_rl.config.file import config_to_dict, config_to_yaml, load_config
from megatron_rl.config.lora import LoraConfig
from megatron_rl.config.model import MegatronConfig, ModelConfig, ParallelConfig
from megatron_rl.config.objective import (
    ESTIMATORS,
    GROUP_ESTIMATORS,
    POLICIES,
    REDUCTIONS,
    AdvantageConfig,
    LossConfig,
    SkipConfig,
)
from megatron_rl.config.optimizer import OptimizerConfig, PlanConfig
from megatron_rl.config.preference import PAIR_LOSSES, PreferenceConfig
from megatron_rl.config.reference import ReferenceConfig, TeacherConfig
from megatron_rl.config.reward import RewardConfig
from megatron_rl.config.rollout import DynamicSamplingConfig, ProducerConfig, RolloutConfig, WeightSyncConfig
from megatron_rl.config.run import CheckpointConfig, MetricsConfig, ProfileConfig, RunConfig
from megatron_rl.config.sections import Config
from megatron_rl.config.serve import ServeConfig
from megatron_rl.config.train import SftConfig, TrainConfig

__all__ = [
    "CORRECTIONS",
    "ESTIMATORS",
    "GROUP_ESTIMATORS",
    "PAIR_LOSSES",
    "POLICIES",
    "REDUCTIONS",
    "AdvantageConfig",
    "CheckpointConfig",
    "Config",
    "CorrectionConfig",
    "CriticConfig",
    "DataConfig",
    "DynamicSamplingConfig",
    "EndpointConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "LoraConfig",
    "LossConfig",
    "MegatronConfig",
    "MetricsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PlanConfig",
    "PreferenceConfig",
    "ProducerConfig",
    "ProfileConfig",
    "ReferenceConfig",
    "ReplayConfig",
    "RerollConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "ServeConfig",
    "SkipConfig",
    "TeacherConfig",
    "TrainConfig",
    "SftConfig",
    "WeightSyncConfig",
    "config_to_dict",
    "config_to_yaml",
    "load_config",
]
