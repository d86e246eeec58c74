"""Write the tables of docs/configuration.md from the configuration's dataclasses.

Each key has a row with its default, its range if it is a number, and its meaning. The keys that a first run changes
have a star, and a table at the page's top.

Examples:
  python tools/config_table.py            # writes the tables between the page's markers; `make docs` does this
  python tools/config_table.py --check    # writes nothing; exit code 1 if the page is out of date

A key's meaning is the string literal on the line below its field in megatron_rl/config/, and its range stands in the
field's type; a section's introduction is the docstring of its class. Texts are Markdown; a path as in
docs/ppo.md#where-it-runs becomes a link. The text outside the markers does not change.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import itertools
import os
import pathlib
import re
import sys
from collections.abc import Iterator

import yaml

# The page describes this checkout, whichever one is installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from megatron_rl.config import Config
from megatron_rl.config.checks import hints_of, range_of

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration.md"
BEGIN, END = "<!-- begin generated -->", "<!-- end generated -->"
FIRST_BEGIN, FIRST_END = "<!-- begin first run -->", "<!-- end first run -->"
STAR = "★"
# What a first run of one's own model, data and reward changes; every other key may wait.
FIRST_RUN = (
    *("run.name", "run.dir"),
    *("model.hf_path", "model.dtype"),
    *("parallel.tensor", "parallel.pipeline", "parallel.sequence_parallel", "parallel.expert"),
    *("data.train", "data.prompt_key", "data.template", "data.max_prompt_tokens"),
    *("rollout.engine", "rollout.samples_per_prompt", "rollout.max_response_tokens"),
    "reward.functions",
    "advantage.estimator",
    "skip.mode",
    "plan.max_tokens_per_microbatch",
    "optimizer.lr",
    *("train.num_rollouts", "train.prompts_per_rollout", "train.samples_per_mini_batch"),
    "checkpoint.save_every_rollouts",
    "eval.path",
)
HEAD = ("| key | default | range | meaning |", "|---|---|---|---|")
LINK = re.compile(r"(?P<path>(?:[\w-]+/)*[\w-]+\.md)(?P<anchor>#[\w-]+)?")


def sections(parent: type = Config, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Yield the dotted key and the class of every section, those within a section right after it."""
    for field in dataclasses.fields(parent):
        section = field.default_factory
        if dataclasses.is_dataclass(section):
            yield prefix + field.name, section
            yield from sections(section, f"{prefix}{field.name}.")


def leaf_fields(section: type) -> list[dataclasses.Field]:
    """Return the fields of a section that are no sections themselves, in their order."""
    return [field for field in dataclasses.fields(section) if not dataclasses.is_dataclass(field.default_factory)]


def class_node(section: type) -> ast.ClassDef:
    """Return the syntax tree of a section's class."""
    return ast.parse(inspect.getsource(section)).body[0]


def field_lines(section: type) -> dict[str, list[str]]:
    """Return the string literals below each field of a section, by the field's name.

    The first of them must stand on the line after the field; one that stands lower is left out.
    """
    lines, name, next_line = {}, None, 0
    for statement in class_node(section).body:
        if isinstance(statement, ast.AnnAssign):
            name, next_line = statement.target.id, statement.end_lineno + 1
            lines[name] = []
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and name is not None:
            if statement.lineno == next_line:
                lines[name].append(statement.value.value)
                next_line = statement.end_lineno + 1
        else:
            name = None
    return lines


def default_text(field: dataclasses.Field) -> str:
    """Return a field's default as YAML writes it: ``null``, ``true``, ``1e-6``, ``[0.9, 0.999]``."""
    value = field.default_factory() if field.default is dataclasses.MISSING else field.default
    written = yaml.safe_dump(list(value) if isinstance(value, tuple) else value, default_flow_style=True, width=10_000)
    return re.sub(r"\.0e-0?", "e-", written.removesuffix("\n").removesuffix("\n..."))


def range_text(section: type, field: dataclasses.Field) -> str:
    """Return a field's range in words, empty where it holds no number."""
    bounds = range_of(hints_of(section)[field.name])
    return "" if bounds is None else bounds.cell


def with_links(text: str) -> str:
    """Return Markdown for the page: paths from the repository's root become links from docs/.

    Raises ValueError for a path that does not exist.
    """

    def link(match: re.Match) -> str:
        path = ROOT / match["path"]
        if not path.is_file():
            raise ValueError(f"{match[0]!r} names no file of the repository; write the path from its root")
        return f"[{path.name}]({os.path.relpath(path, PAGE.parent)}{match['anchor'] or ''})"

    return LINK.sub(link, text)


def table_of(key: str, section: type) -> str:
    """Return a section's heading, introduction and table. Raises ValueError where a field has not one line below it."""
    lines, rows = field_lines(section), []
    for field in leaf_fields(section):
        if len(lines[field.name]) != 1:
            raise ValueError(
                f"{key}.{field.name} has {len(lines[field.name])} string literals below its field in "
                f"{section.__module__}.{section.__name__}; write one, on the next line"
            )
        meaning = with_links(lines[field.name][0]).replace("|", r"\|")
        name = f"`{key}.{field.name}`" + (f" {STAR}" if f"{key}.{field.name}" in FIRST_RUN else "")
        rows.append(f"| {name} | `{default_text(field)}` | {range_text(section, field)} | {meaning} |")
    heading = "#" * (2 + key.count("."))
    introduction = with_links(ast.get_docstring(class_node(section)))
    return "\n".join([f"{heading} {key}", "", introduction, "", *HEAD, *rows])


def first_run_table() -> str:
    """Return the table of the keys that a first run changes: a row a section, with a link to its own table."""
    rows = []
    for section, keys in itertools.groupby(FIRST_RUN, key=lambda key: key.rpartition(".")[0]):
        rows.append(f"| [{section}](#{section}) | {', '.join(f'`{key}`' for key in keys)} |")
    return "\n".join(["| section | keys |", "|---|---|", *rows])


def between(page: str, begin: str, end: str, text: str) -> str:
    """Return the page with ``text`` between two markers. Raises ValueError unless it holds each once, in order."""
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed) or begin in rest or end in before + after:
        raise ValueError(f"the page must hold {begin} and then {end}, each once")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def with_tables(page: str) -> str:
    """Return the page with the first run's keys and the tables of every section between their markers.

    Raises ValueError unless the page holds each marker once, in order.
    """
    tables = "\n\n".join(table_of(key, section) for key, section in sections())
    return between(between(page, FIRST_BEGIN, FIRST_END, first_run_table()), BEGIN, END, tables)


def main(arguments: list[str] | None = None) -> int:
    description, _, examples = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where the page is out of date")
    parser.add_argument("--page", type=pathlib.Path, default=PAGE, help="the page (default docs/configuration.md)")
    options = parser.parse_args(arguments)
    present = options.page.read_text(encoding="utf-8")
    wanted = with_tables(present)
    if not options.check:
        options.page.write_text(wanted, encoding="utf-8")
        return 0
    difference = difflib.unified_diff(present.splitlines(), wanted.splitlines(), "present", "wanted", n=0, lineterm="")
    for line in difference:
        print(line)
    if present != wanted:
        print(f"config_table: {options.page} is out of date; run `make docs`", file=sys.stderr)
    return int(present != wanted)


if __name__ == "__main__":
    sys.exit(main())
