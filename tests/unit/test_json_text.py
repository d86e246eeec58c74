"""Odd JSON is refused in one sentence that names the file and the place."""

from __future__ import annotations

import json
import os

import pytest

from megatron_rl.errors import CheckpointError, ConfigError
from megatron_rl.json_text import check, field, parse_json, read_json, read_object

REFUSED = {
    b'{"a": 1': "not valid JSON: Expecting ',' delimiter (column 8)",
    b'{\n"a": tru}': "not valid JSON: Expecting value (line 2, column 6)",
    b"": "not valid JSON: Expecting value (column 1)",
    b'"\xff"': "not UTF-8 (byte 2); save it as UTF-8",
    b'{"a": 1, "b": 2, "a": 3}': "the key 'a' stands twice in one object; keep one of the two",
    b'{"a": NaN}': "NaN is no JSON number",
    b"-Infinity": "-Infinity is no JSON number",
    b"1e999": "the number 1e999 is beyond float64",
    b"9" * 5000: "the number 99999999999999999999… has 5000 characters; 400 is the most that is read",
    b"[" * 100_000: "not read: brackets are nested deeper than 100 levels",
    b"[" * 101 + b"]" * 101: "brackets are nested deeper than 100 levels",
    b'{"a": [0, "x\\ud800y"]}': r"a[1] holds half a surrogate pair ('x\ud800y'), which is no character",
    b'{"\\udfff": 0}': r"\udfff holds half a surrogate pair ('\udfff'), which is no character",
}


def test_odd_text_is_refused_with_its_place_and_files_that_cannot_be_read_are_named(tmp_path) -> None:
    for text, message in REFUSED.items():
        with pytest.raises(ConfigError) as caught:
            parse_json(text, "x.json")
        assert str(caught.value) == f"x.json: {message}"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_text("[" + " " * 100 + "]")
    for name, message in {
        "absent": "cannot be read: No such file or directory",
        "pipe": "is no regular file; a JSON file is wanted",
        "large": "has 102 bytes; at most 50 are read",
    }.items():
        with pytest.raises(CheckpointError, match=f"^{tmp_path / name} {message}$"):
            read_json(tmp_path / name, most_bytes=50, error=CheckpointError)
    with pytest.raises(ConfigError, match="must be an object, and it is \\['.*… \\(102 characters\\)$"):
        (tmp_path / "list").write_text(json.dumps(["x" * 98]))
        read_object(tmp_path / "list")


@pytest.mark.parametrize(
    "text", ['{"a": [1, -2.5e3, true, null, "\\ud83d\\ude00 é"]}', "[" * 100 + "]" * 100, '"' + "[" * 500 + '"']
)
def test_what_json_allows_is_read_as_json_reads_it(text: str) -> None:
    assert parse_json(text, "x.json") == parse_json(b"\xef\xbb\xbf" + text.encode(), "x.json") == json.loads(text)


def test_fields_are_checked() -> None:
    values = {"n": 3, "x": 0.5, "flag": True, "name": "a"}
    assert field(values, "n", int, "s.json", least=3, most=3) == 3
    assert field(values, "n", float, "s.json") == 3
    faults = {
        ("m", int): "s.json lacks the field m",
        ("flag", int): "s.json: flag must be an integer, and it is True",
        ("x", int): "s.json: x must be an integer, and it is 0.5",
        ("name", dict): "s.json: name must be an object, and it is 'a'",
    }
    for (name, kind), message in faults.items():
        with pytest.raises(ConfigError, match=f"^{message}$"):
            field(values, name, kind, "s.json")
    with pytest.raises(ConfigError, match="^s.json: n must be at least 4, and it is 3$"):
        field(values, "n", int, "s.json", least=4)
    with pytest.raises(ConfigError, match="^n must be 0 to 2, and it is 3$"):
        check(3, "n", int, least=0, most=2)
