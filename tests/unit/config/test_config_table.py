"""The tables of docs/configuration.md are written from the lines below the fields; every key has exactly one."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import pytest

from tools import config_table

SECTIONS = dict(config_table.sections())
KEYS = {f"{key}.{field.name}" for key, section in SECTIONS.items() for field in config_table.leaf_fields(section)}


@dataclasses.dataclass(frozen=True)
class Sample:
    """Holds fields with one line, two lines, none, and one too low."""

    one: int = 1
    """Its line."""
    two: int = 2
    """Its line."""
    """Another line."""
    none: int = 3
    low: int = 4

    """Not on the next line."""


@pytest.fixture
def page(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "configuration.md"
    path.write_text(config_table.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    return path


@pytest.mark.parametrize("key", SECTIONS)
def test_every_field_has_one_line_below_it(key: str) -> None:
    lines = config_table.field_lines(SECTIONS[key])
    for field in config_table.leaf_fields(SECTIONS[key]):
        assert len(lines[field.name]) == 1, f"{key}.{field.name}: {lines[field.name]}"
        assert re.fullmatch(r"\S.*\.", lines[field.name][0]), f"{key}.{field.name}: {lines[field.name][0]!r}"


@pytest.mark.parametrize("key", SECTIONS)
def test_lines_name_only_keys_that_exist(key: str) -> None:
    text = SECTIONS[key].__doc__ + "".join(sum(config_table.field_lines(SECTIONS[key]).values(), []))
    named = {name for name in re.findall(r"`([a-z_]+\.[a-z_.]+)[=:`]", text) if name.partition(".")[0] in SECTIONS}
    fields_of_sections = {name for name in named if name.startswith(("critic.parallel.", "critic.optimizer."))}
    assert named - fields_of_sections <= KEYS, sorted(named - fields_of_sections - KEYS)


def test_lines_are_counted_where_they_stand() -> None:
    assert config_table.field_lines(Sample) == {
        "one": ["Its line."],
        "two": ["Its line.", "Another line."],
        "none": [],
        "low": [],
    }
    with pytest.raises(ValueError, match=r"sample\.two has 2 string literals"):
        config_table.table_of("sample", Sample)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, "null"),
        (True, "true"),
        (1e-6, "1e-6"),
        (2.0, "2.0"),
        (0.001, "0.001"),
        ("", "''"),
        ("auto", "auto"),
        ("{prompt}", "'{prompt}'"),
        ((0.9, 0.999), "[0.9, 0.999]"),
        ((), "[]"),
    ],
)
def test_defaults_are_written_as_in_yaml(value: object, written: str) -> None:
    section = dataclasses.make_dataclass("Section", [("key", object, dataclasses.field(default=value))])
    assert config_table.default_text(dataclasses.fields(section)[0]) == written


def test_committed_page_equals_the_tools() -> None:
    present = config_table.PAGE.read_text(encoding="utf-8")
    assert config_table.with_tables(present) == present, "docs/configuration.md is out of date; run `make docs`"


@pytest.mark.parametrize("change", [("`train.epochs`", "`train.epoch`"), ("| `null` |", "| `0` |"), ("## run\n", "")])
def test_check_fails_on_a_changed_copy_and_writing_mends_it(page: pathlib.Path, change: tuple[str, str]) -> None:
    whole = page.read_text(encoding="utf-8")
    assert config_table.main(["--check", "--page", str(page)]) == 0
    page.write_text(whole.replace(*change, 1), encoding="utf-8")
    assert config_table.main(["--check", "--page", str(page)]) == 1
    assert page.read_text(encoding="utf-8") == whole.replace(*change, 1)
    assert config_table.main(["--page", str(page)]) == 0 and page.read_text(encoding="utf-8") == whole


def test_text_outside_the_markers_stays(page: pathlib.Path) -> None:
    changed = "Another introduction.\n" + page.read_text(encoding="utf-8") + "\n## Notes\n"
    assert config_table.with_tables(changed) == changed


@pytest.mark.parametrize("marker", [config_table.BEGIN, config_table.END])
def test_a_page_without_a_marker_or_with_two_is_refused(marker: str) -> None:
    present = config_table.PAGE.read_text(encoding="utf-8")
    for broken in (present.replace(marker, ""), present.replace(marker, f"{marker}\n{marker}")):
        with pytest.raises(ValueError, match="each once"):
            config_table.with_tables(broken)


def test_a_path_becomes_a_link_and_a_missing_one_is_named() -> None:
    assert config_table.with_links("see docs/ppo.md#where-it-runs") == "see [ppo.md](ppo.md#where-it-runs)"
    assert config_table.with_links("(README.md)") == "([README.md](../README.md))"
    with pytest.raises(ValueError, match=r"docs/no\.md"):
        config_table.with_links("docs/no.md")
