"""`megatron-rl translate`: published configurations of verl and TRL become settings of ours that mean the same."""

from __future__ import annotations

import json
import pathlib
import re

import pytest
import yaml

from megatron_rl.commands import command
from megatron_rl.commands.translate import trl, verl
from megatron_rl.commands.translate.checking import Check, checked, nested
from megatron_rl.commands.translate.output import as_yaml
from megatron_rl.commands.translate.settings import read_settings
from megatron_rl.commands.translate.translation import Translation, flat
from megatron_rl.commands.translate.yaml_settings import followed, parsed
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


def loaded(translation: Translation) -> Config:
    return load_config(nested(translation.ours))


def test_verls_example_means_the_same() -> None:
    found = verl.translate(QWEN2_7B)
    config = loaded(found)
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
    parallel = loaded(found).parallel
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
            "advantage.estimator=gae critic.lr=2.0e-6 critic.warmup_rollouts=3 critic.value_clip=0.5 "
            "advantage.whiten=center_and_scale",
        ),
        (f"{ACTOR}.use_kl_loss=false {adaptive}", f"{of_reward} loss.kl_coefficient=0.02 loss.kl_estimator=k1"),
        ("algorithm.rollout_correction.rollout_is=token", "correction.mode=token_truncate"),
        ("trainer.total_training_steps=300", "train.num_rollouts=300"),
        (
            "algorithm.filter_groups.enable=true algorithm.filter_groups.max_num_gen_batches=7",
            "rollout.dynamic_sampling.max_rounds=7",
        ),
        ("algorithm.adv_estimator=reinforce_plus_plus_baseline", "advantage.estimator=reinforce_plus_plus"),
        ("algorithm.adv_estimator=gdpo", "advantage.estimator=gdpo advantage.whiten=center_and_scale"),
        (
            "reward_model.overlong_buffer.enable=true reward_model.overlong_buffer.len=4096 "
            "reward_model.overlong_buffer.penalty_factor=0.5 data.max_response_length=8192",
            "reward.overlong_buffer_tokens=4096 reward.overlong_penalty=0.5",
        ),
        (f"{ACTOR}.megatron.router_replay.mode=R3", "rollout.routing_replay=rollout"),
        ("trainer.resume_mode=disable", "checkpoint.resume=never"),
        ("data.apply_chat_template_kwargs.enable_thinking=false", "data.template_variables.enable_thinking=false"),
        (f"{ROLLOUT}.engine_kwargs.vllm.enforce_eager=true", "rollout.vllm.enforce_eager=true"),
    ):
        found = verl.translate(QWEN2_7B | named(settings))
        assert {key: found.ours[key] for key in named(ours)} == named(ours)
        assert set(found.left) == {"reward function"}
        loaded(found)


def test_a_setting_of_verls_that_has_no_place_is_listed() -> None:
    greedy = f"{ROLLOUT}.val_kwargs"
    for settings, name, why in (
        ({f"{ROLLOUT}.top_p": 0.9}, f"{ROLLOUT}.top_p", "whose log-probs are trained"),
        ({f"{ROLLOUT}.name": "sglang"}, f"{ROLLOUT}.name", "engines here are vllm and transformers"),
        ({f"{ROLLOUT}.top_k": 20}, f"{ROLLOUT}.top_k", "whose log-probs are trained"),
        ({"data.filter_overlong_prompts": False, "data.truncation": "left"}, "data.truncation", "no prompt is cut"),
        ({f"{greedy}.do_sample": True, f"{greedy}.top_p": 0.7}, f"{greedy}.top_p", "whole distribution"),
        ({"data.gen_batch_size": 1536}, "data.gen_batch_size", "asks as many further prompts"),
        ({f"{ACTOR}.fsdp_config.dtype": "float16"}, f"{ACTOR}.fsdp_config.dtype", "float32 or bfloat16"),
        ({f"{ACTOR}.megatron.override_ddp_config.a": 1}, f"{ACTOR}.megatron.override_ddp_config.a", "no rule is known"),
        ({"reward_model.enable": True}, "reward_model.enable", "reward.model_path"),
        ({"trainer.device": "npu"}, "trainer.device", "GPUs run it here"),
        ({"global_profiler.steps": [2, 5]}, "global_profiler.steps", "profile.steps=[first, last]"),
        ({"trainer.never_heard_of": 1}, "trainer.never_heard_of", "no rule is known for it"),
        ({"algorithm.use_kl_in_reward": True}, "algorithm.use_kl_in_reward", "not in both"),
    ):
        left = verl.translate(QWEN2_7B | settings).left
        assert set(left) - {"trainer.critic_warmup"} == {"reward function", name} and why in left[name]


def test_what_has_no_place_and_belongs_to_a_key_leaves_it_to_be_filled_in() -> None:
    for settings, keys, why in (
        ({"algorithm.adv_estimator": "opo"}, {"advantage.estimator", "advantage.whiten"}, "of verl's estimators gae"),
        ({"algorithm.adv_estimator": "reinforce_plus_plus"}, {"advantage.estimator", "advantage.whiten"}, "estimators"),
        ({f"{ACTOR}.policy_loss.loss_mode": "kl_cov"}, {"loss.policy"}, "vanilla, gspo, cispo"),
        ({"data.train_batch_size": "many"}, {"train.prompts_per_rollout"}, "could not convert"),
        ({f"{ROLLOUT}.n": "x"}, {"train.samples_per_mini_batch", "rollout.samples_per_prompt"}, "could not convert"),
    ):
        found = verl.translate(QWEN2_7B | settings)
        assert set(found.open) == keys and all(why in each for each in found.open.values())
        with pytest.raises(ConfigError, match="is a placeholder"):
            loaded(found)


def test_open_r1s_recipe_means_the_same_and_its_batch_needs_the_number_of_processes(tmp_path: pathlib.Path) -> None:
    found = trl.translate(OPEN_R1)
    config = loaded(found)
    samples = 7 * 16 * 16  # processes, per device, accumulated: a generation of TRL's and its one optimizer step
    assert config.train.prompts_per_rollout * config.rollout.samples_per_prompt == samples
    assert config.train.samples_per_mini_batch == samples and config.rollout.samples_per_prompt == 7
    assert (config.loss.reduction, config.loss.clip_low, config.loss.kl_coefficient) == ("token_mean", 0.2, 0.0)
    assert (config.optimizer.lr, config.optimizer.schedule) == (2e-5, "cosine")
    assert (config.data.train, config.data.template) == (("AI-MO/NuminaMath-TIR",), "auto")
    part = named("dataset_config=main dataset_train_split=test")
    assert trl.translate(OPEN_R1 | part).ours["data.train"] == ["AI-MO/NuminaMath-TIR:main/test"]
    assert (config.correction.mode, config.correction.cap) == ("sequence_mask", 3.0)  # TRL's defaults with vLLM
    assert set(found.left) == {"push_to_hub", "warmup_ratio"}
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
        assert set(found.left) == {"push_to_hub", "warmup_ratio"}
        loaded(found)


# In the form of verl's DAPO for Qwen2.5-32B: lengths computed, defaults of the environment, a branch for a device.
SCRIPT = r"""
max_prompt_length=$((1024 * 2)); max_response_length=$((1024 * 8))
n=16; MODEL=${MODEL_PATH:-"${HOME}/Qwen2.5-32B"}
if [ "$1" = npu ]; then DEVICE=(trainer.device=npu); max_prompt_length=512; fi
files="['/d/a.parquet', '/d/b.parquet']"
ARGS=(algorithm.adv_estimator=rloo "data.train_files=$files" trainer.nnodes=2 actor_rollout_ref.actor.use_kl_loss=True)
python3 -m verl.trainer.main_ppo --config-name='ppo_trainer.yaml' "${ARGS[@]}" ${DEVICE[@]} \
    data.max_prompt_length=${max_prompt_length} \
    data.max_response_length=${max_response_length} \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.rollout.n=${n} \
    actor_rollout_ref.rollout.max_num_batched_tokens=$((max_prompt_length + max_response_length)) \
    +actor_rollout_ref.actor.optim.lr=${LR:-2e-6} \
    data.train_batch_size=$BSZ \
    trainer.logger=['console','wandb'] \
    # trainer.total_epochs=3 \
    trainer.project_name=$PROJECT $@
"""


def test_a_scripts_settings_are_what_bash_makes_of_them(tmp_path: pathlib.Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    read = read_settings(tmp_path / "run.sh")
    assert read.given == {
        "algorithm.adv_estimator": "rloo",
        "data.train_files": ["/d/a.parquet", "/d/b.parquet"],
        "trainer.nnodes": 2,
        f"{ACTOR}.use_kl_loss": True,
        "data.max_prompt_length": 2048,
        "data.max_response_length": 8192,
        "actor_rollout_ref.model.path": str(pathlib.Path.home() / "Qwen2.5-32B"),
        f"{ROLLOUT}.n": 16,
        f"{ROLLOUT}.max_num_batched_tokens": 10240,
        f"{ACTOR}.optim.lr": 2e-6,
        "trainer.logger": ["console", "wandb"],
    }
    assert read.unknown == {"data.train_batch_size": "'$BSZ' depends on '$BSZ'"}
    assert list(read.notes) == [
        "line 4 depends on '[ \"$1\" = npu ]', and is not taken: 'DEVICE=(trainer.device=npu) max_prompt_length=512'",
        "line 17: 'trainer.project_name=$PROJECT' is a command of its own to bash, and given to no program",
    ]
    told = read_settings(tmp_path / "run.sh", values={"1": "npu", "BSZ": "512"}).given
    assert (told["data.max_prompt_length"], told["trainer.device"], told["data.train_batch_size"]) == (512, "npu", 512)


def test_the_command_says_what_is_open_what_will_not_start_and_what_was_not_checked(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    assert command.main(["translate", "verl", str(script)]) == 0
    said = capsys.readouterr().out
    heads = [line for line in said.splitlines() if line.startswith("# ") and line.endswith(":")]
    assert heads == [
        "# TO FILL IN (??? below); it does not load before:",
        "# WILL NOT START as it is:",
        "# Of the script, and not taken as settings:",
        "# NOT translated:",
        "# Needs no setting here:",
        "# Checked:",
        "# Not checked:",
    ]
    plain = " ".join(said.replace("\n#    ", "").split())
    assert "train.prompts_per_rollout: data.train_batch_size='$BSZ' depends on '$BSZ'" in plain
    assert "loss.kl_coefficient=0.001 makes that untrue; either set loss.kl_coefficient" in plain
    assert "or choose skip.mode=approximate" in plain and "the model: model.hf_path=" in plain
    ours = flat(yaml.safe_load(said))
    assert (ours["data.max_prompt_tokens"], ours["rollout.max_response_tokens"]) == (2048, 8192)
    with pytest.raises(ConfigError, match=re.escape("train.prompts_per_rollout=??? is a placeholder")):
        load_config(yaml.safe_load(said))
    assert command.main(["translate", "verl", str(script), "--set", "BSZ=512"]) == 0
    assert load_config(yaml.safe_load(capsys.readouterr().out)).train.prompts_per_rollout == 512
    assert command.main(["translate", "verl", str(script), "--set", "512"]) == command.EXIT_CONFIG
    assert command.main(["translate", "verl", str(tmp_path / "none.yaml")]) == command.EXIT_CONFIG
    assert "--set '512' is not NAME=VALUE" in (said := capsys.readouterr().err) and "cannot be read" in said


def test_the_fault_behind_that_of_the_skip_is_named_too() -> None:
    settings = {name: value for name, value in QWEN2_7B.items() if name != "data.val_files"}
    found = checked(verl.translate(settings | {f"{ROLLOUT}.n": 1}))
    assert ["skip.mode=exact" in found.faults[0], "samples_per_prompt=1" in found.faults[1]] == [True, True]


@pytest.mark.long  # imports transformers
def test_a_model_that_is_here_bounds_the_lengths(tmp_path: pathlib.Path) -> None:
    config = {"model_type": "qwen2", "max_position_embeddings": 1500, "vocab_size": 64, "hidden_size": 16}
    config |= {"num_key_value_heads": 2, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    here = {"actor_rollout_ref.model.path": str(tmp_path), f"{ACTOR}.use_kl_loss": False}
    found = checked(verl.translate(QWEN2_7B | here))
    assert "is more than the context of the model: 1500 tokens" in found.faults[0] and len(found.faults) == 1
    assert not any("model" in each for each in found.not_done)


def test_references_within_a_yaml_are_followed() -> None:
    settings = {"a.b": 3, "c": "${a.b}", "d": "${oc.select:a.b,4}", "e": "${oc.select:z,4}", "f": "x/${c}/${a.b}"}
    settings |= {"g": "${z}", "h": "${h}${h}", "i": "${oc.env:HOME}"}
    assert followed(settings) == settings | {"c": 3, "d": 3, "e": 4, "f": "x/3/3"}


BOMB = "a: &a0 [x, x]\n" + "".join(f"b{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))
HOSTILE = {
    "bomb.yaml": (BOMB, "bomb.yaml, line 1: more than 10000 values, aliases written out"),
    "large.yaml": ("a: " + "x" * 2**18, "bytes; at most 262144 are read"),
    "large.sh": ("a.b=" + "x" * 20_000_000, "has 20000004 bytes; at most 262144 are read"),
    "double.sh": ("A=" + "x" * 99 + "\nA=$A$A" * 40, "of more than 8192 characters; shorten it"),
    "open.sh": ("a.b=" + "${a:-" * 40_000, "holds a word, '${a:-${a:-"),
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
    assert [parsed(text) for text in (deep, "{" * 4000, grows)] == [[""], "{" * 4000, grows]
    left = Translation(
        framework="verl", given={}, assumed={}, left={"x": "a\nreward:\n  functions: [a.py:f]\u2028b: 1"}
    )
    assert yaml.safe_load(as_yaml(left, "theirs", Check(faults=("a\nb: 1",), done=(), not_done=()))) == {}
