"""Checks the laws of the house (CONTRIBUTING.md) that a parser can check."""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator

import pytest

from tests.patience import patient

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = sorted((ROOT / "megatron_rl").rglob("*.py"))
CHECKED = [*PACKAGE, *sorted((ROOT / "tools").rglob("*.py"))]
TESTS = sorted((ROOT / "tests").rglob("*.py"))

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

# Law 2: rooms and single files of the package, from the bottom up. A module imports from its own room and from lower
# levels alone.
LEVELS = (
    ("errors", "types"),
    ("storage",),
    ("json_text", "users_code"),
    ("config",),
    ("distributed", "algorithm", "planning", "data", "environment"),
    ("reward", "weights", "doctor", "hub"),
    ("model", "validate"),
    ("backend",),
    ("observability",),
    ("rollout", "checkpoint", "simulator"),
    ("critic",),
    ("trainer",),
    ("cli",),
    ("train", "serve", "watch", "integrations"),
    ("commands",),
    ("__main__",),
)
HEIGHT = {room: height for height, rooms in enumerate(LEVELS) for room in rooms}
MEGATRON_ROOMS = ("distributed", "weights", "model", "backend", "checkpoint")
# Law 3: without torch, a process group or a device
PURE_STAGES = (
    *("algorithm.advantage", "algorithm.estimators", "algorithm.gae", "algorithm.noise", "algorithm.signal"),
    *("planning.cost", "planning.plan", "planning.timeline"),
)

TESTED_BY = {
    "planning.plan": [ROOT / "tests/unit/planning" / name for name in ("test_plan.py", "lockstep.py")],
    "algorithm.advantage": [ROOT / "tests/unit/algorithm" / name for name in ("test_advantage.py", "test_finite.py")],
}

# Law 5. Each exception with its reason.
GETATTR_DEFAULTS: dict[tuple[str, str], str] = {}  # (file, attribute): the reason


def name_of(path: pathlib.Path) -> str:
    """Return the path from the repository's root; from the package for a file in it."""
    parent = ROOT / "megatron_rl" if path.is_relative_to(ROOT / "megatron_rl") else ROOT
    return path.relative_to(parent).as_posix()


@functools.cache
def nodes_of(path: pathlib.Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=path.name)))


@functools.cache
def imports_of(path: pathlib.Path) -> frozenset[str]:
    """Return the dotted names that a file imports, inside functions too; a `from a import b` is a.b."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno} imports relatively; the laws hold absolute names"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def assert_none(found: Iterable[str]) -> None:
    assert not (found := list(found)), "\n".join(["", *found])


def importers(files: Iterable[pathlib.Path], pattern: str, *, but: Collection[str]) -> list[str]:
    """Return the files that import a name that matches, less the rooms and files that may."""
    return [
        name_of(path)
        for path in files
        if any(re.match(pattern, name) for name in imports_of(path)) and not {name_of(path), room_of(path)} & {*but}
    ]


def room_of(path: pathlib.Path) -> str:
    """Return the room that a module of the package lies in, or its own name where it lies flat."""
    return pathlib.PurePath(name_of(path)).with_suffix("").parts[0]


def test_the_package_holds_its_rooms_and_nothing_else() -> None:
    found = {room_of(path) for path in PACKAGE} - {"__init__"}
    assert found == set(HEIGHT), f"LEVELS misses {found - set(HEIGHT)}, the package misses {set(HEIGHT) - found}"


def test_imports_go_down_only() -> None:
    """Imports go down only, lazy ones and those for types alone too; so no room can import itself in a circle."""
    found = []
    for path in PACKAGE:
        room = room_of(path)
        for name in sorted(imports_of(path)):
            package, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if package == "megatron_rl" and target in HEIGHT and target != room and HEIGHT[target] >= HEIGHT[room]:
                found.append(f"{name_of(path)} imports {name}: {room} is no higher than {target}")
    assert_none(found)


def test_modules_of_a_room_import_each_other_in_no_circle() -> None:
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PACKAGE}
    edges = {}
    for module, path in modules.items():
        targets = {name if name in modules else name.rpartition(".")[0] for name in imports_of(path)}
        edges[module] = targets & set(modules) - {module}
    while ends := [module for module, targets in edges.items() if not targets & set(edges)]:
        for module in ends:
            del edges[module]
    assert not edges, f"a circle among {sorted(edges)}"


@pytest.mark.parametrize(
    ("pattern", "but"),
    [
        # faults.py breaks a function of Megatron-Core's and mends it; bridge.py calls NVIDIA's package of that name
        (r"megatron\b", (*MEGATRON_ROOMS, "commands/verify/faults.py", "commands/convert/bridge.py")),
        # stage_shapes.py answers one question of the schedule's communicator and calls nothing of it
        (r"megatron\.core\.pipeline_parallel\b", ("backend/schedule.py", "backend/stage_shapes.py")),
        (".*parallel_state", ("distributed/topology.py",)),
    ],
)
def test_megatron_core_is_imported_only_at_its_seams(pattern: str, but: tuple[str, ...]) -> None:
    assert_none(importers(CHECKED if "parallel_state" in pattern else PACKAGE, pattern, but=but))


def test_no_file_is_named_for_what_it_is_not_and_files_and_functions_stay_short() -> None:
    forbidden = re.compile(r"(utils?|helpers?|common|misc|base_.*)\.py")
    assert_none(name_of(path) for path in [*CHECKED, *TESTS] if forbidden.fullmatch(path.name))
    sizes = {path: path.read_text(encoding="utf-8").count("\n") for path in [*CHECKED, *TESTS]}
    assert_none(f"{name_of(path)}: {lines} lines" for path, lines in sizes.items() if lines >= MAX_FILE_LINES)
    assert_none(
        f"{name_of(path)}:{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1} lines"
        for path in CHECKED
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 >= MAX_FUNCTION_LINES
    )


def test_no_blind_except() -> None:
    """There is no bare `except:`, and no handler of Exception that does nothing."""
    found = []
    for path in CHECKED:
        for node in nodes_of(path):
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = {x.id for x in ast.walk(node.type) if isinstance(x, ast.Name)} if node.type else {"BaseException"}
            idle = all(isinstance(x, ast.Pass | ast.Continue | ast.Expr) for x in node.body)
            if node.type is None or (idle and caught & {"Exception", "BaseException"}):
                found.append(f"{name_of(path)}:{node.lineno}")
    assert_none(found)


def getattr_defaults(path: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Yield (file, attribute) of every three-argument getattr."""
    for node in nodes_of(path):
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[_, attribute, _]):
                yield name_of(path), ast.unparse(attribute).strip("'\"")


def test_no_getattr_with_a_default() -> None:
    found = {each for path in PACKAGE for each in getattr_defaults(path)}
    assert_none(f"{name}: getattr(…, {attribute!r}, …)" for name, attribute in found - set(GETATTR_DEFAULTS))


def test_pure_stages_import_numbers_only_and_run_without_torch() -> None:
    assert_none(
        f"{stage} imports {name}"
        for stage in PURE_STAGES
        for name in imports_of(module_path(stage))
        if name.split(".")[0] in ("torch", "megatron", "transformers")
    )
    # the pure stages bring neither torch nor Megatron-Core along: a plan is simulated on a laptop
    modules = ", ".join(f"megatron_rl.{stage}" for stage in PURE_STAGES)
    code = f"import sys, {modules}; print([m for m in ('torch', 'megatron') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=patient(600), check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("stage", [stage for stage in PURE_STAGES if stage != "algorithm.estimators"])
def test_pure_stages_number_their_invariants(stage: str) -> None:
    """They count from 1 in its docstring, and the tests' ``assert_invariants`` carry a mark for each."""
    docstring = ast.get_docstring(nodes_of(module_path(stage))[0])
    numbers = [int(n) for n in re.findall(r"^(\d+)\. ", docstring, flags=re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1)) and numbers
    room, _, name = stage.partition(".")
    tests = "".join(
        path.read_text(encoding="utf-8")
        for path in TESTED_BY.get(stage, [ROOT / "tests" / "unit" / room / f"test_{name}.py"])
    )
    marked = {int(n) for n in re.findall(r"# (\d+)(?::|$)", tests, flags=re.MULTILINE)}
    exempt = {4} if name == "signal" else set()  # over settings, not over batches: test_exact_refuses
    assert marked | exempt >= set(numbers), f"the tests of {stage} do not check {sorted(set(numbers) - marked)}"


def module_path(stage: str) -> pathlib.Path:
    """Return the file of a stage such as ``planning.plan``."""
    return ROOT / "megatron_rl" / f"{stage.replace('.', '/')}.py"


def test_no_test_module_imports_another() -> None:
    # parsed are the files whose text has such a dotted name at all
    dotted = re.compile(r"\btests\b[\w.\s\\]*\.[\s\\]*test_")
    found = [
        f"{name_of(path)} imports {name}"
        for path in TESTS
        if dotted.search(path.read_text(encoding="utf-8"))
        for name in imports_of(path)
        if is_within(name, "tests") and any(part.startswith("test_") for part in name.split(".")[1:-1])
    ]
    assert_none(found)


def test_ruff_finds_nothing() -> None:
    done = subprocess.run(
        ["ruff", "check", "--quiet", "."], cwd=ROOT, capture_output=True, text=True, timeout=patient(600), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
