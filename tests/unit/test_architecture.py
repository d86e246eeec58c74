"""The laws of the house (CONTRIBUTING.md) that a parser can check."""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys

import pytest

from tests.patience import patient

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = sorted((ROOT / "megatron_rl").rglob("*.py"))
CHECKED = [*PACKAGE, *sorted((ROOT / "tools").rglob("*.py"))]

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# Law 2. backend/trainable_model.py wires the stages, and it wraps the model in Megatron-Core's DistributedDataParallel.
MEGATRON_FILES = (
    "distributed/platform.py",
    "distributed/topology.py",
    "backend/schedule.py",
    "backend/optimizer.py",
    "backend/trainable_model.py",
    "checkpoint.py",
)
MEGATRON_FOLDERS = ("model", "weights", "checkpoint")
PURE_STAGES = ("advantage", "estimators", "gae", "signal", "plan", "cost", "timeline", "noise")
# what a plan costs is part of planning, an estimator of the advantage
PURE_MAY_IMPORT = {"megatron_rl.types", "megatron_rl.config", "megatron_rl.planning.cost", "megatron_rl.algorithm.estimators"}

# Law 5. Each exception with its reason.
GETATTR_DEFAULTS: dict[tuple[str, str], str] = {}  # (file, attribute): the reason


def name_of(path: pathlib.Path) -> str:
    """The path from the repository's root; from the package for a file in it."""
    parent = ROOT / "megatron_rl" if path.is_relative_to(ROOT / "megatron_rl") else ROOT
    return path.relative_to(parent).as_posix()


def tree_of(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=path.name)


def imports_of(path: pathlib.Path) -> set[str]:
    """Dotted names, a `from a import b` as a.b; imports inside functions too."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno} imports relatively; the laws are checked on absolute names"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def places(found: list[str]) -> str:
    return "\n".join(["", *found])


def test_megatron_core_is_imported_only_at_its_seams() -> None:
    found = [
        name_of(path)
        for path in PACKAGE
        if any(is_within(name, "megatron") for name in imports_of(path))
        and name_of(path) not in MEGATRON_FILES
        and path.parent.name not in MEGATRON_FOLDERS
    ]
    assert not found, places(found)


def test_parallel_state_is_imported_only_in_topology() -> None:
    found = [
        name_of(p) for p in CHECKED if any("parallel_state" in name for name in imports_of(p)) and name_of(p) != "distributed/topology.py"
    ]
    assert not found, places(found)


def test_no_file_is_named_for_what_it_is_not() -> None:
    forbidden = re.compile(r"(utils?|helpers?|common|misc|base_.*)\.py")
    found = [name_of(path) for path in [*CHECKED, *(ROOT / "tests").rglob("*.py")] if forbidden.fullmatch(path.name)]
    assert not found, places(found)


def test_files_stay_under_400_lines() -> None:
    sizes = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in [*CHECKED, *(ROOT / "tests").rglob("*.py")]}
    found = [f"{name}: {lines} lines" for name, lines in sizes.items() if lines >= MAX_FILE_LINES]
    assert not found, places(found)


def test_functions_stay_under_60_lines() -> None:
    found = []
    for path in CHECKED:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines >= MAX_FUNCTION_LINES:
                    found.append(f"{name_of(path)}:{node.lineno} {node.name}: {lines} lines")
    assert not found, places(found)


def test_no_blind_except() -> None:
    """No bare `except:`, and no handler of Exception that does nothing."""
    found = []
    for path in CHECKED:
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = {x.id for x in ast.walk(node.type) if isinstance(x, ast.Name)} if node.type else {"BaseException"}
            idle = all(isinstance(x, ast.Pass | ast.Continue | ast.Expr) for x in node.body)
            if node.type is None or (idle and caught & {"Exception", "BaseException"}):
                found.append(f"{name_of(path)}:{node.lineno}")
    assert not found, places(found)


def getattr_defaults(path: pathlib.Path) -> set[tuple[str, str]]:
    """(file, attribute) of every three-argument getattr."""
    calls = [n for n in ast.walk(tree_of(path)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "getattr"]
    return {(name_of(path), ast.unparse(call.args[1]).strip("'\"")) for call in calls if len(call.args) == 3}


def test_no_getattr_with_a_default() -> None:
    found = set().union(*(getattr_defaults(path) for path in PACKAGE))
    assert found <= set(GETATTR_DEFAULTS), places([f"{name}: getattr(…, {attribute!r}, …)" for name, attribute in found])


def test_pure_stages_import_numbers_only() -> None:
    for stage in PURE_STAGES:
        path = ROOT / "megatron_rl" / f"{stage}.py"
        if path.exists():
            own = {name for name in imports_of(path) if is_within(name, "megatron_rl")}
            outside = {name for name in own if not any(is_within(name, allowed) for allowed in PURE_MAY_IMPORT)}
            heavy = {name for name in imports_of(path) if name.split(".")[0] in ("torch", "megatron", "transformers")}
            assert not outside | heavy, f"{stage}.py imports {', '.join(sorted(outside | heavy))}"


def test_pure_stages_run_without_torch() -> None:
    """Nothing that they import brings torch or Megatron-Core along: a plan is simulated on a laptop."""
    stages = [stage for stage in PURE_STAGES if (ROOT / "megatron_rl" / f"{stage}.py").exists()]
    modules = ", ".join(f"megatron_rl.{stage}" for stage in stages)
    code = f"import sys, {modules}; print([m for m in ('torch', 'megatron') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=patient(600), check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("stage", ["advantage", "gae", "signal", "plan", "cost", "timeline", "noise"])
def test_pure_stages_number_their_invariants(stage: str) -> None:
    """In their docstring, counted from 1; the tests' ``assert_invariants`` carries a mark for each."""
    docstring = ast.get_docstring(tree_of(ROOT / "megatron_rl" / f"{stage}.py"))
    numbers = [int(n) for n in re.findall(r"^(\d+)\. ", docstring, flags=re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1)) and numbers
    tests = (ROOT / "tests" / f"test_{stage}.py").read_text(encoding="utf-8")
    marked = {int(n) for n in re.findall(r"# (\d+)(?::|$)", tests, flags=re.MULTILINE)}
    exempt = {4} if stage == "signal" else set()  # over settings, not over batches: test_exact_refuses
    assert marked | exempt >= set(numbers), f"tests/test_{stage}.py does not check {sorted(set(numbers) - marked)}"
