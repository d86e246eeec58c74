"""Checks the configuration: its merging, its refusals and their words, and that its documentation lists every key."""

import dataclasses
import itertools
import pathlib
import re

import pytest
import yaml

from megatron_rl.config import Config, config_to_yaml, load_config
from megatron_rl.config.known_names import ELSEWHERE, NOT_HERE, RENAMED
from megatron_rl.config.nearest import all_keys
from megatron_rl.config.typed import hint_at
from megatron_rl.errors import ConfigError
from megatron_rl.validate import validate_config
from tools import config_table

ROOT = pathlib.Path(__file__).parents[3]
SECTIONS = {field.name for field in dataclasses.fields(Config)}


def leaves_of(section: type) -> list[str]:
    """Return the dotted keys of a section, those of the sections within it too."""
    found = []
    for each in dataclasses.fields(section):
        within = dataclasses.is_dataclass(each.default_factory)
        found += [f"{each.name}.{key}" for key in leaves_of(each.default_factory)] if within else [each.name]
    return found


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("train: {num_rollouts: 7, prompts_per_rollout: 5}\noptimizer: {lr: 1.0e-3}\n")
    config = load_config(path, ["train.num_rollouts=9", "optimizer.betas=[0.8,0.9]"])
    assert (config.train.num_rollouts, config.train.prompts_per_rollout, config.optimizer.lr) == (9, 5, 1e-3)
    assert config.optimizer.betas == (0.8, 0.9) and config.rollout == load_config().rollout
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.num_rollouts = 3
    assert all(section.__dataclass_params__.frozen for _, section in config_table.sections())


def test_a_renamed_key_is_answered_by_its_new_name():
    for old, new in RENAMED.items():
        with pytest.raises(ConfigError, match=rf"config key {re.escape(old)} .* is called {re.escape(new)} now"):
            load_config(None, [f"{old}.steps=3" if old == "warmup" else f"{old}=3"])
        assert new in leaves_of(Config) or new in SECTIONS


def test_a_name_of_another_framework_is_answered_by_ours():
    """Every target is a key; no name elsewhere hides a key of ours."""
    keys = set(all_keys(Config))
    for name, (target, note) in ELSEWHERE.items():
        assert target in keys and name not in keys, name
        said = f"nearest known key is {target}{f' ({note})' * bool(note)}"
        with pytest.raises(ConfigError, match=f"{re.escape(said)}$"):
            load_config({name: 3} if "." not in name else None, [] if "." not in name else [f"elsewhere.{name}=3"])
    for name, reason in NOT_HERE.items():
        assert name not in keys and set(re.findall(r"\b[a-z]+\.[a-z_]+\b", reason)) <= keys | {"optimizer.distributed"}
        with pytest.raises(ConfigError, match=re.escape(f"there is none of this meaning: {reason}")):
            load_config(None, [f"policy.{name}=3"])


@pytest.mark.parametrize(("given", "answer"), [
    ("rollout.n=8", "rollout.samples_per_prompt"), ("actor_rollout_ref.rollout.n=8", "rollout.samples_per_prompt"),
    ("learning_rate=1", "optimizer.lr"), ("sft.learning_rate=1", "sft.lr"), ("critic.learning-rate=1", "critic.lr"),
    ("max_steps=3", "train.num_rollouts (sft.steps in a supervised run)"), ("sft.max_steps=3", "sft.steps"),
    ("kl_coef=1", "loss.kl_coefficient"), ("lerning_rate=1", "optimizer.lr"), ("optimizer.lrr=1", "optimizer.lr"),
    ("rolout.temperature=1", "rollout.temperature"), ("plan.max_token=4", "plan.max_tokens_per_microbatch"),
    ("data.train_batch_size=4", "train.prompts_per_rollout"),
])
def test_an_unknown_key_is_answered_by_the_one_that_is_meant(given, answer):
    key, value = given.split("=")
    said = f"on the command line: unknown config key {key} (value {value}); the nearest known key is {answer}"
    with pytest.raises(ConfigError) as refused:
        load_config(None, [given])
    assert str(refused.value) == said


@pytest.mark.parametrize(("given", "said"), [
    (["profile.steps=[5,3]"], "profile.steps=[5, 3] ends before it begins; give [3, 5]"),
    (["profile.steps=[1,21]"], "are 21 steps, a trace too large for viewers; give at most 20, such as [1, 2]"),
    (["profile.steps=[0,3]"], "profile.steps=0 must be at least 1"), (["profile.steps=[-2,3]"], "profile.steps=-2"),
    (["profile.steps=[3]"], "profile.steps=[3] must be a list of 2 values"), (["profile.steps=3"], "profile.steps=3"),
    (["profile.ranks=[]"], "profile.ranks=[] names no rank"), (["profile.ranks=[-1]"], "profile.ranks=-1 must be at"),
    (["profile.tool=nsight"], "profile.tool='nsight'"), (["profile.step=[1,2]"], "nearest known key is profile.steps"),
])
def test_a_profile_that_cannot_be_is_refused_by_its_key(given, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(None, given)
    assert load_config(None, ["profile.steps=[1,20]", "profile.ranks=[0,3]"]).profile.steps == (1, 20)


def test_a_fault_names_the_place_of_each_of_its_keys(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("train:\n  foo: 3\n")
    for given, said in (
        (["train.foo=4"], "on the command line: unknown config key train.foo (value 4); "),
        (["run.lr=3", "train.foo=null"], "on the command line: unknown config key"),
        ([], f"{path}, line 2: unknown config key train.foo"),
    ):
        with pytest.raises(ConfigError) as refused:
            load_config(path, given)
        assert str(refused.value).startswith(said)
    path.write_text("optimizer:\n  lr: 0.1\ndata:\n  system_prompt: be short\n")
    with pytest.raises(ConfigError, match="^on the command line: unknown config key learning_rate .* optimizer.lr$"):
        load_config(path, ["learning_rate=3"])
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{path}, line 4 and the command line: data.system_prompt=')}"):
        load_config(path, ["data.template='{prompt}'"])


def test_resolved_yaml_loads_back_to_the_same_config(tmp_path):
    given = ["reward.functions=[arithmetic,math_verify]", "megatron.ddp.overlap_grad_reduce=true", "skip.mode=off"]
    (tmp_path / "config.yaml").write_text(config_to_yaml(load_config(None, given)))
    assert load_config(tmp_path / "config.yaml") == load_config(None, given)


def test_yaml_reads_a_bare_off_as_a_boolean_and_it_still_means_off(tmp_path):
    path = tmp_path / "run.yaml"
    for written in ("off", '"off"', "False"):
        path.write_text(f"skip: {{mode: {written}}}\n")
        assert load_config(path).skip.mode == "off" == load_config(None, [f"skip.mode={written}"]).skip.mode


def test_refusals_name_the_key_the_value_and_the_way_out():
    for override, words in (
        ("train.num_rollout=3", ["train.num_rollout", "3", "train.num_rollouts"]),
        ("trian.num_rollouts=3", ["trian", "train"]),
        ("train=3", ["train=3", "section"]),
        ("train.num_rollouts=many", ["train.num_rollouts", "many"]),
        ("loss.policy=ppoo", ["loss.policy='ppoo'", "ppo"]),
        ("reward.weights=[1,2]", ["2 numbers", "0 names"]),
        ("parallel.sequence_parallel=true", ["parallel.sequence_parallel", "parallel.tensor"]),
        ("data.template=Question", ["data.template", "{prompt}", "chat"]),
        ("lora.targets=[q_proj]", ["lora.targets='q_proj'", "linear_qkv"]),
        ("lora.targets=[linear_fc1,linear_fc1]", ["twice"]),
        ("lora={rank: 8, targets: []}", ["lora.targets=[]", "lora.rank=null"]),
        ("eval.samples_per_prompt=4", ["eval.samples_per_prompt=4", "eval.temperature=0", "eval.temperature above 0"]),
        ("eval={path: a.jsonl, sets: {test: b.jsonl}}", ["eval.name='test'", "eval.sets.test='b.jsonl'", "rename"]),
        ("eval.sets={a/b: c.jsonl}", ["'a/b'", "eval/<name>/"]),
        ("eval={path: a.jsonl, name: ''}", ["''", "cannot name an evaluation set"]),
    ):
        with pytest.raises(ConfigError) as error:
            load_config(None, [override])
        assert all(word in str(error.value) for word in words), str(error.value)


def test_evaluation_sets_stand_next_to_the_short_form(tmp_path):
    (tmp_path / "run.yaml").write_text("eval: {path: test.jsonl, sets: {hard: hard.jsonl, aime.24: aime.jsonl}}\n")
    config = load_config(tmp_path / "run.yaml", ["eval.sets.new=new.jsonl"])
    wanted = {"test": "test.jsonl", "hard": "hard.jsonl", "aime.24": "aime.jsonl", "new": "new.jsonl"}
    assert config.eval.named_sets == wanted
    (tmp_path / "config.yaml").write_text(config_to_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config
    # eval.name alone names nothing
    assert load_config(None, ["eval.sets.test=b.jsonl"]).eval.named_sets == {"test": "b.jsonl"}


def test_the_documentation_lists_every_key_and_no_other():
    text = (ROOT / "docs" / "configuration.md").read_text()
    documented = set()
    for row in re.findall(r"^\| (`[^|]+) \|", text, flags=re.MULTILINE):
        section = ""
        for name in re.findall(r"`([\w.]+)`", row):
            section = name.rpartition(".")[0] or section
            documented.add(section + "." + name.rpartition(".")[2])
    known = set(leaves_of(Config))
    assert documented == known, sorted(documented ^ known)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*/*.yaml")), ids=lambda path: path.name)
def test_every_example_is_a_valid_config(path):
    from megatron_rl.algorithm.signal import signal_rule

    signal_rule(load_config(path))
    assert yaml.safe_load(path.read_text()).keys() <= SECTIONS


def test_no_message_repeats_a_long_value_whole():
    """A mistyped override of thousands of characters still ends in a message that a terminal shows at once."""
    keys = [key for key in sorted(all_keys(Config)) if "str" in str(hint_at(Config, key))]
    assert len(keys) > 80
    for key, value in itertools.product(keys, ("9" * 5000, "[" + "x" * 5000 + "]")):
        try:
            validate_config(load_config(None, [f"{key}={value}"]))
        except ConfigError as error:
            assert len(str(error)) <= 1500, (key, value[:2], str(error)[:300])
