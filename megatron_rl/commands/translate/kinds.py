"""The detection of the framework and trainer that a file of settings is for.

Both are known from the program that a command line starts. If that program is not known, they follow
from names of settings that only one framework or trainer has.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from megatron_rl.errors import ConfigError

OF_TRL = (
    *("sft", "dpo", "grpo", "kto", "reward", "rloo", "ppo", "cpo", "orpo", "bco", "gkd", "prm"),
    *("online_dpo", "nash_md", "xpo", "async_grpo", "distillation"),
)


@dataclass(frozen=True, slots=True)
class Kind:
    """Names a framework and one of its trainers; ``trainer`` is "" if it is not known.

    assumed: True if ``trainer`` is a guess, as another trainer also has all the settings in the
        file.
    """

    framework: str
    trainer: str = ""
    assumed: bool = False

    def __str__(self) -> str:
        return f"{self.framework}'s {self.trainer.upper()}" if self.trainer else self.framework


_PROGRAMS = (  # pattern of a command line → its framework; the group is its trainer, else the third word
    (r"verl\.trainer\.main_ppo|\bmain_ppo\.py|\brecipe[./]dapo|main_dapo", "verl", "rl"),
    (r"verl\.trainer\.(?:\w+_)?(sft)_trainer|\w*_?(sft)_trainer\w*\.py", "verl", ""),
    (r"verl\.trainer\.main_(generation|eval)|\brecipe[./](\w+)[./]\S*main\w*", "verl", ""),
    (r"(?:^|/| )trl (\w+)(?: |$)|trl[./]scripts[./](\w+)(?:\.py| |$)|examples/scripts/(?:ppo/)?(\w+)\.py", "TRL", ""),
    (r"open_r1[./](grpo|sft)(?:\.py| |$)", "TRL", ""),
    (r"openrlhf\.cli\.train_(\w+)", "OpenRLHF", ""),
    (r"axolotl (?:train|preprocess)|axolotl\.cli\.train", "axolotl", ""),
    (r"examples/run_(grpo|dpo|sft|rm|ppo|distillation|vlm_grpo)\w*\.py", "NeMo-RL", ""),
    (r"train(?:_async)?\.py .*--(?:hf-checkpoint|rollout-batch-size|ref-load|rollout-num-gpus)\b", "slime", ""),
    (r"llamafactory-cli train", "LLaMA-Factory", ""),
    (r"swift (?:rlhf|sft|pt)\b", "ms-swift", ""),
    (r"skyrl_train\.entrypoints|skyrl\.train", "SkyRL", ""),
    (r"pretrain_\w+\.py|train_rl\.py", "Megatron-LM", ""),
)
_SCRIPTS_OF_TRL = {"reward_modeling": "reward", "gspo": "grpo"}
_NEMO = r"policy\.(?:model_name|\w+_cfg\..+|max_total_sequence_length|train_global_batch_size)"
_NAMES = (  # names of settings that only one framework has
    (_NEMO, "NeMo-RL", ""),
    (r"pass_rate_min|output_dataset_name", "open-r1's filter of data", ""),
    (r"actor_rollout_ref\..+|algorithm\.adv_estimator|data\.(?:train_batch_size|max_response_length)", "verl", "rl"),
    (r"model\.partial_pretrain|data\.response_key|data\.multiturn\..+", "verl", "sft"),
    (r"base_model|micro_batch_size|sample_packing|sequence_len", "axolotl", ""),
    (r"finetuning_type|stage|cutoff_len", "LLaMA-Factory", ""),
    (r"trainer\.policy\..+|generator\..+", "SkyRL", ""),
    (r"gconfig\..+|allocation_mode", "AReaL", ""),
    (r"actor_train\..+|actor_infer\..+", "ROLL", ""),
    (r".*_component_", "torchtune", ""),
    (r"model\.hf_path|rollout\.samples_per_prompt|train\.prompts_per_rollout", "megatron_rl", ""),
    (r"model_name_or_path|per_device_train_batch_size|num_train_epochs|num_generations", "TRL", ""),
)
OF_ONE_TRAINER = {  # names that only one of TRL's trainers has; gkd, which derives from sft, has sft's too
    "grpo": {
        *(
            "scale_rewards",
            "importance_sampling_level",
            "multi_objective_aggregation",
            "use_bias_correction_kl",
            "delta",
        ),
        *("vllm_importance_sampling_mode", "off_policy_mask_threshold", "top_entropy_quantile", "entropy_coef"),
    },
    "rloo": {"normalize_advantages", "reward_clip_range"},
    "dpo": {"f_divergence_type", "ld_alpha", "use_weighting", "discopop_tau", "loss_weights"},
    "gkd": {"lmbda", "seq_kd", "teacher_model_name_or_path"},
    "online_dpo": {"missing_eos_penalty", "reward_model_path"},
    "sft": {"packing", "packing_strategy", "assistant_only_loss", "dataset_text_field"},
    "kto": {"desirable_weight", "undesirable_weight"},
    "reward": {"center_rewards_coefficient"},
    "cpo": {"cpo_alpha", "simpo_gamma"},
}
# Names that GRPO shares with RLOO. A file with these, and with no name of RLOO's own, is read as GRPO's; the output
# says so.
OF_GRPO_AND_RLOO = {
    *("num_generations", "num_iterations", "epsilon", "epsilon_high", "mask_truncated_completions"),
    *("steps_per_generation", "generation_batch_size", "log_completions"),
}
_OF_NEMO = ("dpo", "distillation", "sft", "rm", "ppo", "grpo")


def kind_of_command(line: str, names: Collection[str]) -> Kind | None:
    """Return the framework and trainer of a command line; None if the command is of no known framework.

    names: the names of the settings in the line, used if the program is not known.
    """
    for pattern, framework, trainer in _PROGRAMS:
        match = re.search(pattern, line)
        if match:
            named = next((each for each in match.groups() if each), trainer)
            return Kind(framework, _SCRIPTS_OF_TRL.get(named, named))
    kind = kind_of_names(names)
    own_main = re.search(r"(?:^|[ ./])(\w*main\w*)(?:\.py)?(?: |$)", line)
    return Kind("verl", own_main[1]) if kind == Kind("verl", "rl") and own_main else kind


def kind_of_names(names: Collection[str]) -> Kind | None:
    """Return the framework and trainer that have settings of these names; None if no known framework has them."""
    if any(re.fullmatch(r"policy\..+", each) for each in names) and any(
        re.match(r"cluster\.|grpo\.", n) for n in names
    ):
        return Kind("NeMo-RL", _nemo_trainer(names))
    for pattern, framework, trainer in _NAMES:
        if any(re.fullmatch(pattern, name) for name in names):
            if framework == "NeMo-RL":
                return Kind(framework, _nemo_trainer(names))
            return _trl_kind(names) if framework == "TRL" else Kind(framework, trainer)
    return None


def _nemo_trainer(names: Collection[str]) -> str:
    return next((each for each in _OF_NEMO if any(name.startswith(f"{each}.") for name in names)), "")


def _trl_kind(names: Collection[str]) -> Kind:
    trainer = next((each for each, own in OF_ONE_TRAINER.items() if own & set(names)), "")
    if not trainer and OF_GRPO_AND_RLOO & set(names):
        return Kind("TRL", "grpo", assumed=True)
    return Kind("TRL", trainer)


def require_kind(kind: Kind | None, framework: str, path: str, trainer: str | None) -> Kind:
    """Return the framework and trainer whose rules translate a file.

    kind: the framework and trainer that the file's content shows; None if it shows none.
    framework: the framework that the user named.
    path: the file's name in messages.
    trainer: the trainer that the user named; None if not given.

    Raises ConfigError if the file is for another framework or trainer, or for none.
    """
    if kind is None:
        raise ConfigError(
            f"{path} holds no setting of {framework}'s: neither a YAML nor overrides a.b=c nor --name value"
        )
    if kind.framework != framework:
        ways = {"TRL": "megatron-rl translate trl", "verl": "megatron-rl translate verl"}
        ways |= {"axolotl": "megatron-rl translate axolotl", "megatron_rl": "megatron-rl train --config"}
        way = ways.get(kind.framework)
        out = f"{way} {path}" if way else "docs/coming-from.md lists settings by name; there is no tool for these"
        raise ConfigError(f"{path} is a file of {kind}, not of {framework}'s; {out}")
    if kind.assumed:
        return Kind(framework, trainer or kind.trainer, assumed=trainer is None)
    if trainer and kind.trainer and trainer != kind.trainer:
        raise ConfigError(f"{path} is a file of {kind}, and --trainer {trainer} says another; leave that out")
    return Kind(framework, kind.trainer or trainer or "")


_ELSE = "docs/coming-from.md lists settings by name"
_INSTEAD = {
    "sft": "Supervised steps are sft.* here (docs/supervised.md)",
    "rm": "A reward model is preference.loss=bradley_terry here (docs/supervised.md)",
    "rloo": "Near it is advantage.estimator=rloo here, whose ratio is a token's (docs/semantics.md)",
    "ppo": "A critic is advantage.estimator=gae here (docs/ppo.md)",
    "gkd": "Distillation is advantage.estimator=distillation here (docs/supervised.md)",
    "distillation": "Distillation is advantage.estimator=distillation here (docs/supervised.md)",
}


def refuse_trainer(kind: Kind, path: str, known: Collection[str]) -> ConfigError:
    """Return the error for a file whose trainer is not translated, or is not named.

    kind: the file's framework and trainer.
    path: the file's name in the message.
    known: the framework's trainers that are translated.
    """
    if not kind.trainer:
        return ConfigError(
            f"{path} does not say which of {kind.framework}'s trainers it is for; say so by --trainer, as in "
            f"--trainer {next(iter(known))} (translated are {', '.join(known)})"
        )
    return ConfigError(
        f"{path} is for {kind}, which is not translated; of {kind.framework}'s, {', '.join(known)} are. "
        f"{_INSTEAD.get(kind.trainer, _ELSE)}"
    )
