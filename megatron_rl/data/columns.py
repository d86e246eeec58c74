"""The checks of a data set's columns at the run's start, so that a bad row does not end the run later."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_rl.data.rows import Rows, has_column, value_of
from megatron_rl.errors import ConfigError

ANSWER = "answer"  # the column that built-in rewards read; ``data.answer_key`` names another column for it


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredColumn:
    """Describes a column that every row must have.

    name: the column's name.
    needed_by: what reads the column, in words for the message.
    null: whether a row's value may be null, which means that the column does not apply to the row.
    fault: called with a value; returns why it cannot be used and how to mend it, or None if it can
        be used. If ``fault`` itself is None, any value can be used.
    or_answer: whether a row may have an answer (``data.answer_key``) in place of the column.
    """

    name: str
    needed_by: str
    null: bool
    fault: Callable[[object], str | None] | None = None
    or_answer: bool = False


def name_of_row(rows: Sequence[Mapping[str, object]], row: int) -> str:
    """Return a row's name for errors: its number, and its file and line if these are known."""
    return f"row {row} ({rows.place(row)})" if isinstance(rows, Rows) else f"row {row}"


def names_of(columns: Mapping[str, object]) -> str:
    """Return the names of a row's columns, and of object columns' fields (``column.field``), as text for errors."""
    fields = {name: value for name, value in columns.items() if isinstance(value, Mapping)}
    inner = [f"{name}.{field}" for name, value in fields.items() for field in value]
    names = ", ".join(map(repr, [*columns, *inner])) or "none"
    return names if len(names) <= 200 else f"{names[:200]}… ({len(columns)} columns)"


def check_columns(
    rows: Sequence[Mapping[str, object]],
    required: Sequence[RequiredColumn],
    prompt_key: str,
    answer_key: str,
    *,
    prompt_setting: str = "data.prompt_key",
) -> None:
    """Raise ConfigError for the first row that lacks a required column, or has a value in it that cannot be used.

    A row without an answer, in a file whose other rows have answers, is an error too.

    required: the columns that every row must have, other than the prompt.
    prompt_key: the column of the prompt, or of the conversation, which every row must have.
    answer_key: ``data.answer_key``; if it is not "answer", every row must have that column.
    prompt_setting: the configuration's key that names the prompt's column, for errors.
    """
    # The required columns by name; "answer" under the name of ``answer_key``.
    prompt = RequiredColumn(name=prompt_key, needed_by=prompt_setting, null=False)
    wanted = {prompt_key: prompt} | {column.name: column for column in required if column.name != prompt_key}
    if ANSWER in wanted and answer_key != ANSWER:
        column = wanted.pop(ANSWER)
        needed_by = f"{column.needed_by}, by data.answer_key"
        wanted[answer_key] = replace(column, name=answer_key, needed_by=needed_by)
    elif answer_key != ANSWER:
        wanted.setdefault(answer_key, RequiredColumn(name=answer_key, needed_by="data.answer_key", null=True))
    # Every row against each required column.
    for column in wanted.values():
        for row, columns in enumerate(rows):
            if not has_column(columns, column.name):
                if column.or_answer and has_column(columns, answer_key):
                    continue
                null = "; null where it does not apply" if column.null else ""
                null += ", or name the answer's column by data.answer_key" if column.or_answer else ""
                raise ConfigError(
                    f"{name_of_row(rows, row)} has no column {column.name!r} ({column.needed_by}); its columns are "
                    f"{names_of(columns)}. Give every row one{null}"
                )
            if value_of(columns, column.name) is None and not column.null:
                raise ConfigError(
                    f"{name_of_row(rows, row)}: column {column.name!r} ({column.needed_by}) is null; fill it, or "
                    "remove the row"
                )
        _check_values(rows, column)
    # Answers: in all rows of a file, or in none.
    for members in _files(rows):
        lacking = [row for row in members if not has_column(rows[row], answer_key)]
        if 0 < len(lacking) < len(members):
            raise ConfigError(
                f"{name_of_row(rows, lacking[0])} has no column {answer_key!r} (data.answer_key), and other rows of "
                f"its file have one; its columns are {names_of(rows[lacking[0]])}. Fill it, or write null where there "
                "is no answer"
            )


def _check_values(rows: Sequence[Mapping[str, object]], column: RequiredColumn) -> None:
    """Raise ConfigError for the first row whose value in a column cannot be used. Equal values are checked once."""
    if column.fault is None:
        return
    good: set[str] = set()
    for row, columns in enumerate(rows):
        value = value_of(columns, column.name)
        if value is None or str(value) in good:
            continue
        fault = column.fault(value)
        if fault is not None:
            raise ConfigError(f"{name_of_row(rows, row)}: column {column.name!r} ({column.needed_by}): {fault}")
        good.add(str(value))


def _files(rows: Sequence[Mapping[str, object]]) -> list[range]:
    """Return the range of row numbers of each file."""
    if not isinstance(rows, Rows):
        return [range(len(rows))]
    return [range(first, first + len(part.rows)) for first, part in rows.parts]
