"""Checks what the chat template is given beside a row's messages: tools, documents and variables, by their names."""

import json
import re

import pytest

from megatron_rl.config import DataConfig
from megatron_rl.data.chat import Observations
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.errors import ConfigError
from tests.unit.data.templates import CHATML, tokenizer_of

TEMPLATE = "{{ tools | tojson }}{{ documents | tojson }}{{ mood }}{{ enable_thinking }}" + CHATML
CALL = {"type": "function", "function": {"name": "f", "parameters": {"x": {"type": "number", "default": None}}}}
NULLS = {"mood": 7, "enable_thinking": None}  # as Arrow fills them in
ROW = {"prompt": [{"role": "user", "content": "go"}]}


def texts(*rows: dict, jinja: str = TEMPLATE, **data) -> list[str]:
    source = PromptDataset([ROW | row for row in rows], tokenizer_of(jinja), DataConfig(**data), 0)
    return [prompt.text for prompt in source.next(len(rows))]


def test_a_prompt_equals_the_templates_rendering_with_the_rows_columns(caplog) -> None:
    own = [{"tools": [CALL]}, {"documents": [{"title": "a", "text": "b"}]}, {"mood": 7}, {}, {"enable_thinking": True}]
    rows = [*own, {"tools": json.dumps([CALL])}, {"tools": [], "chat_template_kwargs": NULLS}]
    wanted = [*own, own[0], own[2]]
    names = ("tools", "documents", "mood", "enable_thinking", "chat_template_kwargs")
    data = dict(template="chat", shuffle=False, template_columns=names, template_variables={"enable_thinking": False})
    rendered = [tokenizer_of(TEMPLATE).apply_chat_template(ROW["prompt"], tokenize=False, add_generation_prompt=True,
                                                           **({"enable_thinking": False} | beside))
                for beside in wanted]
    assert texts(*rows, **data) == rendered and not caplog.records
    between = Observations(tokenizer_of(CHATML + "{{ mood }}"), "chat", "tool", {"mood": 7}).token_ids("1", None)
    assert tokenizer_of(None).decode(between).endswith("assistant\n7")


def test_columns_of_a_known_meaning_that_nobody_reads_are_warned_of(caplog) -> None:
    for row, data, words in (
        ({"tools": [CALL]}, dict(template="{prompt}"), "row 1: column 'tools' is not read: .*data.template=chat"),
        ({"tools": [CALL]}, dict(template="chat"), "row 1: column 'tools' .*chat template does not name it"),
        ({"messages": ROW["prompt"]}, dict(template="chat"), "column 'messages' .*data.messages_key"),
        ({"images": ["x.png"]}, dict(template="chat"), "column 'images' .*texts alone"),
    ):
        caplog.clear()
        prompt = {"prompt": "go"} if data["template"] != "chat" else {}
        texts({"tools": None, **prompt}, row | prompt, jinja=CHATML, **data)
        [record] = caplog.records
        assert re.search(words, record.getMessage())


def test_messages_that_are_left_out_or_say_nothing_are_warned_of_once(caplog) -> None:
    jinja = "{% for m in messages if m.role != 'developer' %}{{ m.content }}<|im_end|>{% endfor %}"
    whole = [{"role": "developer", "content": "be"}, *ROW["prompt"], {"role": "assistant", "content": " "}]
    row = {"messages": json.dumps(whole), **ROW}  # a text of JSON
    source = PromptDataset([row, row], tokenizer_of(jinja), DataConfig(template="chat", messages_key="messages"), 0)
    assert [x.prompt.text for x in source.next_solutions(2)] == ["go<|im_end|>"] * 2
    left_out, nothing = (record.getMessage() for record in caplog.records)
    assert "row 0: column 'messages'" in left_out and "does not write message 0, of role developer" in left_out
    assert "without text and tool_calls (its fields: role, content)" in nothing


def test_what_is_no_variable_names_row_and_column() -> None:
    for row, columns, words in (
        ({"tools": CALL}, ("tools",), "row 0: column 'tools' .*must be a list of objects"),
        ({"tools": "[1]"}, ("tools",), "must be a list of objects"),
        ({"tools": "[{"}, ("tools",), "row 0: column 'tools'"),
        ({"chat_template_kwargs": [1]}, ("chat_template_kwargs",), "must be an object"),
        ({"chat_template_kwargs": {"tokenize": True}}, ("chat_template_kwargs",), "sets 'tokenize'"),
        ({}, ("mood",), "data.template_columns names 'mood', which no row has"),
        ({}, ("messages",), "data.template_columns names 'messages'"),
    ):
        with pytest.raises(ConfigError, match=words):
            texts(row, template="chat", template_columns=columns)
    with pytest.raises(ConfigError, match="data.template_variables=.*set data.template=chat"):
        DataConfig(template="{prompt}", template_variables={"mood": 7})
