"""Print how plain the texts of this tree are, room by room, beside well-known packages; or draw docstrings to grade.

Examples:
  python tools/words.py                        # the figures by room; `make words` does this
  python tools/words.py --draw 100 --seed 46   # 100 docstrings, the same for everybody, to read and to grade
  python tools/words.py --beside trl verl      # other installed packages as the measure

The figures are no limit: a reader decides. A room is a folder of megatron_rl/, or docs, tools, tests. Its texts are
docstrings, comments and messages (of raised errors and log calls), or the prose of its pages without code, tables and
headings. A sentence ends with a full stop, a question mark or a colon before a space and a capital, or with its
paragraph. `code` counts as one word. Packages beside are those of this environment and of .venv-oracles.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import io
import pathlib
import re
import statistics
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[1]
BESIDE = ("megatron.core", "transformers", "accelerate", "trl", "peft")  # measured if they are installed
LONG_SENTENCE = 30  # words
MOST_FILES = 400  # of a package beside, drawn by their names' digests
LOGS = {"debug", "info", "warning", "error", "exception", "critical"}


@dataclass(frozen=True, slots=True)
class Figures:
    """Holds what a reader compares; all but the first three are counts in 1,000 words."""

    words: int
    words_in_a_sentence: float
    long_sentences: float  # share above LONG_SENTENCE words
    that_of: float
    none_where: float
    semicolons: float
    where: float
    that: float


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield (line, signature, text) of each docstring of modules, classes and functions, and of fields above them."""
    owners = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in (x for x in ast.walk(tree) if isinstance(x, owners)):
        for number, inner in enumerate(node.body):
            of_field = number and isinstance(node, ast.ClassDef) and isinstance(node.body[number - 1], ast.AnnAssign)
            match inner:
                case ast.Expr(value=ast.Constant(value=str() as text)) if number == 0 or of_field:
                    yield inner.lineno, signature(node.body[number - 1] if of_field else node), text


def signature(owner: ast.AST) -> str:
    """Return what `help` shows above a docstring: a function, a field, a class with its fields; "" for a file."""
    match owner:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            returns = f" -> {ast.unparse(owner.returns)}" if owner.returns else ""
            return f"def {owner.name}({ast.unparse(owner.args)}){returns}"
        case ast.ClassDef():
            fields = (ast.unparse(x) for x in owner.body if isinstance(x, ast.AnnAssign))
            return f"class {owner.name}({', '.join(fields)})"
        case ast.AnnAssign():
            return ast.unparse(owner)
    return ""


def comments(text: str) -> Iterator[str]:
    """Yield each comment; lines of comments on end are one."""
    block: list[str] = []
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(noqa|type:|fmt:|isort:|!)", token.string):
            if block and token.start[0] != last + 1:
                yield " ".join(block)
                block = []
            block.append(token.string.lstrip("# "))
            last = token.start[0]
    if block:
        yield " ".join(block)


def messages(tree: ast.Module) -> Iterator[str]:
    """Yield the texts of raised errors and of log calls, a value in them as `x`."""
    for node in ast.walk(tree):
        calls = [node.exc] if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) else []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOGS:
            calls.append(node)
        for call in calls:
            for argument in call.args:
                if text := written(argument):
                    yield text


def written(node: ast.expr) -> str:
    """Return the text of a string expression, a value in it as `x`; "" for another expression."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(written(part) if isinstance(part, ast.Constant) else "`x`" for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return written(left) + written(right)
    return ""


def prose(page: str) -> Iterator[str]:
    """Yield the paragraphs and list items of a Markdown page."""
    page = re.sub(r"^```.*?^```", "", page, flags=re.S | re.M)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)", page):
        if not re.match(r"\s*(\||#|<|!\[)|    ", paragraph.lstrip("\n")):
            yield re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", paragraph)


def texts_of(path: pathlib.Path) -> Iterator[str]:
    """Yield the texts of a file of Python or Markdown; none of one that Python cannot parse."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".md":
        yield from prose(text)
        return
    try:
        tree = ast.parse(text)
        yield from (found for *_, found in docstrings(tree))
        yield from comments(text)
        yield from messages(tree)
    except (SyntaxError, tokenize.TokenError):
        return


def sentences(text: str) -> Iterator[list[str]]:
    """Yield the words of each sentence; indented blocks, which are examples, are left out."""
    for paragraph in re.split(r"\n\s*\n", re.sub(r"^(?: {8,}|\t).*$|^.*(?:>>>|::\s*$).*$", "", text, flags=re.M)):
        joined = re.sub(r"``[^`]+``|`[^`]+`", "`code`", " ".join(paragraph.split()))
        for sentence in re.split(r"(?<=[.?!:])\s+(?=[A-Z`(\"'])", joined):
            if words := re.findall(r"`code`|[^\W\d_][\w'’-]*", sentence):
                yield words


def figures(texts: Iterable[str]) -> Figures:
    """Count over texts; zeros if they hold no word."""
    texts = list(texts)
    lengths = [len(words) for text in texts for words in sentences(text)]
    lower = "\n".join(re.sub(r"\s+", " ", text) for text in texts).lower()
    words = sum(lengths)

    def in_thousand(pattern: str) -> float:
        return 1000 * len(re.findall(pattern, lower)) / max(words, 1)

    return Figures(
        words=words,
        words_in_a_sentence=statistics.fmean(lengths) if lengths else 0.0,
        long_sentences=sum(x > LONG_SENTENCE for x in lengths) / max(len(lengths), 1),
        that_of=in_thousand(r"\b(?:that|those) of\b"),
        none_where=in_thousand(r"\bnone(?: [\w`]+)? where\b"),
        semicolons=in_thousand(r";"),
        where=in_thousand(r"\bwhere\b"),
        that=in_thousand(r"\bthat\b"),
    )


def rooms(root: pathlib.Path) -> dict[str, list[pathlib.Path]]:
    """Return the files of each room; files right in megatron_rl/ are the room ``megatron_rl``."""
    package = root / "megatron_rl"
    found = {"megatron_rl": sorted(package.glob("*.py"))}
    for folder in sorted(x for x in package.iterdir() if x.is_dir()):
        found[f"megatron_rl/{folder.name}"] = sorted(folder.rglob("*.py"))
    found |= {name: sorted((root / name).rglob("*.py")) for name in ("tools", "tests")}
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]
    found["docs"] = pages + sorted((root / "examples").rglob("README.md"))
    return {name: files for name, files in found.items() if files}


def files_of(package: str) -> list[pathlib.Path]:
    """Return files of an installed package, MOST_FILES at most, without its tests; [] if it is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        spec = None
    folders = [pathlib.Path(x) for x in (spec.submodule_search_locations or [])] if spec else []
    folders += ROOT.glob(f".venv-oracles/lib/python3*/site-packages/{package.replace('.', '/')}")
    files = [x for folder in folders for x in folder.rglob("*.py") if "test" not in str(x.relative_to(folder))]
    return sorted(files, key=lambda x: digest(str(x.relative_to(folders[0]))))[:MOST_FILES]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def drawn(root: pathlib.Path, count: int, seed: int) -> list[tuple[str, str, str]]:
    """Return ``count`` docstrings of the package as (file:line, signature, text); another seed draws others.

    The order is that of a digest over seed, file and text. So a change elsewhere moves no other docstring.
    """
    found = []
    for path in sorted((root / "megatron_rl").rglob("*.py")):
        name = path.relative_to(root)
        for line, owner, text in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
            found.append((digest(f"{seed} {name} {text}"), f"{name}:{line}", owner, text))
    return [each[1:] for each in sorted(found)[:count]]


def row(name: str, found: Figures) -> str:
    counts = (found.that_of, found.none_where, found.semicolons, found.where, found.that)
    return (
        f"{name:<26}{found.words:>9,}{found.words_in_a_sentence:>9.1f}{found.long_sentences:>8.1%}"
        + "".join(f"{x:>9.2f}" for x in counts)
    )  # fmt: skip


HEAD = f"{'':<26}{'words':>9}{'a sent.':>9}{f'> {LONG_SENTENCE}':>8}" + "".join(
    f"{x:>9}" for x in ("that of", "None wh.", ";", "where", "that")
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=int, metavar="N", help="print N docstrings instead")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the draw (default 0)")
    parser.add_argument("--beside", nargs="*", default=BESIDE, metavar="PACKAGE", help="packages to measure beside")
    given = parser.parse_args(arguments)
    if given.draw is not None:
        for number, (place, owner, text) in enumerate(drawn(ROOT, given.draw, given.seed), 1):
            print(f"{number}. {place}\n" + (f"{owner}\n    " if owner else "") + f"{text.rstrip()}\n")
        return 0
    print(f"{HEAD}\n{'':<26}{'':>9}{'words':>9}{'words':>8}{'  in 1,000 words':<45}")
    ours: list[str] = []
    for name, files in rooms(ROOT).items():
        texts = [text for path in files for text in texts_of(path)]
        ours += texts
        print(row(name, figures(texts)))
    print(row("all of it", figures(ours)))
    for package in given.beside:
        if files := files_of(package):
            print(row(f"beside: {package}", figures(text for path in files for text in texts_of(path))))
        else:
            print(f"beside: {package} is not installed", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
