"""The rows of data files in JSON Lines, JSON, CSV, Parquet and the datasets library's folders, with bounds on memory.

A row is a dict of JSON values: texts, numbers, true and false, null, lists and objects. Every fault
raises a ConfigError that names the file, and its line or row.

Arrow gives all objects of a column the same fields, and fills missing fields with null. Within a
list, such as messages or tools, objects lose their null fields, so that they are as in JSON. The
exception is a message's ``content`` beside its tool calls, which stays null. A column that is
itself an object keeps its null fields.
"""

from __future__ import annotations

import csv
import glob
import importlib
import itertools
import os
import pathlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

from megatron_rl.errors import ConfigError, quoted
from megatron_rl.json_text import first_double, parse_json, read_json, read_object

MOST_LINE_BYTES = 64 * 2**20  # of a line of text
# Limits of an Arrow table, in which a few bytes can stand for any number of rows or nulls.
MOST_TABLE_ROWS, MOST_TABLE_CELLS = 10_000_000, 200_000_000
FORMS = "JSON Lines (.jsonl), JSON (.json), CSV (.csv, .tsv), Parquet (.parquet) or a folder of datasets' save_to_disk"
_ROWS_PER_BATCH = 1024
_COMPRESSED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FilePart:
    """Holds the rows of one file or folder.

    path: the file or folder, as the configuration names it.
    lines: the line on which each row begins, from 1; None for a form without lines, such as
        Parquet.
    """

    path: str
    rows: list[dict]
    lines: array | None = None

    def place(self, index: int) -> str:
        """Return where row ``index`` of this file stands, for errors: ``train.jsonl:8`` or ``train.parquet, row 7``.

        Lines count from 1, rows from 0.
        """
        return f"{self.path}, row {index}" if self.lines is None else f"{self.path}:{self.lines[index]}"


class Rows(Sequence[dict]):
    """Holds the rows of a data set, file after file, counted from 0.

    sources: for each path or pattern of ``data.train``, the ``FilePart`` of each of its files.
        ``data.weights`` gives each of these sources a weight.
    """

    def __init__(self, sources: Sequence[Sequence[FilePart]]) -> None:
        self._parts = [part for source in sources for part in source]
        self._rows = list(itertools.chain.from_iterable(part.rows for part in self._parts))
        sizes = [sum(len(part.rows) for part in source) for source in sources]
        self.source_ends = tuple(itertools.accumulate(sizes))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index):
        return self._rows[index]

    @property
    def parts(self) -> Iterator[tuple[int, FilePart]]:
        """Yield (number of the file's first row among all rows, the file's FilePart) for each file."""
        first = 0
        for part in self._parts:
            yield first, part
            first += len(part.rows)

    def place(self, row: int) -> str:
        """Return a row's file and the row's line or number in it, for errors, as ``FilePart.place`` does."""
        return next(part.place(row - first) for first, part in self.parts if row < first + len(part.rows))


def value_of(row: Mapping[str, object], name: str) -> object:
    """Return the value of a column, or of a field within a column, such as ``reward_model.ground_truth``.

    A column whose own name contains dots takes precedence over a field. A field of a null column is
    null. Raises KeyError if there is neither column nor field.
    """
    if name in row:
        return row[name]
    value: object = row
    for part in name.split("."):
        if value is None:
            return None
        if not isinstance(value, Mapping) or part not in value:
            raise KeyError(name)
        value = value[part]
    return value


def has_column(row: Mapping[str, object], name: str) -> bool:
    """Return whether ``value_of`` finds the column or field."""
    try:
        value_of(row, name)
    except KeyError:
        return False
    return True


def load_rows(paths: str | pathlib.Path | Sequence[str], key: str = "data.train") -> Rows:
    """Return the rows of a data set, read from files.

    paths: files, folders of datasets' ``save_to_disk``, or patterns such as ``shards/*.parquet``.
        The files of a pattern are read in the order of their names. A file's ending tells its form
        (see FORMS); a file with any other ending is read as JSON Lines.
    key: the setting that the paths came from, for errors.

    Raises ConfigError for a path that does not exist or is no such file or folder, for a file
    without rows, and for the first row that cannot be read.
    """
    paths = [str(paths)] if isinstance(paths, str | pathlib.Path) else [str(path) for path in paths]
    if any("\0" in path for path in paths):
        raise ConfigError(f"{key}={quoted(str(paths), 200)} holds a character that no path has (NUL); remove it")
    if not paths or not all(paths):
        raise ConfigError(f"{key} is empty; set it to a data set's path: {FORMS}")
    return Rows([[_read(file, key) for file in _files(path, key)] for path in paths])


def _files(path: str, key: str) -> list[str]:
    if os.path.lexists(path) or not glob.has_magic(path):
        return [path]
    found = sorted(glob.glob(path, recursive=True))
    if not found:
        raise ConfigError(f"{key}={path!r} matches no file; give a path, or a pattern that matches some")
    return found


def _read(path: str, key: str) -> FilePart:
    """Return the rows of one file or folder. Raises ConfigError if it has none or cannot be read.

    key: the setting that the path came from, for errors.
    """
    file = pathlib.Path(path)
    try:
        if file.is_dir():
            part = FilePart(path=path, rows=list(_rows_of_folder(file, key)))
        elif not file.is_file():
            fault = "is no regular file" if file.exists() else "does not exist"
            raise ConfigError(f"{key}={path!r} {fault}; set it to a data set's path: {FORMS}")
        else:
            part = _read_file(path)
    except OSError as error:
        raise ConfigError(f"{key}={quoted(path, 200)} cannot be read: {error.strerror or error}") from error
    if not part.rows:
        raise ConfigError(f"{key}={path!r} has no rows; it needs at least one")
    return part


def _read_file(path: str) -> FilePart:
    suffix = pathlib.Path(path).suffix.lower()
    with open(path, "rb") as stream:
        head = stream.read(4096)
    if suffix == ".parquet" or head.startswith(b"PAR1"):
        return FilePart(path=path, rows=list(_rows_of_parquet(path)))
    for mark, name in _COMPRESSED.items():
        if head.startswith(mark):
            raise ConfigError(f"{path} is compressed ({name}); unpack it, and name the file that is in it")
    if suffix == ".json" and head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        return FilePart(path=path, rows=_rows_of_json(path))
    numbered = _rows_of_csv(path, "\t" if suffix == ".tsv" else ",") if suffix in (".csv", ".tsv") else _json_rows(path)
    lines, rows = array("Q"), []
    for number, row in numbered:
        lines.append(number)
        rows.append(row)
    return FilePart(path=path, rows=rows, lines=lines)


def _text_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Yield (number, bytes) of each line of a file, from 1. Raises ConfigError for a line above MOST_LINE_BYTES."""
    # Lines end at b"\n" only: str.splitlines would also cut at U+2028, which JSON allows inside a string.
    with open(path, "rb") as stream:
        for number in itertools.count(1):
            line = stream.readline(MOST_LINE_BYTES + 1)
            if not line:
                return
            if len(line) > MOST_LINE_BYTES:
                raise ConfigError(
                    f"{path}:{number}: the line has more than {MOST_LINE_BYTES} bytes; a row stands on a line of its "
                    "own, and no row needs as many"
                )
            yield number, line


def _object(value: object, where: str) -> dict:
    if not isinstance(value, dict):
        raise ConfigError(f'{where}: a JSON {type(value).__name__}, not an object; a row is one {{"prompt": ...}}')
    return value


def _json_rows(path: str) -> Iterator[tuple[int, dict]]:
    for number, line in _text_lines(path):
        if line.strip():
            where = f"{path}:{number}"
            yield number, _object(parse_json(line, where), where)


def _rows_of_json(path: str) -> list[dict]:
    return [_object(value, f"{path}, row {index}") for index, value in enumerate(read_json(path))]


def _rows_of_csv(path: str, delimiter: str) -> Iterator[tuple[int, dict]]:
    """Yield (line, row) of a CSV file whose first line names the columns; a cell is a text, or null if it is empty."""

    def decoded() -> Iterator[str]:
        for number, line in _text_lines(path):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as fault:
                raise ConfigError(
                    f"{path}:{number}: not UTF-8 (byte {fault.start + 1} of the line); save the file as UTF-8"
                ) from None

    # The names of the columns, then the rows, each with the line on which it begins.
    before = csv.field_size_limit(MOST_LINE_BYTES)
    reader = csv.reader(decoded(), delimiter=delimiter, strict=True)
    try:
        names = next(reader, [])
        double = "" if not all(name.strip() for name in names) else first_double(names)
        if double is not None:
            fault = f"the column {quoted(double)} twice" if double else "a column without a name"
            raise ConfigError(f"{path}:1: {fault}; the first line names every column once")
        start = reader.line_num + 1
        for cells in reader:
            if cells and len(cells) != len(names):
                raise ConfigError(
                    f"{path}:{start}: {len(cells)} cells, and the first line names {len(names)} columns; quote a cell "
                    "that holds a comma, a quote or a line's end"
                )
            if cells:
                yield start, dict(zip(names, [cell or None for cell in cells], strict=True))
            start = reader.line_num + 1
    except csv.Error as fault:
        raise ConfigError(f"{path}:{reader.line_num}: not valid CSV: {fault}") from None
    finally:
        csv.field_size_limit(before)


def _library(name: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{path} is read by the package {name}, which cannot be imported ({error}): pip install {name}"
        ) from error


def _rows_of_parquet(path: str) -> Iterator[dict]:
    parquet = _library("pyarrow.parquet", path)
    arrow = _library("pyarrow", path)
    try:
        with parquet.ParquetFile(path) as file:
            _check_size(path, file.metadata.num_rows, file.metadata.num_columns)
            yield from _rows_of_tables(file.iter_batches(_ROWS_PER_BATCH), path)
    except (arrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path} is no Parquet file that pyarrow reads: {quoted(str(error), 200)}") from error


def _check_size(path: str, num_rows: int, num_columns: int) -> None:
    """Raise ConfigError for a table with so many rows or values that it would not fit in memory."""
    if num_rows > MOST_TABLE_ROWS or num_rows * num_columns > MOST_TABLE_CELLS:
        raise ConfigError(
            f"{path} says that it has {num_rows} rows of {num_columns} columns; at most {MOST_TABLE_ROWS} rows and "
            f"{MOST_TABLE_CELLS} values are read from one table, since every rank holds all of them in memory; write "
            "several, or leave out the columns that nothing reads"
        )


def _rows_of_folder(folder: pathlib.Path, key: str) -> Iterator[dict]:
    """Yield the rows of a folder that datasets' ``save_to_disk`` wrote. Raises ConfigError for any other folder.

    key: the setting that the folder came from, for errors.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = read_object(folder / "dataset_dict.json").get("splits")
        names = ", ".join(str(folder / str(name)) for name in splits) if isinstance(splits, list) else "none"
        raise ConfigError(f"{key}={str(folder)!r} holds several splits; name one: {names}")
    if not (folder / "state.json").is_file() or not (folder / "dataset_info.json").is_file():
        raise ConfigError(
            f"{key}={str(folder)!r} is a directory that datasets' save_to_disk did not write (it has no state.json and "
            f"dataset_info.json); name a file in it, or a pattern as in {str(folder / '*.jsonl')!r}"
        )
    datasets = _library("datasets", str(folder))
    try:
        data = datasets.load_from_disk(str(folder))
        _check_size(str(folder), len(data), len(data.column_names))
        yield from _rows_of_tables(data.with_format("arrow").iter(_ROWS_PER_BATCH), str(folder))
    except ConfigError:
        raise
    except Exception as error:  # damaged files raise errors of datasets, pyarrow, json and Python
        raise ConfigError(
            f"{key}={str(folder)!r} cannot be read by datasets ({type(error).__name__}: {quoted(str(error), 200)}); "
            "write it again with save_to_disk"
        ) from error


def _rows_of_tables(tables: Iterable, path: str) -> Iterator[dict]:
    """Yield the rows of Arrow tables or record batches, as dicts of JSON values."""
    first = 0
    for table in tables:
        if (double := first_double(table.schema.names)) is not None:
            raise ConfigError(f"{path} has the column {quoted(double)} twice; rename one of them")
        try:
            rows = table.to_pylist()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: a text of rows {first} to {first + len(table) - 1} is not UTF-8") from error
        for index, row in enumerate(rows, start=first):
            yield {name: _json_value(value, path, index, name) for name, value in row.items()}
        first += len(rows)


def _json_value(value: object, path: str, row: int, name: str, *, in_list: bool = False) -> object:
    """Return an Arrow value as a JSON value; dates, times and decimals become texts. Raises ConfigError for bytes.

    path, row, name: the file, row number and column, for errors.
    in_list: whether the value is within a list, in which objects lose their null fields.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        calls = value.get("tool_calls") is not None  # a message with calls may have a null content on purpose
        held = {
            inner: part
            for inner, part in value.items()
            if part is not None or not in_list or (calls and inner == "content")
        }
        return {str(inner): _json_value(part, path, row, name, in_list=in_list) for inner, part in held.items()}
    if isinstance(value, list | tuple):
        return [_json_value(part, path, row, name, in_list=True) for part in value]
    if isinstance(value, bytes):
        raise ConfigError(
            f"{path}, row {row}: column {name!r} holds bytes, and rows hold texts, numbers, lists and objects; write "
            "the file without it"
        )
    return str(value)
