"""The tables of docs/configuration.md are written from the lines below the fields; every key has exactly one."""

import dataclasses
import pathlib
import re
import shutil

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
    return pathlib.Path(shutil.copy(config_table.PAGE, tmp_path / "configuration.md"))


def test_every_field_has_one_line_below_it() -> None:
    for key, section in SECTIONS.items():
        lines = config_table.field_lines(section)
        for field in config_table.leaf_fields(section):
            (line,) = lines[field.name] or [f"{key}.{field.name} has no line"]
            assert re.fullmatch(r"\S.*\.", line), f"{key}.{field.name}: {line!r}"


def test_lines_name_only_keys_that_exist() -> None:
    for section in SECTIONS.values():
        text = section.__doc__ + "".join(sum(config_table.field_lines(section).values(), []))
        named = {name for name in re.findall(r"`([a-z_]+\.[a-z_.]+)[=:`]", text) if name.partition(".")[0] in SECTIONS}
        of_fields = {name for name in named if name.startswith(("critic.parallel.", "critic.optimizer."))}
        assert named - of_fields <= KEYS, sorted(named - of_fields - KEYS)


def test_lines_are_counted_where_they_stand() -> None:
    wanted = {"one": ["Its line."], "two": ["Its line.", "Another line."], "none": [], "low": []}
    assert config_table.field_lines(Sample) == wanted
    with pytest.raises(ValueError, match=r"sample\.two has 2 string literals"):
        config_table.table_of("sample", Sample)


def test_defaults_are_written_as_in_yaml() -> None:
    values = [None, True, 1e-6, 2.0, 0.001, "", "auto", "{prompt}", (0.9, 0.999), ()]
    written = ["null", "true", "1e-6", "2.0", "0.001", "''", "auto", "'{prompt}'", "[0.9, 0.999]", "[]"]
    made = [(f"key{i}", object, dataclasses.field(default=value)) for i, value in enumerate(values)]
    section = dataclasses.make_dataclass("Section", made)
    assert [config_table.default_text(field) for field in dataclasses.fields(section)] == written


def test_committed_page_equals_the_tools() -> None:
    present = config_table.PAGE.read_text(encoding="utf-8")
    assert config_table.with_tables(present) == present, "docs/configuration.md is out of date; run `make docs`"
    changed = "Another introduction.\n" + present + "\n## Notes\n"  # text outside the markers stays
    assert config_table.with_tables(changed) == changed


@pytest.mark.parametrize("change", [("`train.epochs`", "`train.epoch`"), ("| `null` |", "| `0` |"), ("## run\n", "")])
def test_check_fails_on_a_changed_copy_and_writing_mends_it(page: pathlib.Path, change: tuple[str, str]) -> None:
    whole = page.read_text(encoding="utf-8")
    assert config_table.main(["--check", "--page", str(page)]) == 0
    page.write_text(whole.replace(*change, 1), encoding="utf-8")
    assert config_table.main(["--check", "--page", str(page)]) == 1
    assert page.read_text(encoding="utf-8") == whole.replace(*change, 1)
    assert config_table.main(["--page", str(page)]) == 0 and page.read_text(encoding="utf-8") == whole


def test_each_key_of_a_first_run_exists_and_has_its_star_and_its_link() -> None:
    first = config_table.FIRST_RUN
    assert len(set(first)) == len(first) == 25 and set(first) <= KEYS, sorted(set(first) - KEYS)
    page = config_table.PAGE.read_text(encoding="utf-8")
    assert set(re.findall(rf"^\| `([\w.]+)` {config_table.STAR} \|", page, re.M)) == set(first)
    listed = {
        section: re.findall(r"`([\w.]+)`", row)
        for section, row in re.findall(r"^\| \[[\w.]+\]\(#(\w+)\) \| (.*) \|$", page, re.M)
    }
    assert [key for row in listed.values() for key in row] == list(first)
    assert all(key.startswith(f"{section}.") for section, row in listed.items() for key in row)


def test_a_page_without_a_marker_or_with_two_is_refused() -> None:
    present = config_table.PAGE.read_text(encoding="utf-8")
    for marker in (config_table.BEGIN, config_table.END, config_table.FIRST_BEGIN, config_table.FIRST_END):
        for broken in (present.replace(marker, ""), present.replace(marker, f"{marker}\n{marker}")):
            with pytest.raises(ValueError, match="each once"):
                config_table.with_tables(broken)


def test_a_path_becomes_a_link_and_a_missing_one_is_named() -> None:
    assert config_table.with_links("see docs/ppo.md#where-it-runs") == "see [ppo.md](ppo.md#where-it-runs)"
    assert config_table.with_links("(README.md)") == "([README.md](../README.md))"
    with pytest.raises(ValueError, match=r"docs/no\.md"):
        config_table.with_links("docs/no.md")
