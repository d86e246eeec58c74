"""Measures the package's load: what a plain GRPO run imports, what one of its steps executes, and the code's sizes.

    python -m tests.load             # the figures, in about half a minute
    python -m tests.load --files     # and the files, by lines

A plain run is the quickstart's model and rewards on one process, of two rollouts: an embedded engine, group advantages,
the exact skip; no supervised start, KL, replay or evaluation. A step is the second rollout: from its scored groups to
its last optimizer step, with the engine's work and the weights' way there. Lines are those of whole files.
"""

import argparse
import ast
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping

from tests.workers.environment import worker_environment
from tests.workers.inputs import ROOT, prepare_inputs

PACKAGE = ROOT / "megatron_rl"
BOUND_S = 300
PLAIN = (
    *("run.deadline_s=120", "sft.steps=0", "train.num_rollouts=2", "train.prompts_per_rollout=4", "eval.path=null"),
    *("parallel.pipeline=1", "train.samples_per_mini_batch=8", "rollout.samples_per_prompt=4"),
    *("metrics.progress=false", "reward.functions=[tests.reward_functions:parity]", "skip.mode=exact"),
    "optimizer.schedule=constant",
)
MOST_PARAMETERS, LONG_COLUMNS = 8, 100


def observed(out: str, arguments: list[str]) -> None:
    """Run ``megatron_rl.train`` and write the package's files that it imported, and that its last rollout executed."""
    import megatron_rl.train as program

    executed: set[str] = set()
    train_on_rollout = program.train_on_rollout

    def watched(trainer, index: int) -> None:
        executed.clear()
        sys.setprofile(lambda frame, event, _: executed.add(frame.f_code.co_filename) if event == "call" else None)
        try:
            train_on_rollout(trainer, index)
        finally:
            sys.setprofile(None)

    program.train_on_rollout = watched
    assert program.main(arguments) == 0
    imported = {module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "megatron_rl"}
    found = {"imported": sorted(imported - {None}), "executed": sorted(executed & imported)}
    pathlib.Path(out).write_text(json.dumps(found))


def plain_run(folder: pathlib.Path) -> dict[str, list[str]]:
    """Return the package's files that a plain run imported, and those that its last rollout executed."""
    inputs = prepare_inputs(folder / "inputs", hidden=64, layers=2, heads=2, intermediate=96)
    given = ["--config", str(ROOT / "examples" / "quickstart" / "quickstart.yaml"), "--run-dir", str(folder / "run")]
    given += [f"model.hf_path={inputs / 'model'}", f"data.train={inputs / 'train.jsonl'}", *PLAIN]
    code = "import sys; from tests.load import observed; observed(sys.argv[1], sys.argv[2:])"
    command = [sys.executable, "-c", code, str(folder / "found.json"), *given]
    done = subprocess.run(
        command, cwd=ROOT, env=worker_environment(), capture_output=True, text=True, timeout=BOUND_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((folder / "found.json").read_text())
    return {kind: sorted(str(pathlib.Path(x).relative_to(PACKAGE)) for x in files) for kind, files in found.items()}


def lines_of(files: list[str]) -> dict[str, int]:
    """Return the lines of each file of the package, the longest first."""
    sizes = {name: (PACKAGE / name).read_text(encoding="utf-8").count("\n") for name in files}
    return dict(sorted(sizes.items(), key=lambda each: -each[1]))


def code_figures() -> dict[str, float]:
    """Return the sizes of the package's code."""
    files = sorted(PACKAGE.rglob("*.py"))
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    lines = [line for text in texts.values() for line in text.splitlines()]
    functions = [
        node
        for text in texts.values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    many = [node for node in functions if _num_parameters(node.args) > MOST_PARAMETERS]
    whole = [
        argument
        for node in functions
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        if argument.annotation is not None and ast.unparse(argument.annotation).strip("'\"") == "Config"
    ]
    return {
        "files of the package": len(files),
        "lines of the package": len(lines),
        "functions": len(functions),
        f"functions with more than {MOST_PARAMETERS} parameters": len(many),
        "parameters `config: Config`": len(whole),
        f"lines over {LONG_COLUMNS} columns, %": round(100 * sum(len(x) > LONG_COLUMNS for x in lines) / len(lines), 1),
    }


def _num_parameters(arguments: ast.arguments) -> int:
    named = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return sum(each.arg not in ("self", "cls") for each in named)


def loads(found: Mapping[str, list[str]]) -> dict[str, int]:
    """Return how many files and lines a plain run imports, and its step executes."""
    return {
        f"{unit} {words}": count
        for kind, words in (("imported", "that a plain run imports"), ("executed", "that one step executes"))
        for unit, count in (("files", len(found[kind])), ("lines", sum(lines_of(found[kind]).values())))
    }


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.load", description=__doc__, formatter_class=shape)
    parser.add_argument("--files", action="store_true", help="name the files too")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = plain_run(pathlib.Path(folder))
    for name, value in {**loads(found), **code_figures()}.items():
        print(f"{value:>8} {name}")
    for kind in found if given.files else ():
        print(f"\n{kind}:")
        for name, lines in lines_of(found[kind]).items():
            print(f"{lines:>8} {name}")


if __name__ == "__main__":
    main()
