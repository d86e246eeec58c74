"""Checks data/rows.py: every form of a file gives the rows that were written, and every fault one sentence."""

import gzip
import json
import os
from array import array

import pytest

from megatron_rl.data import rows as rows_module
from megatron_rl.data.rows import load_rows
from megatron_rl.errors import ConfigError

ROWS = [{"prompt": "a\u2028b", "answer": 'say "4", or\n5'}, {"prompt": "é", "answer": None}]


def lines_of(rows: list[dict]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write(folder, name: str, content: str | bytes):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_rows_of_a_file_equal_what_was_written(tmp_path):
    for name, content in (
        ("d.jsonl", lines_of(ROWS) + "\n  \n"),
        ("of_another_name.txt", "\ufeff" + lines_of(ROWS).replace("\n", "\r\n")),
        ("lines.json", lines_of(ROWS)),
        ("list.json", "\ufeff \n" + json.dumps(ROWS, indent=1)),
        ("d.csv", '\ufeffprompt,answer\na\u2028b,"say ""4"", or\n5"\n\né,\n'),
        ("d.tsv", 'prompt\tanswer\r\na\u2028b\t"say ""4"", or\n5"\r\né\t\r\n'),
    ):
        assert list(load_rows(write(tmp_path, name, content))) == ROWS


def test_rows_of_parquet_and_of_a_saved_data_set_equal_what_was_written(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="pip install pyarrow: make install does, a bare environment need not")
    import datetime
    import decimal

    import pyarrow.parquet

    said = [{"role": "user", "n": 1}, {"call": {"name": "f", "x": {"city": "Rome"}}}, {"call": {}, "of": [None]}]
    said[0] |= {"content": None, "tool_calls": [{"name": "f"}]}  # the one null that is kept
    rows = [{"prompt": f"{i}", "chat": [said[i % 3]], "x": i / 4, "known": [True, None][i % 2]} for i in range(2500)]
    dated = [{**row, "at": datetime.date(2026, 1, 2), "price": decimal.Decimal("1.50")} for row in rows]
    wanted = [{**row, "at": "2026-01-02", "price": "1.50"} for row in rows]
    table = arrow.Table.from_pylist(dated)
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet", row_group_size=700)
    pyarrow.parquet.write_table(table, tmp_path / "of_another_name")
    assert list(load_rows(tmp_path / "d.parquet")) == wanted
    assert list(load_rows(tmp_path / "of_another_name")) == wanted
    assert load_rows(tmp_path / "d.parquet").place(7) == f"{tmp_path}/d.parquet, row 7"
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    data = datasets.Dataset.from_list(rows)
    data.filter(lambda row: row["known"]).save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "splits")
    assert list(load_rows(tmp_path / "saved")) == [row for row in rows if row["known"]]
    assert list(load_rows(tmp_path / "splits" / "test")) == rows
    with pytest.raises(ConfigError, match="holds several splits; name one: .*/splits/train, .*/splits/test"):
        load_rows(tmp_path / "splits")


def test_files_and_patterns_follow_one_another_and_every_row_knows_its_place(tmp_path):
    for number in (2, 1):
        write(tmp_path, f"part{number}.jsonl", f'\n{{"n": {number}}}\n\n{{"n": {number}5}}\n')
    write(tmp_path, "more.json", '[{"n": 7}]')
    rows = load_rows([str(tmp_path / "part*.jsonl"), str(tmp_path / "more.json")])
    assert [row["n"] for row in rows] == [1, 15, 2, 25, 7]
    places = [rows.place(row).removeprefix(f"{tmp_path}/") for row in range(5)]
    assert places == ["part1.jsonl:2", "part1.jsonl:4", "part2.jsonl:2", "part2.jsonl:4", "more.json, row 0"]
    assert rows.source_ends == (4, 5)
    # lines are kept as numbers, of eight bytes each
    [(first, part)] = load_rows(write(tmp_path, "d.jsonl", lines_of(ROWS))).parts
    assert (first, part.lines) == (0, array("Q", [1, 2]))


DEEP = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def test_a_file_that_cannot_be_read_is_named_with_its_line(tmp_path):
    for name, content, message in (
        ("d.jsonl", b'{"a": 1}\n{"prompt": \n', "d.jsonl:2: not valid JSON: Expecting value"),
        ("d.jsonl", b'{"a": 1}\n[1, 2]\n', "d.jsonl:2: a JSON list, not an object"),
        ("d.jsonl", b'{"a": 1}\n{"prompt": "\xff"}\n', "d.jsonl:2: not UTF-8"),
        ("d.jsonl", b'{"prompt": "\\ud800"}\n', "d.jsonl:1: prompt holds half a surrogate pair"),
        ("d.jsonl", DEEP, "d.jsonl:1: .*nested deeper than 100 levels"),
        ("d.jsonl", '{"prompt": "a"}\n'.encode("utf-16"), "d.jsonl:1: not UTF-8"),
        ("d.jsonl", gzip.compress(b"{}", mtime=0), r"d.jsonl is compressed \(gzip\); unpack it"),
        ("d.jsonl", b"", "data.train='.*d.jsonl' has no rows"),
        ("d.jsonl", b"\n \n", "data.train='.*d.jsonl' has no rows"),
        ("d.json", b'[{"a": 1}, 2]', "d.json, row 1: a JSON int, not an object"),
        ("d.json", b'[{"a": 1}', "d.json: not valid JSON"),
        ("d.json", b"[]", "data.train='.*d.json' has no rows"),
        ("d.csv", b"prompt,answer\n", "data.train='.*d.csv' has no rows"),
        ("d.csv", b"prompt,prompt\n1,2\n", "d.csv:1: the column 'prompt' twice"),
        ("d.csv", b"prompt,\n1,2\n", "d.csv:1: a column without a name"),
        ("d.csv", b'prompt,answer\n"a\nb",1\n1,2,3\n', "d.csv:4: 3 cells, and the first line names 2 columns"),
        ("d.csv", b'prompt,"an\nswer"\n1,2,3\n', "d.csv:3: 3 cells"),
        ("d.csv", b'prompt,answer\n1,2\n"x"y,3\n', "d.csv:3: not valid CSV"),
        ("d.csv", b'prompt,answer\n1,2\n"never closed,3\n', "d.csv:3: not valid CSV"),
        ("d.csv", b"prompt,answer\n1,\xe9\n", "d.csv:2: not UTF-8"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_rows(write(tmp_path, name, content))


def test_a_line_without_end_is_not_read_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "MOST_LINE_BYTES", 1000)
    path = write(tmp_path, "d.jsonl", b'{"a": 1}\n' + b"x" * 10_000)
    with pytest.raises(ConfigError, match="d.jsonl:2: the line has more than 1000 bytes"):
        load_rows(path)
    with pytest.raises(ConfigError, match="d.csv:1: the line has more than 1000 bytes"):
        load_rows(write(tmp_path, "d.csv", b"x" * 10_000))


def test_many_columns_are_read_in_time_that_grows_with_them(tmp_path):
    """Comparing each of 200,000 names with all others takes minutes."""
    names = [f"c{i}" for i in range(200_000)]
    row, head = dict.fromkeys(names, "x"), ",".join(names)
    cells = "\n" + ",".join("x" for _ in names)
    assert list(load_rows(write(tmp_path, "d.jsonl", json.dumps(row)))) == [row]
    assert list(load_rows(write(tmp_path, "d.csv", head + cells))) == [row]
    with pytest.raises(ConfigError, match="d.csv:1: the column 'c199999' twice"):
        load_rows(write(tmp_path, "d.csv", f"{head},c199999{cells},x"))
    with pytest.raises(ConfigError, match="d.jsonl:1: the key 'c199999' stands twice"):
        load_rows(write(tmp_path, "d.jsonl", json.dumps(row)[:-1] + ', "c199999": 1}'))


def test_paths_that_are_no_data_name_the_key(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path, message in [
        (tmp_path / "none.jsonl", "eval.path='.*none.jsonl' does not exist"),
        (tmp_path, "is a directory that datasets' save_to_disk did not write"),
        (tmp_path / "pipe.jsonl", "pipe.jsonl' is no regular file"),
        (tmp_path / "*.parquet", "parquet' matches no file"),
        ("a\0b", "holds a character that no path has"),
        ("x" * 5000, r"eval.path='x{199}… \(5002 characters\) cannot be read: File name too long"),
        ("", "eval.path is empty"),
        ([], "eval.path is empty"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_rows(path, key="eval.path")


def test_damaged_tables_are_named(tmp_path):
    pytest.importorskip("pyarrow", reason="pip install pyarrow: make install does, a bare environment need not")
    import pyarrow
    import pyarrow.parquet

    def written(name: str, **columns):
        arrays = [value if isinstance(value, pyarrow.Array) else pyarrow.array(value) for value in columns.values()]
        names = [key.rstrip("_") for key in columns]
        pyarrow.parquet.write_table(pyarrow.Table.from_arrays(arrays, names), tmp_path / name)
        return (tmp_path / name).read_bytes()

    good = written("good.parquet", prompt=["a" * 5000, "b"])
    nulls = {f"c{i}": pyarrow.nulls(700_000) for i in range(300)}
    not_text = pyarrow.array([b"ok", b"\xff\xfe"]).cast(pyarrow.binary()).view(pyarrow.string())
    for name, content, message in [
        ("cut.parquet", good[: len(good) // 2], "cut.parquet is no Parquet file that pyarrow reads"),
        ("empty.parquet", b"", "empty.parquet is no Parquet file that pyarrow reads"),
        ("text.parquet", b'{"prompt": "a"}\n', "text.parquet is no Parquet file that pyarrow reads"),
        ("none.parquet", written("x", prompt=pyarrow.array([], pyarrow.string())), "none.parquet' has no rows"),
        ("twice.parquet", written("x", a=["b"], a_=["c"]), "has the column 'a' twice"),
        ("nulls.parquet", written("x", **nulls), "says that it has 700000 rows of 300 columns; at most 10000000 rows"),
        ("bytes.parquet", written("x", image=[b"\x89PNG"]), "bytes.parquet, row 0: column 'image' holds bytes"),
        ("latin.parquet", written("x", prompt=not_text), "a text of rows 0 to 1 is not UTF-8"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_rows(write(tmp_path, name, content))


def test_a_missing_library_is_named_with_its_pip_line(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ConfigError, match="d.parquet is read by the package pyarrow.*pip install pyarrow"):
        load_rows(write(tmp_path, "d.parquet", b"PAR1"))
    for name in ("state.json", "dataset_info.json"):
        write(tmp_path, name, "{}")
    with pytest.raises(ConfigError, match="is read by the package datasets.*pip install datasets"):
        load_rows(tmp_path)
