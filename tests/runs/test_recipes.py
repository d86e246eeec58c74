"""Every recipe trains two rollouts end to end on the tiny arithmetic model, and its own keys are seen to act."""

import math
import pathlib

import pytest

from megatron_rl.algorithm.signal import signal_rule
from megatron_rl.config import load_config
from tests.runs.command import ended, rows_of, write_pairs, write_teacher

RECIPES = pathlib.Path(__file__).parents[2] / "examples" / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))

# What does not fit the tiny model: lengths, sizes, and a reward that an untrained model earns now and then.
TINY = ("run.deadline_s=60", "data.max_prompt_tokens=16", "rollout.samples_per_prompt=4",
        "rollout.max_response_tokens=6", "train.prompts_per_rollout=8", "optimizer.lr=1e-3",
        "plan.max_tokens_per_microbatch=256")
HALVES, TWO = "train.samples_per_mini_batch=16", "train.num_rollouts=2"
PAIRS = ("dpo", "ipo", "simpo", "reward_model")
PARITY = (TWO, "reward.functions=[tests.reward_functions:parity]", "reward.weights=[1.0]")
OWN = {"dapo": (*PARITY, "reward.overlong_buffer_tokens=2", HALVES),
       "gdpo": (TWO, "reward.functions=[tests.reward_functions:parity,arithmetic]", HALVES),
       "ppo": (TWO, "reward.functions=[tests.reward_functions:graded]", "rollout.samples_per_prompt=1",
               "critic.warmup_rollouts=1", "train.samples_per_mini_batch=null"),
       "sft": ("sft.steps=3", "sft.samples_per_step=8"),
       **dict.fromkeys(PAIRS, ("sft.steps=3", "sft.epochs=null", "sft.warmup_steps=0", "sft.samples_per_step=8")),
       "distillation": (TWO,)}
IN_HALVES = ("gspo", "cispo", "reinforce_plus_plus")


def overrides_of(name: str) -> tuple[str, ...]:
    return (*TINY, *OWN.get(name, PARITY), *([HALVES] if name in IN_HALVES else []))


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_trains_two_rollouts_with_finite_losses(pool, arithmetic, tmp_path, name):
    rows = arithmetic / "train.jsonl"
    if name in PAIRS:
        rows = write_pairs(rows, tmp_path / "pairs.jsonl")
    teacher = [f"teacher.hf_path={tmp_path / 'teacher'}"] if name == "distillation" else []
    if teacher:
        write_teacher(arithmetic / "model", tmp_path / "teacher")
    given = [*("--config", str(RECIPES / f"{name}.yaml"), "--run-dir", str(tmp_path)),
             *(f"model.hf_path={arithmetic / 'model'}", f"data.train={rows}", *overrides_of(name), *teacher)]
    ended(pool, 1, given)
    rows = rows_of(tmp_path)
    real = [row for row in rows if row["step_kind"] == "REAL"]
    assert real and all(math.isfinite(row["train/loss"]) and 0 < row["train/grad_norm"] < math.inf for row in real)
    if name == "sft" or name in PAIRS:
        assert [row["phase"] for row in rows] == ["sft" if name == "sft" else "preference"] * 3
        assert (tmp_path / "checkpoints" / "step_3" / "hf").is_dir()
        assert name == "sft" or rows[-1]["tokens/shared"] > 0  # a pair's prompt runs once
        return
    assert [row["rollout"] for row in rows] == ([1, 1, 2, 2] if HALVES in overrides_of(name) else [1, 2])
    assert_acts(name, rows)


def assert_acts(name: str, rows: list[dict]) -> None:
    """Assert that the setting that a method is about left its mark in the metrics."""
    firsts = [row for row in rows if ("distillation/reverse_kl" if name == "distillation" else "reward/mean") in row]
    assert len(firsts) == 2
    match name:
        case "grpo":
            assert all("train/kl" in row for row in rows) and rows[-1]["train/kl"] > 0
        case "dapo":
            assert all(row["reward/overlong_penalty"] < 0 and "dynamic_sampling/rounds" in row for row in firsts)
            assert sum(row["rollout/masked_truncated"] for row in firsts) > 0
        case "ppo":
            assert [row["train/applied"] for row in rows] == [0, 1]  # the first rollout is the critic's alone
            assert all(row["critic/steps"] == 1 and "reward/kl_penalty" in row for row in firsts)
            assert rows[1]["skip/samples_dropped"] == 0
        case "gspo":
            assert any(row["train/clip_ratio"] > 0 for row in rows[1:])  # 3e-4 binds at a rollout's second step
        case "gdpo":
            assert all("reward/arithmetic" in row for row in firsts)
        case "rloo" | "dr_grpo":
            assert all(row["train/clip_ratio"] == 0 for row in rows)  # on-policy: nothing to clip


def test_there_is_a_recipe_for_each_method_and_a_row_for_each_recipe():
    of_rl = ["cispo", "dapo", "dr_grpo", "gdpo", "grpo", "gspo", "ppo", "reinforce_plus_plus", "rloo", "distillation"]
    assert sorted([*of_rl, "sft", *PAIRS]) == NAMES
    table = (RECIPES / "README.md").read_text()
    assert all(f"[`{name}.yaml`]({name}.yaml)" in table for name in NAMES)
    assert all((RECIPES / f"{name}.yaml").read_text().startswith("# ") for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_leaves_model_and_data_to_the_command_line_and_says_what_it_drops(name):
    config = load_config(RECIPES / f"{name}.yaml")
    assert config.model.hf_path == "" and config.data.train == ()
    assert signal_rule(config).approximated == (("loss.kl_coefficient=0.04",) if name == "grpo" else ())
