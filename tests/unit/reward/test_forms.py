"""The forms of reward functions: each call is the one that verl, TRL or a user would make by hand."""

import json
import pathlib
import re
from contextlib import closing

import pytest

from megatron_rl.config import DataConfig, RewardConfig
from megatron_rl.data.columns import check_columns
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.data.rows import load_rows
from megatron_rl.errors import ConfigError
from megatron_rl.reward import Reward
from megatron_rl.reward.forms import in_form
from megatron_rl.users_code import resolve
from tests.unit.data.letters import LetterTokenizer
from tests.unit.reward.rig import rollout_of

PAGE = pathlib.Path(__file__).parents[3] / "docs/coming-from.md"
OWN = '''
import asyncio
SEEN = []
def bare(solution_str, ground_truth): return len(solution_str) - len(ground_truth)
async def later(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0)
    return bare(solution_str, ground_truth) + extra_info["nested"]["list"][-1] + len(data_source)
def batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [{"score": bare(*pair)} for pair in zip(solution_strs, ground_truths)]
async def async_batch(solution_strs, **given): return batch(solution_strs=solution_strs, **given)
def changes(solution_str, ground_truth, extra_info):
    extra_info["num_turns"] = (extra_info["num_turns"] or 0) + 1
    return extra_info["num_turns"]
def untyped(completions, prompts, answer, **columns):
    return [len(c[0]["content"]) - len(p[-1]["content"]) - len(a) for c, p, a in zip(completions, prompts, answer)]
def texts(completions: "list[str]", answer, **columns): return [len(c) - len(a) for c, a in zip(completions, answer)]
def without(solution_str, ground_truth): return {"acc": 1.0}
'''
ROWS = [
    {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"{a}+1="}],
        "reward_model": {"style": "rule", "ground_truth": str(a + 1)},
        "extra_info": {"nested": {"list": [0, a], "when": None}},
        "answer": str(a + 1),
    }
    for a in (1, 9, 99)
]
SAID = ("7", "", "a long one")


def rollouts_of(rows, **data):
    """Return SAID as answers to each row's prompt, as the data set gives it."""
    given = DataConfig(shuffle=False, **data)
    prompts = PromptDataset(rows, LetterTokenizer("any"), given, 0).next(len(rows))
    return [rollout_of(prompt, i, [*map(ord, text)], text) for prompt in prompts for i, text in enumerate(SAID)]


def scored(rollouts, name, **settings):
    with closing(Reward(RewardConfig(functions=(name,), **settings))) as reward:
        return [score.total for score in reward.score(rollouts)]


def by_hand(rows, name, form):
    """Call the function on the samples as verl or TRL documents it, one batch at a time."""
    function = resolve(name, {}, what="", form="")
    pairs = [(row, text) for row in rows for text in SAID]
    if form == "verl":
        found = []
        for row, text in pairs:
            extra = {**row.get("extra_info", {}), "num_turns": None, "rollout_reward_scores": {}}
            given = {"data_source": row["data_source"], "ground_truth": row["reward_model"]["ground_truth"]}
            found.append(function(solution_str=text, extra_info=extra, **given))
        return [one["score"] if isinstance(one, dict) else one for one in found]
    texts = [text for _, text in pairs]
    completions = [[{"role": "assistant", "content": text}] for text in texts] if form == "messages" else texts
    columns = {key: [row[key] for row, _ in pairs] for key in rows[0] if key != "prompt"}
    return function(completions=completions, prompts=[row["prompt"] for row, _ in pairs], **columns)


def blocks(folder):
    """Write the page's files into a folder and run those that make data; return their names."""
    found = {m[1]: m[0] for m in re.finditer(r"# (\w+\.py)\n.*?(?=^```)", PAGE.read_text(), re.S | re.M)}
    for name, text in found.items():
        (folder / name).write_text(text)
        if name.endswith("_data.py"):
            exec(compile(text, name, "exec"), {})
    return sorted(found)


def test_the_pages_functions_equal_a_call_by_hand_on_the_pages_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert blocks(tmp_path) == ["list_reward.py", "trl_data.py", "trl_reward.py", "verl_data.py", "verl_reward.py"]
    for name, data, form, words in (
        ("./verl_reward.py:compute_score", "verl.parquet", "verl", "is verl's: it is called with one sample"),
        ("./trl_reward.py:accuracy", "trl.jsonl", "messages", "are lists of chat messages"),
        ("./list_reward.py:score", "trl.jsonl", "text", "its completions are texts"),
    ):
        assert f"reward.functions={name} data.train={data}" in PAGE.read_text()
        rows = load_rows(data)[:12]
        found = scored(rollouts_of(rows), name)
        with closing(Reward(RewardConfig(functions=(name,)))) as reward:
            assert words in reward.recognised[0]
        assert found == by_hand(rows, name, form) and sum(found) == 1.0


def test_every_form_equals_a_call_by_hand_here_and_in_workers(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    rollouts = rollouts_of(ROWS)
    plain = [len(text) - len(row["answer"]) for row in ROWS for text in SAID]
    later = [len(text) - len(str(a + 1)) + a + len("sums") for a in (1, 9, 99) for text in SAID]
    wanted = {"bare": plain, "later": later, "batch": plain, "async_batch": plain, "changes": [1] * 9, "texts": plain}
    wanted["untyped"] = by_hand(ROWS, f"{tmp_path}/own.py:untyped", "messages")
    names = tuple(f"{tmp_path}/own.py:{name}" for name in wanted)
    for num_workers in (0, 1):
        config = RewardConfig(functions=names, completions="messages", num_workers=num_workers)
        with closing(Reward(config)) as reward:
            found = zip(*(score.by_function for score in reward.score(rollouts)), strict=True)
        assert {name: list(values) for name, values in zip(wanted, found, strict=True)} == wanted


def test_a_ground_truth_is_the_answer_where_there_is_no_field_of_verls(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    name = f"{tmp_path}/own.py:bare"
    rows = [{"prompt": "p", "final": {"value": "abc"}}]
    assert scored(rollouts_of(rows, answer_key="final.value"), name) == [-2, -3, 7]
    with closing(Reward(RewardConfig(functions=(name,)))) as reward:
        check_columns(rows, reward.required_columns, "prompt", "final.value")
        with pytest.raises(ConfigError, match="'reward_model.ground_truth' .ground_truth of reward .*data.answer_key"):
            check_columns(rows, reward.required_columns, "prompt", "answer")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f(solution_str, completions): 0", "takes solution_str and completions, so that its form is ambiguous"),
        ("def f(solution_str, solution_strs, ground_truth): 0", "takes solution_str and solution_strs"),
        ("def f(solution_str, ground_truth, url): 0", "parameter 'url' has no default and is none of data_source"),
    ],
)
def test_parameters_of_no_or_two_forms_are_refused(source, words):
    made: dict = {}
    exec(source, made)
    with pytest.raises(ConfigError, match=words):
        in_form("m:f", made["f"], "text")


@pytest.mark.parametrize(
    ("type_", "form"),
    [
        ("list[list[dict[str, str]]]", "MESSAGES"),
        ("'list[list[dict]]'", "MESSAGES"),
        ("list[list[ChatMessage]]", "MESSAGES"),
        ("list[str]", "TEXTS"),
        ("List[str]", "TEXTS"),
        ("list[str] | list[list[dict]]", "setting"),
        ("list", "setting"),
    ],
)
def test_a_type_says_texts_or_messages_and_else_the_setting(type_, form):
    made: dict = {}
    exec(f"from typing import List\nChatMessage = dict\ndef f(completions: {type_}, **columns): 0", made)
    for setting, meant in (("text", "TEXTS"), ("messages", "MESSAGES")):
        if "ChatMessage" not in type_:
            assert in_form("m:f", made["f"], setting)[0].name == (meant if form == "setting" else form)


def test_what_does_not_fit_names_the_way_out(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    rollouts, name = rollouts_of(ROWS), f"{tmp_path}/own.py"
    with closing(Reward(RewardConfig(functions=(f"{name}:untyped",), on_error="drop"))) as reward:
        reward.score(rollouts[:1])
        assert "set reward.completions=messages" in reward.last_errors[0].message
        assert reward.last_errors[0].kind == "TypeError"
    with closing(Reward(RewardConfig(functions=(f"{name}:without",), on_error="drop"))) as reward:
        assert reward.score(rollouts[:1])[0].error.startswith("its value is {'acc': 1.0}, a dict")
    config = RewardConfig(functions=(f"{name}:untyped",), completions="messages")
    with pytest.raises(ConfigError, match="several turns, which are given as one text: set reward.completions=text"):
        Reward(config, episodes=True)


def test_messages_settle_the_template_by_themselves():
    def dataset(rows, **data):
        return PromptDataset(rows, LetterTokenizer("any"), DataConfig(**data), 0)

    assert dataset(ROWS).data == dataset(ROWS, template="chat").data
    assert dataset(ROWS).next(3) == dataset(ROWS, template="chat").next(3)
    assert dataset([{"prompt": "x"}]).next(1) == dataset([{"prompt": "x"}], template="{prompt}").next(1)
    assert dataset([{"talk": json.loads('[{"role":"user","content":"x"},{"role":"assistant","content":"y"}]')}],
                   messages_key="talk").data.template == "chat"  # fmt: skip
    with pytest.raises(ConfigError, match="data.system_prompt='s' is for a chat template, .* are texts; set"):
        dataset([{"prompt": "x"}], system_prompt="s")
