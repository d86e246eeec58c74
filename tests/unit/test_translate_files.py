"""`megatron-rl translate` takes each file for what it is: of verl, TRL or axolotl, of their trainers, or of another."""

from __future__ import annotations

import pathlib

import pytest
import yaml

from megatron_rl.commands import command
from megatron_rl.commands.translate.checking import checked
from megatron_rl.commands.translate.command import translated
from megatron_rl.errors import ConfigError


def named(text: str) -> dict:
    """Return the settings of a text such as ``a.b=1 c=null``."""
    return {name: yaml.safe_load(value) for name, value in (part.split("=") for part in text.split())}


# Beginnings of published files of each project: what tells them apart.
FILES = {
    "grpo_math_1B.yaml": ("policy: {model_name: Q}\ngrpo: {num_steps: 3}", "verl", "of NeMo-RL's GRPO, not"),
    "nemo_sft.yaml": ("policy: {model_name: Q}\nsft: {max_num_epochs: 1}", "trl", "of NeMo-RL's SFT, not"),
    "slime.sh": ("A=(--hf-checkpoint /q)\nray job submit -- python3 train.py ${A[@]}", "verl", "of slime, not"),
    "openrlhf.sh": ("read -r -d '' c <<EOF\nopenrlhf.cli.train_dpo --x 1\nEOF\ndeepspeed $c", "trl", "OpenRLHF's DPO"),
    "dpo.yaml": ("base_model: Q\nrl: dpo\nmicro_batch_size: 2", "trl", "of axolotl, not of TRL's; megatron-rl tr"),
    "kto.yaml": ("base_model: Q\nrl: kto\nmicro_batch_size: 2", "axolotl", "axolotl's KTO, which is not"),
    "prm.yaml": ("base_model: Q\nprocess_reward_model: true\nmicro_batch_size: 2", "axolotl", "axolotl's PRM"),
    "factory.yaml": ("model_name_or_path: Q\nstage: sft\nfinetuning_type: full", "trl", "of LLaMA-Factory, not"),
    "skyrl.sh": ("python -m skyrl_train.entrypoints.main_base trainer.policy.model.path=Q", "verl", "of SkyRL, not"),
    "ours.yaml": ("model: {hf_path: Q}", "verl", "of megatron_rl, not of verl's; megatron-rl train"),
    "config_demo.yaml": ("model_name_or_path: Q\nnum_generations: 16", "verl", "of TRL's GRPO, not of verl's"),
    "example_config.yaml": ("model_name_or_path: Q\nlearning_rate: 0.1", "trl", "does not say which of TRL's trainers"),
    "rloo.yaml": ("{model_name_or_path: Q, num_generations: 2, reward_clip_range: [0, 1]}", "trl", "TRL's RLOO, which"),
    "gkd.yaml": ("{model_name_or_path: Q, packing: false, lmbda: 0.5}", "trl", "TRL's GKD, which is not translated"),
    "config.sh": ("trl dpo --config none.yaml --beta 1", "trl", "settings stand in 'none.yaml', which is not"),
    "kto.sh": ("python trl/scripts/kto.py --model_name_or_path Q", "trl", "is for TRL's KTO, which is not translated"),
    "rloo.sh": ("accelerate launch examples/scripts/rloo.py --x 1", "trl", "TRL's RLOO, which is not translated"),
    "ppo.sh": ("python examples/scripts/ppo/ppo.py --x 1", "trl", "TRL's PPO, which is not translated"),
    "sft.sh": ("torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=a optim.lr=1", "verl", "is for verl's SFT"),
    "gkd.sh": ("python3 -m main_gkd actor_rollout_ref.rollout.n=1", "verl", "is for verl's MAIN_GKD, which"),
    "prime.sh": ("python3 -m recipe.prime.main_prime data.train_batch_size=1", "verl", "is for verl's PRIME"),
    "dpo.py": ("import trl", "trl", "is Python, and is not run"),
    "rl.toml": ("a = 1", "verl", "is TOML"),
    "branch.sh": ("if [ $1 = gpu ]; then python a.py data.train_batch_size=1; fi", "verl", "give the values by --set"),
    "empty.sh": ("echo\n", "verl", "holds no setting of verl's"),
    "unclosed.sh": ("a=1\npython 'x", "verl", "unclosed.sh, line 2: "),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_kind_is_refused_by_its_name(name: str, tmp_path: pathlib.Path, capsys) -> None:
    content, framework, why = FILES[name]
    (tmp_path / name).write_text(content)
    assert command.main(["translate", framework, str(tmp_path / name), "--processes", "8"]) == command.EXIT_CONFIG
    assert why in capsys.readouterr().err


DPO = "accelerate launch --num_processes 4 trl/scripts/dpo.py --learning_rate 5e-7 --max_steps 9 --use_peft"
LENGTH = "sequence_len"
SUPERVISED = {
    "dpo.sh": (f"{DPO} --gradient_accumulation_steps=8 --lora_target_modules q_proj k_proj v_proj", "trl", ""),
    "sft.yaml": ("{model_name_or_path: Q, packing: true, num_processes: 2, num_train_epochs: 2}", "trl", "packing"),
    "cpo.sh": ("trl cpo --loss_type simpo --cpo_alpha 0 --simpo_gamma 0.3 --beta 2 --num_processes 1", "trl", ""),
    "reward.sh": ("trl reward --model_name_or_path Q --num_processes 1 --max_steps 5", "trl", ""),
    "dpo.yml": ("{base_model: Q, rl: ipo, rl_beta: 0.3, micro_batch_size: 2, val_set_size: 0.05}", "axolotl", ""),
    "lora.yml": ("{base_model: Q,adapter: lora, lora_r: 8, lora_target_linear: 1, sequence_len: 9}", "axolotl", LENGTH),
    "gdpo.yml": ("{base_model: Q, rl: gdpo, micro_batch_size: 8, trl: {num_generations: 8, beta: 0.1}}", "axolotl", ""),
}
MEANS = {
    "dpo.sh": "preference.loss=dpo preference.beta=0.1 sft.steps=9 sft.samples_per_step=256 lora.targets=[linear_qkv]",
    "sft.yaml": "sft.epochs=2 sft.samples_per_step=16 sft.lr=2.0e-5 sft.schedule=linear data.messages_key=messages",
    "cpo.sh": "preference.loss=simpo preference.margin=0.3 preference.beta=2 sft.epochs=3 train.num_rollouts=0",
    "reward.sh": "preference.loss=bradley_terry sft.lr=1.0e-4 sft.steps=5",
    "dpo.yml": "preference.loss=ipo preference.beta=0.3 sft.eval_share=0.05 sft.samples_per_step=4 sft.schedule=cosine",
    "lora.yml": "lora.rank=8 lora.targets=[linear_qkv,linear_proj,linear_fc1,linear_fc2] sft.epochs=1",
    "gdpo.yml": "advantage.estimator=gdpo advantage.whiten=center_and_scale rollout.samples_per_prompt=8",
}


@pytest.mark.parametrize("name", SUPERVISED)
def test_a_supervised_file_means_the_same_and_is_no_grpo(name: str, tmp_path: pathlib.Path) -> None:
    content, framework, left = SUPERVISED[name]
    (tmp_path / name).write_text(content)
    found, _ = translated(framework, tmp_path / name, processes=None if "num_processes" in content else 2)
    assert {key: found.ours[key] for key in named(MEANS[name])} == named(MEANS[name])
    assert not found.open and (not left or left in found.left)
    assert [each for each in checked(found).faults if "skip.mode" not in each] == []


def test_a_file_of_names_that_rloo_has_too_is_read_as_grpo_which_is_said(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("{model_name_or_path: Q, num_generations: 2, num_processes: 8}")
    assert "read as GRPO's" in translated("trl", file)[0].left["trainer"]
    assert "trainer" not in translated("trl", file, trainer="grpo")[0].left
    with pytest.raises(ConfigError, match="is for TRL's RLOO, which is not translated"):
        translated("trl", file, trainer="rloo")


def test_a_yaml_that_a_command_names_is_read_with_it_and_one_of_verls_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "dpo.yaml").write_text("{model_name_or_path: Q, beta: 0.3, num_processes: 2, max_steps: 4}")
    (tmp_path / "run.sh").write_text("trl dpo --config dpo.yaml --beta $((1 + 1))")
    found, _ = translated("trl", tmp_path / "run.sh")
    assert (found.ours["preference.beta"], found.ours["sft.steps"], "config" in found.left) == (2, 4, False)
    (tmp_path / "ax.yml").write_text("{base_model: Q, rl: dpo, micro_batch_size: 2}")
    (tmp_path / "ax.sh").write_text("axolotl train ax.yml --learning-rate 0.5")
    assert translated("axolotl", tmp_path / "ax.sh", processes=1)[0].ours["sft.lr"] == 0.5
    (tmp_path / "verl.sh").write_text("python -m verl.trainer.main_ppo --config-name=multiturn data.train_batch_size=8")
    (note,) = translated("verl", tmp_path / "verl.sh")[1].notes
    assert "'multiturn' is a YAML of other defaults, which is not read" in note
