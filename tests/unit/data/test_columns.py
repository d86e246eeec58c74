"""Data meet the model and the rewards before a run starts: a row that lacks a column, or does not fit, is named."""

import contextlib
import json
from types import SimpleNamespace

import pyarrow
import pytest
from pyarrow import parquet

from megatron_rl.config import Config, RewardConfig, load_config
from megatron_rl.data.columns import check_columns
from megatron_rl.data.rows import FilePart, Rows
from megatron_rl.errors import ConfigError
from megatron_rl.reward import opened_reward
from megatron_rl.trainer.training_data import load_prompts
from tests.unit.data.letters import CountingTokenizer

OWN = """
def score(prompts, completions, completion_ids, level, *, answer, bonus=1, **columns):
    return [1.0 for _ in completions]
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py:score"


def check(rows, functions=(), *, answer_key="answer", **reward):
    with opened_reward(RewardConfig(functions=tuple(functions), **reward)) as opened:
        check_columns(rows, opened.required_columns if opened else (), "prompt", answer_key)


GOOD = {"prompt": "x", "level": 1, "answer": "1"}


def test_the_columns_of_a_function_are_its_parameters_without_default(own):
    with opened_reward(RewardConfig(functions=(own, "arithmetic", "environment"))) as reward:
        needed = [(column.name, column.null) for column in reward.required_columns]
    assert needed == [("level", True), ("answer", False)]


def test_workers_tell_the_columns_of_functions_that_the_rank_does_not_import(tmp_path):
    own, here = "own_in_workers", "own_in_rank"
    (tmp_path / f"{own}.py").write_text(f"import sys\nassert 'pytest' not in sys.modules\n{OWN}")
    (tmp_path / f"{here}.py").write_text(OWN.replace("level", "weight").replace("answer", "level"))
    (tmp_path / "again.py").write_text(OWN)
    workers, rank = f"{tmp_path}/{own}.py:score", f"{tmp_path}/{here}.py:score"
    said = []
    apart = {"num_workers": 1, "in_process": (rank,)}
    for functions, settings in [((workers, rank), apart), ((f"{tmp_path}/again.py:score", rank), {})]:
        for row in ({"prompt": "x"}, {"prompt": "x", "level": 1}, {"prompt": "x", "level": 1, "answer": "1"}):
            with pytest.raises(ConfigError, match="row 0 has no column") as refused:
                check([row], functions, **settings)
            said.append(str(refused.value).replace(functions[0], "THE FUNCTION"))
    assert said[:3] == said[3:] and len(set(said)) == 3
    assert [message.split()[5] for message in said[:3]] == ["'level'", "'answer'", "'weight'"]


def test_a_row_that_lacks_a_column_is_named(own):
    for row, functions, message in (
        ({"prompt": "x"}, (), r"row 1 has no column 'answer' \(data.answer_key\), and other rows of its file have one"),
        ({"prompt": "x"}, ("arithmetic",), r"row 1 has no column 'answer' \(read by reward function 'arithmetic'\)"),
        (GOOD | {"answer": None}, ("math_verify",), "row 1: column 'answer' .* is null; fill it, or remove the row"),
        ({"prompt": "x", "answer": "1"}, "own", r"row 1 has no column 'level' \(a parameter of reward function"),
        ({"answer": "1"}, (), r"row 1 has no column 'prompt' \(data.prompt_key\); its columns are 'answer'"),
        (GOOD | {"prompt": None}, (), r"row 1: column 'prompt' \(data.prompt_key\) is null"),
    ):
        check([GOOD, GOOD | {"answer": None}], (own,))  # null is a user's own function's to read
        check([GOOD, GOOD | {"answer": None}])
        functions = (own,) if functions == "own" else functions
        with pytest.raises(ConfigError, match=message):
            check([GOOD, row], functions)


def test_every_answer_that_math_verify_reads_is_parsed_at_the_start():
    rows = [GOOD | {"answer": answer} for answer in ("\\$18.90", "\\$32,\\!348", "#### 4", "\\frac{1}{2}", 7, "(1, 2)")]
    check(rows, ["math_verify"])
    check([*rows, GOOD | {"answer": "????"}], ["arithmetic"])
    with pytest.raises(ConfigError, match=r"row 6: column 'gold' \(read by .*math_verify', by data.answer_key\): gold"):
        rows = [{"prompt": "x", "gold": row["answer"]} for row in [*rows, {"answer": "????"}]]
        check(rows, ["arithmetic", "math_verify"], answer_key="gold")


def test_a_renamed_answer_is_the_column_that_rewards_need():
    gold = {"prompt": "x", "gold": "1"}
    check([gold], ["arithmetic"], answer_key="gold")
    for row, message in [
        (GOOD, "row 1 has no column 'gold' .*by data.answer_key"),
        (gold | {"gold": None}, "row 1: column 'gold' .* is null"),
    ]:
        with pytest.raises(ConfigError, match=message):
            check([gold, row], ["arithmetic"], answer_key="gold")


def sections_of(config: Config) -> tuple:
    """Return what ``load_prompts`` reads of a configuration."""
    return config.data, config.sft, config.preference, config.environment, config.run.seed


def test_a_field_within_a_column_is_named_by_dots(tmp_path):
    """As in verl's Parquet files; a column of that very name comes first, and null within null is null."""
    inner = [{"ground_truth": "2", "style": "rule"}, {"ground_truth": None, "style": "rule"}, None]
    rows = [{"extra": {"prompt": "1+1="}, "reward_model": value} for value in inner]
    key = "reward_model.ground_truth"
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    names = [f"data.train={tmp_path / 'd.parquet'}", f"data.answer_key={key}", "data.prompt_key=extra.prompt"]
    hf_config = SimpleNamespace(vocab_size=200, max_position_embeddings=99)
    config = load_config(None, [*names, "data.shuffle=false", "reward.functions=math_verify"])
    found = load_prompts(*sections_of(config), CountingTokenizer(), hf_config, ()).next(3)
    assert [(x.text, x.columns["answer"]) for x in found] == [("1+1=", "2"), ("1+1=", None), ("1+1=", None)]
    assert found[0].columns == rows[0] | {"answer": "2"}
    for bad, message in (
        ({"reward_model": {"style": "rule"}}, f"row 1 has no column '{key}' .*'reward_model', 'reward_model.style'"),
        ({key: "3", "reward_model": 1}, None),
        ({"reward_model": 1}, f"row 1 has no column '{key}'"),
        ({key: None}, f"row 1: column '{key}' .* is null"),
    ):
        with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
            check([{"prompt": "x", **rows[0]}, {"prompt": "x", **bad}], ["math_verify"], answer_key=key)


def test_files_without_answers_stand_beside_files_with_them():
    with_answers = FilePart(path="a.jsonl", rows=[GOOD, GOOD], lines=[1, 3])
    without = FilePart(path="b.jsonl", rows=[{"prompt": "y"}], lines=[1])
    check(Rows([[with_answers], [without]]))
    some = FilePart(path="c.jsonl", rows=[GOOD, {"prompt": "z"}], lines=[1, 4])
    with pytest.raises(ConfigError, match=r"row 4 \(c.jsonl:4\) has no column 'answer'"):
        check(Rows([[with_answers], [without], [some]]))


def test_a_row_that_the_model_or_the_reward_cannot_take_is_refused(tmp_path):
    for vocab_size, context_tokens, row, message in (
        (60, 99, {"prompt": "=", "answer": "2"}, "the token 61, and the model's vocabulary ends at 59"),
        (200, 3, {"prompt": "1+1=", "answer": "2"}, "has 4 tokens and at most 2 are allowed"),
        (200, 99, {"prompt": "1+1=", "answer": None}, "column 'answer' .* is null"),
        (200, 99, {"prompt": "1+1=", "answer": "\\$"}, r"row 0 \(.*d.jsonl:1\): column 'answer' .* nothing that math-"),
    ):
        (tmp_path / "d.jsonl").write_text(json.dumps(row))
        config = load_config(None, [f"data.train={tmp_path / 'd.jsonl'}", "reward.functions=math_verify"])
        hf_config = SimpleNamespace(vocab_size=vocab_size, max_position_embeddings=context_tokens)
        with opened_reward(config.reward) as reward, pytest.raises(ConfigError, match=message):
            load_prompts(*sections_of(config), CountingTokenizer(), hf_config, reward.required_columns)
