"""The figures of tools/words.py are those of a count by hand, and a draw is the same for everybody."""

import ast
import textwrap

import pytest

from tools import words

SOURCE = '''
"""Hold one thing. That of two where none where: it ends."""

# A comment
# of two lines.
X = 1  # noqa: E501

class Box:
    """Hold a box."""

    size: int = 1
    """Its `size in metres`; in all."""
    other = 2
    """Belongs to no annotated field."""

    def open(self):
        """Open it."""
        "no docstring"
        raise ValueError(f"{self} is shut" " for ever")

def log(it):
    it.warning("it is %s", 1)
    return "a value"
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "source.py"
    path.write_text(SOURCE)
    return path


def test_texts_are_docstrings_comments_and_messages(file) -> None:
    found = sorted(words.texts_of(file))
    assert found == sorted([
        "Hold one thing. That of two where none where: it ends.", "A comment of two lines.", "Hold a box.",
        "Its `size in metres`; in all.", "Open it.", "`x` is shut for ever", "it is %s",
    ])  # fmt: skip


def test_a_docstring_is_drawn_with_what_help_shows_above_it() -> None:
    tree = words.ast.parse(
        '"""A file."""\nclass Box(Base):\n    """Hold a box."""\n    size: int = 1\n    """In metres."""\n'
        '    def open(self, *, far: bool = False) -> str:\n        """Open it."""\n'
    )
    assert [each[1:] for each in sorted(words.docstrings(tree))] == [
        ("", "A file."), ("class Box(size: int = 1)", "Hold a box."), ("size: int = 1", "In metres."),
        ("def open(self, *, far: bool=False) -> str", "Open it."),
    ]  # fmt: skip


def test_a_pages_prose_has_no_code_table_or_heading(tmp_path) -> None:
    page = tmp_path / "page.md"
    table, code = "| a | b |\n|---|---|\n\n", "    code\n\n```\nmore\n```\n"
    page.write_text(f"# Title\n\nOne [link](x.md) here.\n\n{table}{code}- item\n- other\n")
    assert [x.strip() for x in words.texts_of(page)] == ["One link here.", "- item", "- other"]


def test_figures_equal_a_count_by_hand() -> None:
    long = " ".join(["word"] * 31) + "."
    found = words.figures(["That of two; none where: It ends `a b c`. Is it? Yes", long])
    # That of two none where (5) | It ends code (3) | Is it (2) | Yes (1) | 31
    assert found.words == 42 and found.words_in_a_sentence == 42 / 5 and found.long_sentences == 1 / 5
    counts = (found.that_of, found.none_where, found.semicolons, found.where, found.that)
    assert counts == tuple(1000 / 42 for _ in counts)
    assert words.figures([]) == words.Figures(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def test_a_draw_is_the_same_again_and_no_change_elsewhere_moves_it(tmp_path) -> None:
    room = tmp_path / "megatron_rl" / "room"
    room.mkdir(parents=True)
    for number in range(40):
        text = f'def f():\n    """Return {number}."""\n'
        (room / f"f{number}.py").write_text(text)
    first = words.drawn(tmp_path, 10, 1)
    assert first == words.drawn(tmp_path, 10, 1) and len(first) == 10
    assert {text for *_, text in first} != {text for *_, text in words.drawn(tmp_path, 10, 2)}
    kept = {text for *_, text in first}
    (room / "f40.py").write_text(textwrap.dedent('"""Say something else."""\n'))
    assert len({text for *_, text in words.drawn(tmp_path, 10, 1)} & kept) >= 9


def test_every_docstring_that_ast_knows_is_found() -> None:
    for path in sorted((words.ROOT / "megatron_rl" / "planning").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        owners = [x for x in ast.walk(tree) if isinstance(x, ast.Module | ast.ClassDef | ast.FunctionDef)]
        known = {ast.get_docstring(x, clean=False) for x in owners} - {None}
        assert known <= {text for *_, text in words.docstrings(tree)}, path


def test_the_command_prints_every_room(capsys, monkeypatch) -> None:
    monkeypatch.setattr(words, "rooms", lambda root: {"docs": [words.ROOT / "README.md"]})
    assert words.main(["--beside"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [x.split()[0] for x in lines[2:]] == ["docs", "all"]
