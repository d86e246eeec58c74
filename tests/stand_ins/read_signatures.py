"""Reads signatures and names from Transformer Engine's own source into signatures.json: facts, and none of its code.

    pip download --no-deps --dest wheels transformer-engine==2.20.2  # and 2.3.0
    python -m tests.stand_ins.read_signatures wheels/*.whl

A wheel holds the source of all parts. Looked for is what the installed megatron-core imports, and SIGNATURES.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import pathlib
import sys
import zipfile

FACTS = pathlib.Path(__file__).with_name("signatures.json")
ATTENTION = "attention/dot_product_attention/dot_product_attention.py"
PERMUTATIONS = ["moe_unpermute"]
PERMUTATIONS += [f"{name}{end}" for name in ("moe_permute", "moe_sort_chunks_by_index") for end in ("", "_with_probs")]
LINEARS = {"Linear": "linear", "LayerNormLinear": "layernorm_linear", "GroupedLinear": "grouped_linear"}
SIGNATURES = {
    # name: (file below transformer_engine/pytorch/, path of the function in it)
    **{
        f"{kind}.{method}": (f"module/{file}.py", f"{kind}.{method}")
        for kind, file in LINEARS.items()
        for method in ("__init__", "forward")
    },
    "RMSNorm.__init__": ("module/rmsnorm.py", "RMSNorm.__init__"),
    "RMSNormOperation.__init__": ("ops/basic/rmsnorm.py", "RMSNorm.__init__"),  # gets what RMSNorm passes on
    "RMSNorm.forward": ("ops/op.py", "BasicOperation.forward"),
    "DotProductAttention.__init__": (ATTENTION, "DotProductAttention.__init__"),
    "DotProductAttention.forward": (ATTENTION, "DotProductAttention.forward"),
    "get_cpu_offload_context": ("cpu_offload.py", "get_cpu_offload_context"),
    "general_gemm": ("cpp_extensions/gemm.py", "general_gemm"),
    "apply_rotary_pos_emb": ("attention/rope.py", "apply_rotary_pos_emb"),
    **{name: ("permutation.py", name) for name in PERMUTATIONS},
    "FusedAdam.__init__": ("optimizers/fused_adam.py", "FusedAdam.__init__"),
    "MultiTensorApply.__call__": ("optimizers/multi_tensor_apply.py", "MultiTensorApply.__call__"),
}


class Source:
    """The Python files of one wheel."""

    def __init__(self, wheel: pathlib.Path) -> None:
        self.version = wheel.name.split("-")[1]
        with zipfile.ZipFile(wheel) as files:
            names = (x for x in files.namelist() if x.startswith("transformer_engine/") and "/jax/" not in x)
            self.trees = {name: ast.parse(files.read(name)) for name in names if name.endswith(".py")}

    def file_of(self, module: str) -> str | None:
        path = module.replace(".", "/")
        return next((name for name in (f"{path}.py", f"{path}/__init__.py") if name in self.trees), None)

    def names(self, module: str) -> set[str]:
        """Return the names that a module defines or imports, and its own modules."""
        file = self.file_of(module)
        if file is None:
            return set()
        package = module if file.endswith("__init__.py") else module.rpartition(".")[0]
        found = set()
        if file.endswith("__init__.py"):
            folder = file.removesuffix("__init__.py")
            within = (name.removeprefix(folder) for name in self.trees if name.startswith(folder))
            found = {name.split("/")[0].removesuffix(".py") for name in within}
        for node in ast.walk(self.trees[file]):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.Assign(targets=targets):
                    found |= {x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)}
                case ast.Import(names=names):
                    found |= {(x.asname or x.name).split(".")[0] for x in names}
                case ast.ImportFrom(module=origin, names=names, level=level):
                    above = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                    whole = ".".join([*above, *([origin] if origin else [])])
                    for x in names:
                        found |= self.names(whole) if x.name == "*" else {x.asname or x.name}
        return found

    def signature(self, file: str, path: str) -> str:
        """Return a function's parameters as Python writes them, ``self`` left out and "..." for every default."""
        nodes = self.trees[f"transformer_engine/pytorch/{file}"].body
        for part in path.split("."):
            node = next(x for x in nodes if isinstance(x, ast.FunctionDef | ast.ClassDef) and x.name == part)
            nodes = node.body
        given = node.args
        given.args = [x for x in given.args if x.arg != "self"]
        given.defaults = [ast.Constant(...) for _ in given.defaults]
        given.kw_defaults = [x and ast.Constant(...) for x in given.kw_defaults]
        for x in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
            if x:
                x.annotation = None
        return ast.unparse(given)


def imported_names(folder: pathlib.Path) -> dict[str, set[str]]:
    """Return names by module that files below ``folder`` import from Transformer Engine, or name through it."""
    found: dict[str, set[str]] = {}
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformer_engine."):
                found.setdefault(node.module, set()).update(x.name for x in node.names)
            if isinstance(node, ast.Attribute):
                module, _, name = ast.unparse(node).rpartition(".")
                if module.startswith(("te.pytorch", "te.common")):
                    found.setdefault(f"transformer_engine.{module.removeprefix('te.')}", set()).add(name)
    return found


def facts(source: Source, wanted: dict[str, set[str]]) -> dict:
    known = [module for module in sorted(wanted) if source.file_of(module)]
    signatures = {
        name: {"file": file, "function": path, "parameters": source.signature(file, path)}
        for name, (file, path) in SIGNATURES.items()
    }
    return {"names": {x: sorted(source.names(x) & wanted[x]) for x in known}, "signatures": signatures}


def main(arguments: list[str]) -> None:
    """Add the wheels' facts to the file. Beside wheels, arguments may name other releases' folders of megatron-core."""
    (core,) = importlib.util.find_spec("megatron.core").submodule_search_locations
    wanted: dict[str, set[str]] = {}
    for folder in (core, *(x for x in arguments if not x.endswith(".whl"))):
        for module, names in imported_names(pathlib.Path(folder)).items():
            wanted.setdefault(module, set()).update(names)
    for wheel in (x for x in arguments if x.endswith(".whl")):
        source = Source(pathlib.Path(wheel))
        known = json.loads(FACTS.read_text()) if FACTS.exists() else {}
        FACTS.write_text(json.dumps({**known, source.version: facts(source, wanted)}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
