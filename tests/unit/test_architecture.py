"""Checks the laws of the house (CONTRIBUTING.md) that a parser can check."""

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

# Law 2: rooms and single files of the package, from the bottom up. A module imports from its own room and from lower
# levels alone.
LEVELS = (
    ("errors", "types"),
    ("config",),
    ("distributed", "algorithm", "planning", "data", "environment"),
    ("reward", "weights", "doctor"),
    ("model", "validate"),
    ("backend",),
    ("observability",),
    ("rollout", "checkpoint", "simulator"),
    ("critic",),
    ("trainer",),
    ("cli",),
    ("train", "serve", "watch"),
    ("commands",),
    ("__main__",),
)
HEIGHT = {room: height for height, rooms in enumerate(LEVELS) for room in rooms}
MEGATRON_ROOMS = ("distributed", "weights", "model", "backend", "checkpoint")
TRAINABLE_MODEL = "backend/trainable_model.py"  # wraps the model in Megatron-Core's DistributedDataParallel
# Law 3: without torch, a process group or a device
PURE_STAGES = (
    "algorithm.advantage",
    "algorithm.estimators",
    "algorithm.gae",
    "algorithm.noise",
    "algorithm.signal",
    "planning.cost",
    "planning.plan",
    "planning.timeline",
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


def tree_of(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=path.name)


def imports_of(path: pathlib.Path) -> set[str]:
    """Return the dotted names that a file imports, inside functions too; a `from a import b` is a.b."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{name_of(path)}:{node.lineno} imports relatively; the laws are checked on absolute names"
            )
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def places(found: list[str]) -> str:
    return "\n".join(["", *found])


def room_of(path: pathlib.Path) -> str:
    """Return the room that a module of the package lies in, or its own name where it lies flat."""
    return path.relative_to(ROOT / "megatron_rl").with_suffix("").parts[0]


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
    assert not found, places(found)


def test_modules_of_a_room_import_each_other_in_no_circle() -> None:
    modules = {
        ".".join(("megatron_rl", *path.relative_to(ROOT / "megatron_rl").with_suffix("").parts)): path
        for path in PACKAGE
    }
    edges = {
        module: {name if name in modules else name.rpartition(".")[0] for name in imports_of(path)}
        & set(modules) - {module}
        for module, path in modules.items()
    }
    while ends := [module for module, targets in edges.items() if not targets & set(edges)]:
        for module in ends:
            del edges[module]
    assert not edges, f"a circle among {sorted(edges)}"


def test_megatron_core_is_imported_only_at_its_seams() -> None:
    found = [
        name_of(path)
        for path in PACKAGE
        if any(is_within(name, "megatron") for name in imports_of(path)) and room_of(path) not in MEGATRON_ROOMS
    ]
    assert not found, places(found)


def test_schedules_are_called_only_in_schedule() -> None:
    """backend/stage_shapes.py answers one question of the schedule's communicator and calls nothing of it."""
    seam, within = "megatron.core.pipeline_parallel", ("backend/schedule.py", "backend/stage_shapes.py")
    found = [
        name_of(p) for p in PACKAGE if any(is_within(name, seam) for name in imports_of(p)) and name_of(p) not in within
    ]
    assert not found, places(found)


def test_parallel_state_is_imported_only_in_topology() -> None:
    found = [
        name_of(p)
        for p in CHECKED
        if any("parallel_state" in name for name in imports_of(p)) and name_of(p) != "distributed/topology.py"
    ]
    assert not found, places(found)


def test_no_file_is_named_for_what_it_is_not() -> None:
    forbidden = re.compile(r"(utils?|helpers?|common|misc|base_.*)\.py")
    found = [name_of(path) for path in [*CHECKED, *(ROOT / "tests").rglob("*.py")] if forbidden.fullmatch(path.name)]
    assert not found, places(found)


def test_files_stay_under_400_lines() -> None:
    sizes = {
        name_of(path): len(path.read_text(encoding="utf-8").splitlines())
        for path in [*CHECKED, *(ROOT / "tests").rglob("*.py")]
    }
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
    """There is no bare `except:`, and no handler of Exception that does nothing."""
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
    """Return (file, attribute) of every three-argument getattr."""
    calls = [
        n
        for n in ast.walk(tree_of(path))
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "getattr"
    ]
    return {(name_of(path), ast.unparse(call.args[1]).strip("'\"")) for call in calls if len(call.args) == 3}


def test_no_getattr_with_a_default() -> None:
    found = set().union(*(getattr_defaults(path) for path in PACKAGE))
    assert found <= set(GETATTR_DEFAULTS), places(
        [f"{name}: getattr(…, {attribute!r}, …)" for name, attribute in found]
    )


def test_pure_stages_import_numbers_only() -> None:
    for stage in PURE_STAGES:
        heavy = {
            name
            for name in imports_of(module_path(stage))
            if name.split(".")[0] in ("torch", "megatron", "transformers")
        }
        assert not heavy, f"{stage} imports {', '.join(sorted(heavy))}"


def test_pure_stages_run_without_torch() -> None:
    """The pure stages bring neither torch nor Megatron-Core along: a plan is simulated on a laptop."""
    modules = ", ".join(f"megatron_rl.{stage}" for stage in PURE_STAGES)
    code = f"import sys, {modules}; print([m for m in ('torch', 'megatron') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=patient(600), check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("stage", [stage for stage in PURE_STAGES if stage != "algorithm.estimators"])
def test_pure_stages_number_their_invariants(stage: str) -> None:
    """A pure stage's docstring counts its invariants from 1, and its tests carry a mark for each.

    The marks stand in the tests' ``assert_invariants``.
    """
    docstring = ast.get_docstring(tree_of(module_path(stage)))
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
    found = [
        f"{name_of(path)} imports {name}"
        for path in (ROOT / "tests").rglob("*.py")
        for name in imports_of(path)
        if is_within(name, "tests") and any(part.startswith("test_") for part in name.split(".")[1:-1])
    ]
    assert not found, places(found)


def test_ruff_finds_nothing() -> None:
    done = subprocess.run(
        ["ruff", "check", "--quiet", "."], cwd=ROOT, capture_output=True, text=True, timeout=patient(600), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
