"""The pages tell the truth: their links, files, tests, targets, keys, flags and commands exist."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import itertools
import pathlib
import re
import shlex
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from megatron_rl import __version__
from megatron_rl.commands.command import HERE, VERBS
from megatron_rl.commands.new_run import new_command
from megatron_rl.config import Config, load_config
from megatron_rl.errors import ConfigError
from tools import config_table

ROOT = pathlib.Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path
    for pattern in ("*.md", "tests/README.md", "docs/**/*.md", "examples/*/README.md")
    for path in sorted(ROOT.glob(pattern))
}
AGENTS_INDEX, SKILL = "docs/llms.txt", "docs/SKILL.md"
PAGES[AGENTS_INDEX] = ROOT / AGENTS_INDEX
# The changelog names keys, files and commands of older trees; only its links are held.
CURRENT = sorted(set(PAGES) - {"CHANGELOG.md"})
SECTIONS = [key for key, _ in config_table.sections()]
# The names that no file may have (CONTRIBUTING.md, law 1).
FORBIDDEN = {"utils.py", "helpers.py", "common.py"}
# A package, a function and a tensor, which begin like a section.
NO_KEYS = {"megatron.core", "train.main", "model.layers.K"}
THEIRS = "docs/coming-from.md"
NEW_RUN = "my_run/"  # the folder that `megatron-rl new` makes on the pages
# Endings of files, which a span such as `metrics.jsonl` has in common with a key of the section `metrics`.
FILES = (".jsonl", ".json", ".yaml", ".safetensors", ".py", ".sh", ".1")


@functools.cache
def text_of(name: str) -> str:
    return PAGES[name].read_text(encoding="utf-8")


@functools.cache
def blocks(name: str) -> list[tuple[str, str]]:
    """Return the page's code blocks as (language, text); an indented block has no language."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", text_of(name), re.S | re.M)
    outside = re.sub(r"^```.*?^```", "", text_of(name), flags=re.S | re.M)
    indented = "\n".join(line[4:] for line in outside.split("\n") if line.startswith("    "))
    return [*fenced, ("", indented)]


@functools.cache
def spans(name: str) -> list[str]:
    """Return the page's inline code, a span that goes over a line's end joined."""
    outside = re.sub(r"^```.*?^```", "", text_of(name), flags=re.S | re.M)
    return [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", outside)]


@functools.cache
def commands(name: str) -> list[list[str]]:
    """Return the words of every command on the page, of its blocks and of its inline code.

    The comment behind a command and its variables (``$A``) are left out.
    """
    lines = [line for _, block in blocks(name) for line in block.replace("\\\n", " ").split("\n")]
    found = []
    for line in lines + spans(name):
        if not re.match(r"\s*(\S*python\b|torchrun|make|srun|sbatch|bash|\S*pip|megatron-rl) ", line):
            continue
        words = shlex.split(re.sub(r"\s#\s.*|\s&$|…", "", line))
        found.append([word for word in words if not word.startswith("$")])
    return found


@functools.cache
def headings(path: pathlib.Path) -> set[str]:
    """Return the anchors that GitHub gives the page's headings."""
    lines = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.S | re.M).split("\n")
    titles = [
        re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line.lstrip("#").strip()) for line in lines if re.match("#+ ", line)
    ]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_anchors_are_githubs(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# `metrics.jsonl`, 9. names\n```\n# no heading\n```\n## A [link](x.md) – more\n")
    assert headings(page) == {"metricsjsonl-9-names", "a-link--more"}


def broken_links(name: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text_of(name))):
        path, _, anchor = target.partition("#")
        file = (PAGES[name].parent / path).resolve() if path else PAGES[name]
        is_outside = re.match(r"https?://|mailto:", target)
        if not is_outside and (not file.exists() or (anchor and anchor not in headings(file))):
            yield target


@functools.cache
def files_called(name: str) -> list[pathlib.Path]:
    return [path for room in ("megatron_rl", "tests", "tools", "examples") for path in (ROOT / room).rglob(name)]


def missing_files(name: str) -> Iterator[str]:
    for span in spans(name):
        match = re.fullmatch(r"([\w./-]+\.(?:py|md|sh|sbatch))(?:::(\w+))?(?:\[.*\])?", span)
        if not match or match[1] in FORBIDDEN:
            continue
        places = [base / match[1] for base in (ROOT, ROOT / "megatron_rl", ROOT / "tests", PAGES[name].parent)]
        files = [place for place in places if place.is_file()]
        files = files or ([] if "/" in match[1] else files_called(match[1]))
        if not files or (match[2] and not any(f"def {match[2]}(" in path.read_text() for path in files)):
            yield span


def unknown_targets_of_make(name: str) -> Iterator[str]:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {word for words in commands(name) if words[0] == "make" for word in words[1:]}
    yield from {word for word in named if re.fullmatch(r"[a-z-]+", word)} - targets


def key_exists(key: str) -> bool:
    """Say whether a dotted key names a section, a field, or any field of the free mappings `megatron.*`."""
    section: object = Config
    for part in key.split("."):
        if not dataclasses.is_dataclass(section):
            return section == dict[str, Any]
        hints = typing.get_type_hints(section)
        if part not in hints:
            return False
        section = hints[part]
    return True


def unknown_keys(name: str) -> Iterator[str]:
    roots = {key.partition(".")[0] for key in SECTIONS}
    pattern = re.compile(rf"(?<![\w./-])((?:{'|'.join(sorted(roots))})(?:\.[A-Za-z0-9_]+)+)(?=$|[=:,;)\s]|\.$)")
    ours = spans(name)
    if name == THEIRS:  # other frameworks' names stand in its text and in the further columns of its tables
        rows = re.findall(r"^\| ([^|]*) \|", text_of(name), re.M)
        rewards = re.findall(r"^## Rewards and data of verl and TRL$.*?(?=^## )", text_of(name), re.S | re.M)
        ours = [span for text in rows + rewards for span in re.findall(r"`([^`\n]+)`", text)]
        assert len(ours) > 40 and len(rewards) == 1
    named = {key for span in ours for key in pattern.findall(span)} - NO_KEYS
    yield from (key for key in named if not key_exists(key) and not key.endswith(FILES))


def config_of(words: list[str]) -> tuple[str | None, list[str]]:
    """Return the command's configuration file where it is one of ours, and its overrides."""
    given = words[words.index("--config") + 1] if "--config" in words else ""
    overrides = [word for word in words if re.match(r"[a-z_]+\.[a-z_.]+=", word)]
    return (given if (ROOT / given).is_file() else None), overrides


def refused_settings(name: str) -> Iterator[str]:
    for path, overrides in map(config_of, commands(name)):
        try:
            load_config(ROOT / path if path else None, overrides)
        except ConfigError as error:
            yield f"{[path, *overrides][-1]} ({error})"


# The files that read the arguments of `python -m megatron_rl.train` and `python -m megatron_rl.serve`.
TRAIN = [ROOT / "megatron_rl" / "cli.py", ROOT / "megatron_rl" / "simulator" / "arguments.py"]


def sources_of(words: list[str]) -> list[pathlib.Path]:
    """Return the files that read a command's flags: the script or module that it names, and the folder beside it."""
    if words[0] == "megatron-rl" and not words[1].isupper():
        assert words[1] in [*VERBS, *HERE], words
        files = ("launch.py", "new_run.py", "kubernetes.py", "translate/command.py")
        own = [ROOT / "megatron_rl/commands" / name for name in files]
        return [*own, *(sources_of(["-m", VERBS[words[1]].module]) if words[1] in VERBS else [])]
    for position, word in enumerate(words):
        if word == "-m" and words[position + 1].startswith(("megatron_rl", "tests")):
            place = ROOT / words[position + 1].replace(".", "/")
            module = place / "__main__.py" if place.is_dir() else place.with_suffix(".py")
            assert module.is_file(), words
            own = [path for name in ("command.py", "arguments.py") for path in place.glob(name)]
            return [module, *own, *(TRAIN if place.name in ("train", "serve") else [])]
        if word.endswith((".py", ".sh", ".sbatch")) and "/" in word and not word.startswith(NEW_RUN):
            script = ROOT / word
            assert script.is_file(), words
            if script.suffix != ".py":
                return [*TRAIN, script]
            return [script, ROOT / "megatron_rl/simulator/arguments.py", *script.parent.rglob("*.py")]
    return []


def unknown_flags(name: str) -> Iterator[str]:
    for words in commands(name):
        text = "".join(path.read_text() for path in sources_of(words))
        starts = [
            i
            for i, word in enumerate(words)
            if word.startswith(("megatron_rl.", "megatron-rl")) or word.endswith((".py", ".sh", ".sbatch"))
        ]
        given = itertools.takewhile(lambda word: word != "--", words[starts[0] + 1 if starts else len(words) :])
        flags = (word.partition("=")[0] for word in given if word.startswith("--"))
        yield from (f"{flag} ({words})" for flag in flags if f'"{flag}"' not in text)


def missing_imports(name: str) -> Iterator[str]:
    for tree in (ast.parse(block) for language, block in blocks(name) if language == "python"):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("megatron_rl"):
                module = importlib.import_module(node.module)
                yield from (alias.name for alias in node.names if not hasattr(module, alias.name))


def unknown_extras(name: str) -> Iterator[str]:
    extras = set(re.findall(r'^        "([\w-]+)": \[', (ROOT / "setup.py").read_text(), re.M))
    asked = [extra for words in commands(name) for word in words for extra in re.findall(r"^\.\[([\w,-]+)\]$", word)]
    yield from {extra for several in asked for extra in several.split(",")} - extras


def test_the_changelog_begins_with_the_package_s_release() -> None:
    heads = re.findall(r"^## (.*)$", text_of("CHANGELOG.md"), re.M)
    releases = [re.fullmatch(r"(\d+)\.(\d+)\.(\d+) \((\d{4}-\d\d-\d\d)\)", head) for head in heads]
    assert heads[0].startswith(f"{__version__} (") and len(heads) > 1 and all(releases), heads
    numbers = [tuple(map(int, release.groups()[:3])) for release in releases]
    assert numbers == sorted(numbers, reverse=True)


def test_every_extra_has_its_row() -> None:
    extras = set(re.findall(r'^        "([\w-]+)": \[', (ROOT / "setup.py").read_text(), re.M))
    table = text_of("docs/installation.md").partition("| extra of setup.py |")[2]
    rows = re.findall(r"^\| (`.*?) \|", table, re.M)
    assert sorted(extra for row in rows for extra in re.findall(r"`([\w-]+)`", row)) == sorted(extras)


def leaves(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a configuration by their dotted keys."""
    found = {}
    for name, value in section.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def test_the_readme_s_configuration_is_twelve_lines_of_a_new_run(tmp_path, monkeypatch) -> None:
    (text,) = (block for language, block in blocks("README.md") if language == "yaml")
    shown = leaves(yaml.safe_load(text))
    (given,) = (words for words in commands("README.md") if words[:2] == ["megatron-rl", "new"])
    monkeypatch.chdir(tmp_path)
    assert new_command(given[2:]) == 0
    written = leaves(yaml.safe_load(pathlib.Path(shown["run.name"], "run.yaml").read_text()))
    assert len(text.splitlines()) == 12 and shown == {key: written[key] for key in shown}
    first = set(config_table.FIRST_RUN)
    assert set(shown) <= first and f"writes {len(first & set(written))} of\nthem" in text_of("docs/configuration.md")
    (tmp_path / "shown.yaml").write_text(text)
    load_config(tmp_path / "shown.yaml")


def test_agents_find_an_index_of_llmstxt_s_form_and_a_skill_with_its_front_matter() -> None:
    title, _, rest = text_of(AGENTS_INDEX).partition("\n")
    head, *sections = re.split(r"^## .+$", rest, flags=re.M)
    assert title == "# megatron_rl" and head.lstrip().startswith("> ") and len(sections) > 3
    lines = [line for section in sections for line in section.split("\n") if line]
    assert len(lines) > 30 and all(re.fullmatch(r"- \[[^]]+\]\([^)\s]+\): \S.*", line) for line in lines), lines
    _, front, body = re.split(r"^---$", text_of(SKILL), maxsplit=2, flags=re.M)
    matter = yaml.safe_load(front)
    assert set(matter) == {"name", "description"} and re.fullmatch("[a-z0-9-]{1,64}", matter["name"])
    assert 0 < len(matter["description"]) <= 1024 and body.lstrip().startswith("# megatron_rl")


LAWS = (
    *(broken_links, missing_files, unknown_targets_of_make, unknown_keys),
    *(refused_settings, unknown_flags, missing_imports, unknown_extras),
)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_every_page_is_free_of(law: Callable[[str], Iterator[str]]) -> None:
    """A fault is named with its page and the first line that holds it."""
    faults = []
    for name in sorted(PAGES) if law is broken_links else CURRENT:
        lines = text_of(name).split("\n")
        for fault in law(name):
            places = [str(number) for number, line in enumerate(lines, 1) if fault.partition(" (")[0] in line]
            faults.append(f"{name}:{''.join(places[:1])}: {fault}")
    assert not faults, "\n".join(faults)


def test_the_readers_see_what_they_should() -> None:
    """Hold that the pages are read at all: a pattern that finds nothing would pass every test above."""
    assert sum(len(commands(name)) for name in CURRENT) > 100
    assert sum(bool(sources_of(words)) for name in CURRENT for words in commands(name)) > 30
    assert sum(any(config_of(words)) for name in CURRENT for words in commands(name)) > 15
