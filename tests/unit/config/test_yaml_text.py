"""A configuration file that cannot work ends in one sentence with file, line, key and the way out, in bounded time."""

import os
import pathlib

import pytest

from megatron_rl.config import config_to_yaml, load_config
from megatron_rl.errors import ConfigError

BOMB = b"environment:\n  arguments:\n    a: &a [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    b"    %c: &%c [*%c, *%c, *%c, *%c, *%c, *%c]\n" % (98 + i, 98 + i, *(97 + i,) * 6) for i in range(20)
)
FAULTS = {
    "a tab": (b"train:\n\tnum_rollouts: 3\n", "line 2: a tab stands there; indent with spaces"),
    "a section twice": (b"train: {epochs: 1}\nloss: {}\ntrain: {}\n", "line 3: the key 'train' is already on line 1"),
    "a key twice": (b"train:\n  epochs: 3\n  epochs: 4\n", "line 3: the key 'epochs' is already on line 2"),
    "an unknown alias": (b"critic: {lr: *lr}\n", "line 1: no anchor is called &lr; put quotes around a text"),
    "an alias of itself": (b"environment:\n  arguments: &a {b: *a}\n", "line 2: more than 20 levels"),
    "a bomb": (BOMB, "line 3: more than 10000 values, aliases written out"),
    "a bomb of references": (
        b"environment:\n  arguments:\n    a0: 'xxxxxxxxxx'\n"
        + b"".join(b"    a%d: '%s'\n" % (i + 1, b"${environment.arguments.a%d}" % i * 50) for i in range(9)),
        "becomes a text of more than 100000 characters",
    ),
    "Python": (b"run: {name: !!python/object/apply:os.system [ls]}\n", "line 1: the tag '!!python/object/apply:os.sys"),
    "a tag": (b"run:\n  seed: !!int abc\n", "line 2: the tag '!!int' is not read; remove it"),
    "UTF-16": ("train: {}".encode("utf-16"), "line 1: not UTF-8"),
    "Latin-1": (b"run:\n  name: caf\xe9\n", "line 2: not UTF-8 (byte 17); save it as UTF-8"),
    "NUL": (b"run:\n name: \x00\n", "line 2: the character U+0000 is not allowed there"),
    "NUL, escaped": (b'run: {name: "\\0"}\n', "line 1: '\\x00' holds NUL"),
    "half a character": (b'run: {name: "\\ud800"}\n', "line 1: '\\ud800' holds NUL or half a surrogate pair"),
    "a list": (b"- 1\n", "must hold sections with keys"),
    "a text": (b"hello\n", "must hold sections with keys, as in 'train: {num_rollouts: 3}', and it holds 'hello'"),
    "two documents": (b"run: {name: x}\n---\nrun: {}\n", "line 2: a second document begins there; keep one"),
    "many values": (b"run: [" + b"x," * 120_000 + b"]", "line 1: more than 10000 values"),
    "deep brackets": (b"run: " + b"[" * 100_000, "line 1: more than 20 levels"),
    "deep lines": (b"\n".join(b" " * i + b"a:" for i in range(500)), "line 21: more than 20 levels"),
    "an open bracket": (b"run: {name: x\ntrain: {}\n", "line 2: not valid YAML"),
    "an indent": (b"train:\n  epochs: 3\n loss: 2\n", "line 3: not valid YAML"),
    "a colon": (b"run:\n  name: a: b\n", "line 2: not valid YAML: mapping values are not allowed here"),
    "a number for a key": (b"environment: {arguments: {1: 2}}\n", "line 1: the key '1' is not a text; put quotes"),
    "a flag for a key": (b"on: 3\n", "line 1: the key 'on' is not a text"),
    "the merge key": (b"run: &a {}\ntrain:\n  <<: *a\n", "line 3: the merge key << is not read"),
    "6,000 digits": (b"run: {seed: " + b"9" * 6000 + b"}\n", "(6002 characters) cannot be read as a number"),
    "a large file": (b"#" * 300_000, "has 300000 bytes; at most 262144 are read"),
    "an unknown key": (b"train:\n  num_rollout: 3\n", "line 2: unknown config key train.num_rollout (value 3)"),
    "an old key": (b"train:\n  steps: 3\n", "line 2: config key train.steps (value 3) is called train.num_rollouts"),
    "a value out of range": (b"run: {}\ntrain:\n  epochs: 0\n", "line 3: train.epochs=0 must be at least 1"),
    "NaN as a word": (b"optimizer: {lr: nan}\n", "line 1: optimizer.lr=nan must be at least 0"),
    "NaN in a list": (b"reward: {functions: f, weights: [.nan]}\n", "line 1: reward.weights=nan must be at least -1e6"),
    "a time": (b"run: {seed: 1:30}\n", "run.seed='1:30' must be a whole number, at least 0 and at most 2147483647"),
    "a flag for a text": (b"run: {name: yes}\n", "run.name=true must be a text; put quotes around it"),
    "a text for a flag": (b"data: {shuffle: maybe}\n", "data.shuffle='maybe' must be true or false"),
    "a list for a number": (b"train: {epochs: [3]}\n", "train.epochs=[3] must be a whole number"),
    "keys for a text": (b"data: {answer_key: {a: b}}\n", "data.answer_key={'a': 'b'} must be a text"),
    "one of two": (b"optimizer: {betas: [0.9]}\n", "optimizer.betas=[0.9] must be a list of 2 values, and it has 1"),
    "a text for sets": (b"eval: {sets: a.jsonl}\n", "eval.sets='a.jsonl' must be keys with values"),
    "two keys at odds": (b"train:\n  epochs: 2\n", "line 2: train.num_rollouts=100 and train.epochs=2"),
    "a place to fill": (b"run: {name: '???'}\n", "run.name=??? is a placeholder"),
    "a reference to itself": (b"run: {name: '${run.name}'}\n", "line 1: run.name='${run.name}' refers to itself"),
    "an unknown reference": (b"run: {name: '${no.such}'}\n", "'no.such' names no setting; write ${section.key}"),
    "an unset variable": (b"run: {name: '${oc.env:NO_SUCH}'}\n", "the environment has no variable 'NO_SUCH'; set it"),
    "a long value": (b"run: {seed: " + b"y" * 10_000 + b"}\n", "… (10002 characters) must be a whole number"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_its_file_and_line(fault: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(FAULTS[fault][0])
    with pytest.raises(ConfigError) as error:
        load_config(path)
    message = str(error.value)
    assert message.startswith(str(path)) and FAULTS[fault][1] in message, message
    assert len(message.removeprefix(str(path))) < 400 and "\n" not in message


def test_what_is_no_file_is_named(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    for path, words in {
        ".": "cannot be read: Is a directory",
        "pipe": "is no regular file; a YAML file is wanted",
        "no.yaml": rf"cannot be read: No such file or directory \(working directory {tmp_path}\)",
        "a\0b": "embedded null byte",
        "x" * 5000: r"… \(5000 characters\) cannot be read: File name too long",
    }.items():
        with pytest.raises(ConfigError, match=words):
            load_config(path)


def test_what_is_meant_is_read_and_written_back(tmp_path: pathlib.Path) -> None:
    for text, key, value in (
        ("optimizer: {lr: &lr 1e-4}\ncritic: {lr: *lr}\n", "critic.lr", 1e-4),
        ("\ufefftrain: {num_rollouts: 1e3}\n", "train.num_rollouts", 1000),
        ("train:\nrun: {name: 2020-01-01}\n", "run.name", "2020-01-01"),
        ("run: {seed: '7'}\n", "run.seed", 7),
        ("run: {name: a, dir: '/x/${run.name}'}\n", "run.dir", "/x/a"),
        ("run: {dir: '/x/${run.name}'}\n", "run.dir", "/x/run"),
        ("optimizer: {lr: 0.5}\ncritic: {lr: '${optimizer.lr}'}\n", "critic.lr", 0.5),
        ("run: {seed: '${oc.env:NO_SUCH,7}'}\n", "run.seed", 7),
        ("reward: {functions: my:score, weights: 2}\n", "reward.weights", (2.0,)),
        ("metrics: {progress: off}\n", "metrics.progress", False),
        ("environment: {arguments: {a: '1e-3', b: 'off', c: [1, {d: 0.5}], e: '010'}}\n", "environment.max_turns", 8),
    ):
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        config = load_config(path)
        section, name = key.split(".")
        assert vars(vars(config)[section])[name] == value
        path.write_text(config_to_yaml(config), encoding="utf-8")
        assert load_config(path) == config


def test_an_overrides_fault_is_named_with_the_right_spelling() -> None:
    for override, words in (
        ("--train.steps=3", "without '-' before it, as in train.num_rollouts=3"),
        ("+train.steps=3", "without '+' before it, as in train.num_rollouts=3"),
        ("++trian.num_rollouts=3", "without '+' before it, as in train.num_rollouts=3"),
        ("train.num_rollouts", "is not of the form section.key=value, without spaces around the ="),
        ("train.num_rollouts=", "gives no value; write null for none"),
        ("train..epochs=3", "unknown config key train..epochs "),
        ("train.epochs.x=3", "train.epochs={'x': 3} must be a whole number"),
        ("train=null", "train=null must be a section with keys"),
        ("run.name=\udcff", "is not UTF-8"),
        ("reward.functions=[a,b", "override 'reward.functions=[a,b': not valid YAML"),
        ("loss.policy=" + "x" * 5000, "(5002 characters) is not known; choose one of ppo"),
        ("train.prompts_per_rollout=10**18", "='10**18' must be a whole number, at least 1 and at most 1e6"),
    ):
        with pytest.raises(ConfigError) as error:
            load_config(None, [override])
        assert words in str(error.value) and len(str(error.value)) < 400, str(error.value)


def test_a_text_needs_no_quotes_in_an_override(tmp_path: pathlib.Path) -> None:
    for written in ("Q: {prompt}", "'Q: {prompt}'", "{prompt}", "chat"):
        assert load_config(None, [f"data.template={written}"]).data.template == written.strip("'")
    assert load_config(None, ["run.name=1.10"]).run.name == "1.10"
    assert load_config(None, ["run.dir=null"]).run.dir is None
    assert load_config(None, ["data.train=*.jsonl"]).data.train == ("*.jsonl",)
    assert load_config(None, ["data.train=[a.jsonl, '*.csv']"]).data.train == ("a.jsonl", "*.csv")
    # one in place of a line is not blamed on it
    path = tmp_path / "run.yaml"
    path.write_text("train:\n  epochs: 1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^on the command line: train\.epochs=0 must be"):
        load_config(path, ["train.epochs=0"])
