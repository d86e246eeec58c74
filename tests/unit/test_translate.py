"""`megatron-rl translate`: published configurations of verl and TRL become settings of ours that mean the same."""

from __future__ import annotations

import pathlib
import re

import pytest
import yaml

from megatron_rl.commands import command
from megatron_rl.commands.translate import trl, verl
from megatron_rl.commands.translate.settings import overrides_of, read_settings
from megatron_rl.commands.translate.translation import Translation, as_yaml, flat
from megatron_rl.config import Config, load_config
from megatron_rl.errors import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
# verl's example of GRPO for Qwen2-7B on GSM8K and MATH with Megatron (examples/grpo_trainer, 2025): its settings.
QWEN2_7B = flat(
    yaml.safe_load("""
algorithm: {adv_estimator: grpo, use_kl_in_reward: false}
data:
  train_files: [/data/gsm8k/train.parquet, /data/math/train.parquet]
  val_files: [/data/gsm8k/test.parquet, /data/math/test.parquet]
  train_batch_size: 1024
  max_prompt_length: 1024
  max_response_length: 1024
  filter_overlong_prompts: true
  truncation: error
actor_rollout_ref:
  model: {path: Qwen/Qwen2-7B-Instruct, enable_gradient_checkpointing: true}
  actor:
    optim: {lr: 1.0e-6}
    ppo_mini_batch_size: 256
    ppo_micro_batch_size_per_gpu: 4
    megatron: {pipeline_model_parallel_size: 2, tensor_model_parallel_size: 2}
    use_kl_loss: true
    kl_loss_coef: 0.001
    kl_loss_type: low_var_kl
    entropy_coeff: 0
  rollout:
    {log_prob_micro_batch_size_per_gpu: 4, tensor_model_parallel_size: 2, name: vllm, gpu_memory_utilization: 0.6, n: 5}
  ref: {megatron: {tensor_model_parallel_size: 2}}
trainer:
  {critic_warmup: 0, logger: [console, wandb], project_name: verl_grpo_example_gsm8k_math, nnodes: 1,
   n_gpus_per_node: 8, experiment_name: qwen2_7b_megatron, save_freq: 20, test_freq: 5, total_epochs: 15}
""")
)
# open-r1's demo of GRPO for Qwen2.5-1.5B-Instruct (recipes, 2025): its settings.
OPEN_R1 = flat(
    yaml.safe_load("""
{model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct, model_revision: main, torch_dtype: bfloat16, bf16: true, seed: 42,
 attn_implementation: flash_attention_2, dataset_name: AI-MO/NuminaMath-TIR, num_processes: 7,
 use_vllm: true, vllm_device: auto, vllm_gpu_memory_utilization: 0.7,
 gradient_accumulation_steps: 16, gradient_checkpointing: true, gradient_checkpointing_kwargs: {use_reentrant: false},
 learning_rate: 2.0e-5, lr_scheduler_type: cosine, warmup_ratio: 0.1,
 max_prompt_length: 512, max_completion_length: 1024, max_steps: -1, num_generations: 7, num_train_epochs: 1,
 output_dir: data/Qwen2.5-1.5B-Open-R1-GRPO, per_device_train_batch_size: 16,
 push_to_hub: true, report_to: [wandb], save_total_limit: 1}
""")
)


def loaded(translation: Translation, folder: pathlib.Path) -> Config:
    file = folder / "ours.yaml"
    file.write_text(as_yaml(translation, "theirs", "verl"), encoding="utf-8")
    return load_config(str(file), [])


def test_verls_example_means_the_same(tmp_path: pathlib.Path) -> None:
    found = verl.translate(QWEN2_7B)
    config = loaded(found, tmp_path)
    assert (config.train.prompts_per_rollout, config.train.samples_per_mini_batch) == (1024, 256 * 5)
    assert (config.train.num_rollouts, config.train.epochs, config.train.epochs_per_rollout) == (None, 15, 1)
    assert (config.parallel.tensor, config.parallel.pipeline, config.parallel.sequence_parallel) == (2, 2, True)
    assert (config.loss.policy, config.loss.reduction, config.loss.dual_clip) == ("ppo", "token_mean", 3.0)
    assert (config.loss.kl_coefficient, config.loss.kl_estimator, config.reference.kl_in) == (0.001, "k3", "loss")
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (1e-6, 0.01)  # the latter is verl's default
    assert config.rollout.samples_per_prompt == 5 and config.advantage.estimator == "grpo"
    assert dict(config.eval.sets) == {"gsm8k": "/data/gsm8k/test.parquet", "math": "/data/math/test.parquet"}
    assert (config.eval.every_rollouts, config.checkpoint.save_every_rollouts) == (5, 20)
    assert config.metrics.wandb_project == "verl_grpo_example_gsm8k_math"
    assert set(found.left) == {"reward function"}


def test_verls_mixture_keeps_its_grid(tmp_path: pathlib.Path) -> None:
    """The example's Moonlight: TP 4, PP 3, EP 4, expert TP 1, and a checkpoint of Megatron's, which is not read."""
    megatron = f"{ACTOR}.megatron"
    sizes = {"pipeline_model": 3, "tensor_model": 4, "expert_model": 4, "expert_tensor": 1}
    grid = {f"{megatron}.{name}_parallel_size": size for name, size in sizes.items()} | {
        f"{megatron}.use_dist_checkpointing": True,
        f"{megatron}.dist_checkpointing_path": "/checkpoints/moonlight",
        "data.trust_remote_code": True,
    }
    found = verl.translate(QWEN2_7B | grid)
    parallel = loaded(found, tmp_path).parallel
    assert (parallel.tensor, parallel.pipeline, parallel.expert, parallel.expert_tensor) == (4, 3, 4, 1)
    assert set(found.left) == {"reward function", f"{megatron}.dist_checkpointing_path", "data.trust_remote_code"}


def named(text: str) -> dict:
    """Return the settings of a text such as ``a.b=1 c=null``."""
    return {name: yaml.safe_load(value) for name, value in (part.split("=") for part in text.split())}


def test_a_setting_of_verls(tmp_path: pathlib.Path) -> None:
    adaptive = "algorithm.use_kl_in_reward=true algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.kl_coef=0.02"
    of_reward = "reference.kl_in=reward reference.controller=adaptive reference.kl_horizon=10000"
    for settings, ours in (
        ("algorithm.norm_adv_by_std_in_grpo=false", "advantage.estimator=dr_grpo"),
        (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", "loss.reduction=sequence_sum_norm"),
        (f"{ACTOR}.clip_ratio_high=0.28", "loss.clip_low=0.2 loss.clip_high=0.28"),
        (
            f"{ACTOR}.clip_ratio=0.1 {ACTOR}.clip_ratio_low=null {ACTOR}.clip_ratio_high=null",
            "loss.clip_low=0.1 loss.clip_high=0.1",
        ),
        (
            "algorithm.adv_estimator=gae critic.optim.lr=2.0e-6 trainer.critic_warmup=3",
            "advantage.estimator=gae critic.lr=2.0e-6 critic.warmup_rollouts=3 critic.value_clip=0.5",
        ),
        (f"{ACTOR}.use_kl_loss=false {adaptive}", f"{of_reward} loss.kl_coefficient=0.02 loss.kl_estimator=k1"),
        ("algorithm.rollout_correction.rollout_is=token", "correction.mode=token_truncate"),
        ("trainer.total_training_steps=300", "train.num_rollouts=300"),
        ("algorithm.filter_groups.enable=true", "rollout.dynamic_sampling.max_rounds=10"),
        (f"{ROLLOUT}.engine_kwargs.vllm.enforce_eager=true", "rollout.vllm.enforce_eager=true"),
    ):
        found = verl.translate(QWEN2_7B | named(settings))
        assert {key: found.ours[key] for key in named(ours)} == named(ours)
        assert set(found.left) == {"reward function"}
        loaded(found, tmp_path)


def test_a_setting_of_verls_that_has_no_place_is_listed() -> None:
    for settings, name, why in (
        ({f"{ROLLOUT}.top_p": 0.9}, f"{ROLLOUT}.top_p", "whose log-probs are trained"),
        ({f"{ROLLOUT}.name": "sglang"}, f"{ROLLOUT}.name", "engines here are vllm and transformers"),
        ({"algorithm.adv_estimator": "opo"}, "algorithm.adv_estimator", "of verl's estimators gae, grpo, rloo"),
        ({f"{ACTOR}.policy_loss.loss_mode": "kl_cov"}, f"{ACTOR}.policy_loss.loss_mode", "vanilla, gspo, cispo"),
        ({"trainer.never_heard_of": 1}, "trainer.never_heard_of", "no rule is known for it"),
        ({"data.train_batch_size": "many"}, "data.train_batch_size", "could not convert"),
        ({"algorithm.use_kl_in_reward": True}, "algorithm.use_kl_in_reward", "not in both"),
    ):
        left = verl.translate(QWEN2_7B | settings).left
        assert set(left) == {"reward function", name} and why in left[name]


def test_open_r1s_recipe_means_the_same_and_its_batch_needs_the_number_of_processes(tmp_path: pathlib.Path) -> None:
    found = trl.translate(OPEN_R1)
    config = loaded(found, tmp_path)
    samples = 7 * 16 * 16  # processes, per device, accumulated: a generation of TRL's and its one optimizer step
    assert config.train.prompts_per_rollout * config.rollout.samples_per_prompt == samples
    assert config.train.samples_per_mini_batch == samples and config.rollout.samples_per_prompt == 7
    assert (config.loss.reduction, config.loss.clip_low, config.loss.kl_coefficient) == ("token_mean", 0.2, 0.0)
    assert (config.optimizer.lr, config.optimizer.schedule) == (2e-5, "cosine")
    assert (config.correction.mode, config.correction.cap) == ("sequence_mask", 3.0)  # TRL's defaults with vLLM
    assert set(found.left) == {"dataset_name", "push_to_hub", "warmup_ratio"}
    settings = {name: value for name, value in OPEN_R1.items() if name != "num_processes"}
    with pytest.raises(ConfigError, match="say how many processes train by --processes"):
        trl.translate(settings)
    assert trl.translate(settings, processes=7).ours == trl.translate(OPEN_R1).ours


def test_a_setting_of_trls(tmp_path: pathlib.Path) -> None:
    for settings, ours in (
        ("loss_type=dr_grpo scale_rewards=none", "loss.reduction=sequence_sum_norm advantage.estimator=dr_grpo"),
        ("importance_sampling_level=sequence", "loss.policy=gspo"),
        ("loss_type=cispo epsilon_high=5.0", "loss.policy=cispo loss.clip_low=1.0 loss.clip_high=4.0"),
        ("epsilon_high=0.28", "loss.clip_low=0.2 loss.clip_high=0.28"),
        ("beta=0.04", "loss.kl_coefficient=0.04 loss.kl_estimator=unbiased"),
        ("beta=0.04 use_bias_correction_kl=false", "loss.kl_estimator=k3"),
        ("delta=3.0", "loss.dual_clip=3"),
        ("steps_per_generation=32", "train.prompts_per_rollout=512 train.samples_per_mini_batch=1792"),
        (
            "lr_scheduler_type=cosine_with_min_lr lr_scheduler_kwargs.min_lr_rate=0.1",
            "optimizer.schedule=cosine optimizer.min_lr=2.0e-6",
        ),
        ("max_steps=100 num_iterations=2", "train.num_rollouts=50 train.epochs_per_rollout=2"),
    ):
        found = trl.translate(OPEN_R1 | named(settings))
        assert {key: found.ours[key] for key in named(ours)} == pytest.approx(named(ours))
        assert set(found.left) == {"dataset_name", "push_to_hub", "warmup_ratio"}
        loaded(found, tmp_path)


SCRIPT = r"""
n=4
files="['/d/a.parquet', '/d/b.parquet']"
python3 -m verl.trainer.main_ppo --config-name='ppo_trainer.yaml' \
    algorithm.adv_estimator=rloo \
    data.train_files="$files" \
    actor_rollout_ref.rollout.n=${n} \
    +actor_rollout_ref.actor.optim.lr=${LR:-2e-6} \
    trainer.logger=['console','wandb'] \
    trainer.project_name=$PROJECT $@
"""


def test_a_scripts_overrides_are_read() -> None:
    assert overrides_of(SCRIPT) == {
        "algorithm.adv_estimator": "rloo",
        "data.train_files": ["/d/a.parquet", "/d/b.parquet"],
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.actor.optim.lr": 2e-6,
        "trainer.logger": ["console", "wandb"],
        "trainer.project_name": "$PROJECT",
    }
    assert verl.translate(overrides_of(SCRIPT)).left["trainer.project_name"] == "'$PROJECT' holds a shell variable"


def test_the_command_prints_what_it_could_not(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    assert command.main(["translate", "verl", str(script)]) == 0
    said = capsys.readouterr().out
    assert "# NOT translated:\n#   reward function: " in said and "#   trainer.project_name: '$PROJECT'" in said
    ours = flat(yaml.safe_load(said))
    assert ours["advantage.estimator"] == "rloo" and ours["rollout.samples_per_prompt"] == 4
    nested = tmp_path / "resolved.yaml"
    nested.write_text(yaml.safe_dump({"data": {"train_batch_size": 8}, "algorithm": {"adv_estimator": "grpo"}}))
    assert read_settings(nested) == {"data.train_batch_size": 8, "algorithm.adv_estimator": "grpo"}
    (tmp_path / "empty.sh").write_text("echo\n")
    (tmp_path / "odd.sh").write_text("python a.py actor_rollout_ref.rollout.n=many\n")
    for name, why in (
        ("none.yaml", "cannot be read"),
        ("empty.sh", "holds no setting of verl's"),
        ("odd.sh", "has a value of another kind than verl's own: could not convert"),
    ):
        assert command.main(["translate", "verl", str(tmp_path / name)]) == command.EXIT_CONFIG
        assert why in capsys.readouterr().err


BOMB = "a: &a0 [x, x]\n" + "".join(f"b{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))
HOSTILE = {
    "bomb.yaml": (BOMB, "bomb.yaml, line 1: more than 10000 values, aliases written out"),
    "large.yaml": ("a: " + "x" * 2**18, "bytes; at most 262144 are read"),
    "large.sh": ("a.b=" + "x" * 20_000_000, "has 20000004 bytes; at most 262144 are read"),
    "double.sh": ("A=" + "x" * 99 + "\nA=$A$A" * 40, "holds a word, 'A=$A$A', of more than 8192 characters; shorten"),
    "open.sh": ("a.b=" + "${a:-" * 40_000, "holds a word, 'a.b=${a:-${a:-"),
    "lines.yaml": ('"x.y\\nreward:\\n  functions: [a.py:f]\\n#": 1', "which is no text of one line"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_too_large_or_would_grow_is_refused(tmp_path: pathlib.Path, name: str) -> None:
    content, why = HOSTILE[name]
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=re.escape(why)):
        read_settings(tmp_path / name)


def test_a_value_that_cannot_be_read_stays_a_text_of_one_line() -> None:
    deep, grows = "[" * 4000, "{a: &a [1, 1, 1], b: &b [*a, *a], c: [" + "*b, " * 2000 + "]}"
    assert overrides_of(f"x.a={deep} x.b={'{' * 4000} 'x.c={grows}'") == {"x.a": [""], "x.b": "{" * 4000, "x.c": grows}
    left = Translation(given={}, assumed={}, left={"x": "a\nreward:\n  functions: [a.py:f]\u2028b: 1"})
    assert yaml.safe_load(as_yaml(left, "theirs", "verl")) == {}
