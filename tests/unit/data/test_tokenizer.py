"""An odd tokenizer's folder ends in one sentence that names the file."""

import json
import pathlib
import re
import shutil
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.errors import ConfigError

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "tools"))

import make_tokenizer

TOKENS = 16  # EOS, PAD and 14 characters
TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
Change = Callable[[pathlib.Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer.save_tokenizer(make_tokenizer.make_characters("0123456789+-= "), folder)
    return folder


def edit(name: str, change: Callable[[dict], object]) -> Change:
    def edited(folder: pathlib.Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return edited


def settings(**values: object) -> Change:
    return edit(SETTINGS, lambda content: content.update(values))


def model(**values: object) -> Change:
    return edit(TOKENIZER, lambda content: content["model"].update(values))


def vocabulary(**values: object) -> Change:
    return edit(TOKENIZER, lambda content: content["model"]["vocab"].update(values))


def raw(name: str, change: Callable[[bytes], bytes]) -> Change:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def ahead(fields: bytes) -> Change:
    return raw(SETTINGS, lambda content: content.replace(b"{", b"{" + fields, 1))


REFUSED: dict[str, tuple[Change, str]] = {
    "no tokens": (lambda folder: ((folder / TOKENIZER).unlink(), settings(tokenizer_class="Qwen2Tokenizer")(folder)),
                  "it holds none of tokenizer.json, vocab.json"),
    "no settings": (lambda folder: (folder / SETTINGS).unlink(), "has no eos_token, so no completion would end"),
    "cut short": (raw(TOKENIZER, lambda b: b[: len(b) // 2]), "tokenizer.json: not valid JSON: .*line 48"),
    "a list": (raw(TOKENIZER, lambda b: b"[]"), r"tokenizer.json must be an object, and it is \[\]"),
    "an empty object": (raw(TOKENIZER, lambda b: b"{}"), "tokenizer.json lacks the field model"),
    "5,000 digits": (ahead(b'"n":' + b"9" * 5000 + b","), "tokenizer_config.json: the number 9+… has 5000 characters"),
    "a folder in place of the file": (lambda folder: ((folder / TOKENIZER).unlink(), (folder / TOKENIZER).mkdir()),
                                      "tokenizer.json cannot be read: Is a directory"),
    "a vocabulary that is a number": (model(vocab=3), "tokenizer.json: model.vocab must be an object, and it is 3"),
    "an id of 2³¹": (vocabulary(**{"5": 2**31}),
                     "has 1 of 16 ids beyond .* vocab_size=16, 2147483648 of '5' the largest"),
    "an id below 0": (vocabulary(**{"5": -1}), "the id of '5' must be at least 0, and it is -1"),
    "an id that is no integer": (vocabulary(**{"5": 1.5}), "the id of '5' must be an integer, and it is 1.5"),
    "an id twice": (vocabulary(**{"5": 3}), "gives the id 3 to 2 tokens, '1', '5'; each needs one of its own"),
    "a token more than the model has": (
        lambda folder: (folder / "added_tokens.json").write_text('{"<x>": 16}'),
        "added_tokens.json has 1 of 1 ids beyond the model's vocab_size=16, 16 of '<x>' the largest",
    ),
    "a token more by its settings": (settings(added_tokens_decoder={"500": {"content": "<far>", "special": True}}),
                                     "has 1 of 17 ids beyond the model's vocab_size=16, 16 of '<far>' the largest"),
    "an end that is no token": (settings(eos_token="<end>"), "has the eos_token '<end>', which is none of its tokens"),
    "an end that is a number": (settings(eos_token=5), "no tokenizer can be loaded .*TypeError"),
    "a template that is a number": (settings(chat_template=5), "chat_template must be a text, and it is 5"),
    "a length that is a text": (settings(model_max_length="x"), "model_max_length must be a number, and it is 'x'"),
    "a model of no kind": (model(type="None"), "no tokenizer can be loaded from .*Exception: "),
    "a pattern that is none": (
        edit(TOKENIZER,
             lambda content: content.update(
                 pre_tokenizer={"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": "(("}}
             )),
        "no tokenizer can be loaded from .*unmatched parenthesis",
    ),
}


def load(folder: pathlib.Path, vocab_size: int = TOKENS):
    return load_tokenizer(SimpleNamespace(tokenizer_path=None, hf_path=str(folder)), vocab_size)


@pytest.mark.parametrize("name", REFUSED)
def test_an_odd_tokenizer_is_refused_by_file(name: str, whole: pathlib.Path, tmp_path: pathlib.Path) -> None:
    change, message = REFUSED[name]
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    change(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert str(tmp_path) in str(caught.value) and len(str(caught.value)) < 600


def test_a_tokenizer_may_be_smaller_than_the_model_not_larger_and_no_network_is_asked(whole: pathlib.Path) -> None:
    assert len(load(whole, TOKENS)) == len(load(whole, TOKENS + 100)) == TOKENS
    with pytest.raises(ConfigError, match="model.vocab has 1 of 16 ids beyond the model's vocab_size=15, 15 of "):
        load(whole, TOKENS - 1)
    with pytest.raises(ConfigError, match="'Qwen/Qwen3-8B': there is no such directory"):
        load(pathlib.Path("Qwen/Qwen3-8B"))
