"""What our sources use of vLLM, read from them: names, keywords, members, fields, routes, flags and variables."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

from tests.extras.stated import ROOT
from tests.extras.vllm_tree import Tree, keywords_of

FILES = sorted(
    path
    for pattern in (
        "megatron_rl/rollout/**/*.py",
        "megatron_rl/commands/serve_vllm.py",
        "tests/vllm/*.py",
        "tools/**/engine.py",
    )
    for path in ROOT.glob(pattern)
)
WORKERS = ("vllm.v1.worker.gpu_worker", "Worker"), ("vllm.v1.worker.cpu_worker", "CPUWorker")
# dictionaries of ours whose keys are fields of a class of vLLM's: file → functions or tables, class
FIELDS = {
    "megatron_rl/rollout/vllm/arguments.py": (
        (
            *("engine_arguments", "latent_arguments", "adapter_arguments", "text_part_arguments", "delta_arguments"),
            "_on_cpu",
        ),
        "EngineArgs",
    ),
    "megatron_rl/weights/families/llama4.py": (("engine_arguments",), "EngineArgs"),
    "megatron_rl/validate/rollouts.py": (("OWNED_ARGUMENTS",), "EngineArgs"),
    "megatron_rl/rollout/vllm/sampling_params.py": (("sampling_parameters",), "SamplingParams"),
}
PATH = re.compile(r"/(?:v1/|inference/v1/)?[a-z_]+")


def faults(tree: Tree) -> list[str]:
    """Return what a release lacks of all that our sources use, a line each with the file that uses it."""
    found = [
        f"{path.relative_to(ROOT)}: {said}"
        for path in FILES
        for said in faults_of_file(tree, ast.parse(path.read_text()))
    ]
    return [*found, *_fields(tree), *_server(tree), *_workers(tree)]


def imports_of(source: ast.Module) -> dict[str, tuple[str, str]]:
    """Return local name → (module, name) of what a file takes from vLLM."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm"
        for alias in node.names
    }


def faults_of_file(tree: Tree, source: ast.Module) -> Iterator[str]:
    """Check a file's imports, its calls of what it imports, its subclasses, and the members of what it annotates."""
    taken = imports_of(source)
    for module, name in taken.values():
        if tree.home_of(module, name) is None:
            yield f"no {name} in {module}"
    for node in ast.walk(source):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in taken:
                yield from _call(node, tree.accepted(*taken[name]), name)
            case ast.Attribute(value=ast.Name(id=name), attr=member) if name in taken:
                known = tree.class_of(*taken[name])
                if known is not None and member not in known.members:
                    yield f"{name} has no {member}"
            case ast.FunctionDef():
                for argument in (*node.args.args, *node.args.kwonlyargs):
                    named = argument.annotation
                    if isinstance(named, ast.Name) and named.id in taken:
                        yield from _members(tree, node, argument.arg, taken[named.id])
            case ast.ClassDef():
                for base in node.bases:
                    base = base.value if isinstance(base, ast.Subscript) else base
                    if isinstance(base, ast.Name) and base.id in taken:
                        yield from _subclass(tree, node, taken[base.id])
                yield from _held(tree, node, taken)


def _call(call: ast.Call, accepted: set[str] | None, name: str) -> Iterator[str]:
    """Check a call's keywords; ``accepted`` None: any."""
    for keyword in call.keywords:
        if keyword.arg is not None and accepted is not None and keyword.arg not in accepted:
            yield f"{name} takes no {keyword.arg}"


def _members(tree: Tree, scope: ast.AST, variable: str, of: tuple[str, str]) -> Iterator[str]:
    """Check what is read and called of a variable, such as ``manager`` or ``self.engine``, of that class."""
    known = tree.class_of(*of)
    if known is None:
        yield f"{of[1]} is no class"
        return
    for node in ast.walk(scope):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == variable and node.attr not in known.members:
            yield f"{of[1]} has no {node.attr}"
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and ast.unparse(called.value) == variable and called.attr in known.methods:
            yield from _call(node, keywords_of(known.methods[called.attr]), f"{of[1]}.{called.attr}")


def _subclass(tree: Tree, own: ast.ClassDef, base: tuple[str, str]) -> Iterator[str]:
    """Check that our subclass defines what is abstract, and finds in the base what it does not define itself."""
    known = tree.class_of(*base)
    if known is None:
        yield f"{base[1]} is no class"
        return
    mine = {node.name for node in own.body if isinstance(node, ast.FunctionDef)} | _stored(own)
    yield from (f"{own.name} lacks {base[1]}'s abstract {name}" for name in sorted(known.abstract - mine))
    read = {x.attr for x in ast.walk(own) if isinstance(x, ast.Attribute) and ast.unparse(x.value) == "self"}
    yield from (f"{base[1]} has no {name}" for name in sorted(read - mine - known.members))
    for node in own.body:
        if isinstance(node, ast.FunctionDef) and node.name in known.methods and not node.args.vararg:
            theirs = known.methods[node.name].args
            if len(theirs.posonlyargs + theirs.args) != len(node.args.args):
                yield f"{base[1]}.{node.name} takes {len(theirs.args)} arguments, {own.name}'s {len(node.args.args)}"


def _stored(own: ast.ClassDef) -> set[str]:
    found = {x.attr for x in ast.walk(own) if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store)}
    return found | {
        x.id for node in own.body if isinstance(node, ast.Assign) for x in node.targets if isinstance(x, ast.Name)
    }


def _held(tree: Tree, own: ast.ClassDef, taken: dict[str, tuple[str, str]]) -> Iterator[str]:
    """Check the members of ``self.x`` where a class of ours makes it of an imported class."""
    for node in ast.walk(own):
        match node:
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=ast.Call(func=made)):
                made = made.value if isinstance(made, ast.Attribute) else made
                if isinstance(made, ast.Name) and made.id in taken:
                    aliases = {
                        x.targets[0].id
                        for x in ast.walk(own)
                        if isinstance(x, ast.Assign)
                        and ast.unparse(x.value) == f"self.{name}"
                        and isinstance(x.targets[0], ast.Name)
                    }
                    for variable in (f"self.{name}", *sorted(aliases)):
                        yield from _members(tree, own, variable, taken[made.id])


def keys_in(scope: ast.AST) -> set[str]:
    """Return the string keys of a scope's dictionaries, without those of dictionaries in them."""
    tables = [node for node in ast.walk(scope) if isinstance(node, ast.Dict)]
    pairs = [pair for table in tables for pair in zip(table.keys, table.values, strict=True)]
    inner = {id(x) for key, value in pairs if key is not None for x in ast.walk(value)}
    found = set()
    for node in ast.walk(scope):
        if isinstance(node, ast.Dict) and id(node) not in inner:
            found |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.slice, ast.Constant):
            found.add(node.slice.value)
    return found


def fields_used(path: str, names: tuple[str, ...]) -> set[str]:
    """Return the keys of a file's functions or tables of these names. Raises AssertionError if one is missing."""
    scopes = [
        node
        for node in ast.parse((ROOT / path).read_text()).body
        if (isinstance(node, ast.FunctionDef) and node.name in names)
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in names)
    ]
    assert len(scopes) == len(names), f"{path} has not each of {names}"
    return {key for scope in scopes for key in keys_in(scope)}


def _fields(tree: Tree) -> Iterator[str]:
    for path, (names, owner) in FIELDS.items():
        known = tree.class_of("vllm", owner)
        lacking = fields_used(path, names) - (known.members if known else set())
        yield from (f"{path}: {owner} has no field {key}" for key in sorted(lacking))


def routes_used() -> set[tuple[str, str]]:
    """Return (method, path) of each route that our sources ask a server for."""
    routes = set()
    for path in sorted((ROOT / "megatron_rl/rollout/vllm").glob("*.py")):
        source = ast.parse(path.read_text())
        for node in ast.walk(source):
            if not isinstance(node, ast.Call):
                continue
            given = [x for argument in node.args[:2] for x in ast.walk(argument) if isinstance(x, ast.Constant)]
            words = [x.value for x in given if isinstance(x.value, str)]
            asked = [matched[0] for word in words if (matched := PATH.match(word))]
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in ("call", "text", "_get", "_post") and asked:
                posts = called == "_post" or "POST" in words
                routes |= {("POST" if posts else "GET", found) for found in asked}
    return routes | {("POST", "/update_weight_version"), ("POST", "/reset_prefix_cache")}


def _server(tree: Tree) -> Iterator[str]:
    yield from (f"the server has no {method} {path}" for method, path in sorted(routes_used() - tree.routes))
    body = fields_used_of_body()
    for place, owner, keys in (
        ("vllm.entrypoints.scale_out.token_in_token_out.protocol", "GenerateRequest", body["_generate"]),
        ("vllm.entrypoints.openai.completion.protocol", "CompletionRequest", body["teacher"]),
    ):
        known = tree.class_of(place, owner)
        yield from (f"{owner} has no field {key}" for key in sorted(keys - (known.members if known else set())))
    command = (ROOT / "megatron_rl/rollout/vllm/server_command.py").read_text()
    for flag in sorted(set(re.findall(r'"--([a-z-]+)"', command)) | {"tensor-parallel-size", "enforce-eager"}):
        if not tree.says(f'"--{flag}"') and not tree.says(f"    {flag.replace('-', '_')}: "):
            yield f"the server has no flag --{flag}"
    texts = "\n".join(path.read_text() for path in ROOT.glob("megatron_rl/**/*.py") if path.name != "lora.py")
    for variable in sorted(set(re.findall(r'"(VLLM_[A-Z0-9_]+)"', texts))):
        if not re.search(rf"\b{variable}\b", tree.sources["vllm/envs.py"]):
            yield f"vllm.envs has no {variable}"
    for counter in ("vllm:prompt_tokens", "vllm:generation_tokens"):
        if not tree.says(f'"{counter}"'):
            yield f"the server counts no {counter}"


def fields_used_of_body() -> dict[str, set[str]]:
    """Return the keys of the bodies that the replica and the teacher post."""
    found = {}
    for key, path, variable in (("_generate", "server_replica.py", "body"), ("teacher", "teacher.py", "body")):
        for node in ast.walk(ast.parse((ROOT / "megatron_rl/rollout/vllm" / path).read_text())):
            if (
                isinstance(node, ast.Assign)
                and ast.unparse(node.targets[0]) == variable
                and isinstance(node.value, ast.Dict)
            ):
                found[key] = {x.value for x in node.value.keys if isinstance(x, ast.Constant)}
    return found


def _workers(tree: Tree) -> Iterator[str]:
    """Check what collective_rpc calls on workers, and what our extension of them reads."""
    source = ast.parse((ROOT / "megatron_rl/rollout/weight_sync/receiver.py").read_text())
    extension = next(node for node in source.body if isinstance(node, ast.ClassDef) and node.name == "Receiver")
    mine = {node.name for node in extension.body if isinstance(node, ast.FunctionDef)}
    read = {x.attr for x in ast.walk(extension) if isinstance(x, ast.Attribute) and ast.unparse(x.value) == "self"}
    called = _rpc_names()
    for place in WORKERS:
        known = tree.class_of(*place)
        members = known.members if known else set()
        yield from (f"{place[1]} has no {name}" for name in sorted((read | set(called)) - mine - members))
        yield from (f"{place[1]} has a {name} of its own" for name in sorted(mine & members))
        for name, given in called.items():
            taken = keywords_of(known.methods[name]) if known and name in known.methods else None
            lacking = set() if taken is None else given - taken
            yield from (f"{place[1]}.{name} takes no {key}" for key in sorted(lacking))


def _rpc_names() -> dict[str, set[str]]:
    """Return worker method → keywords, of each ``collective_rpc("method", kwargs={…})`` of an engine's process."""
    found = {}
    path = pathlib.Path(ROOT, "megatron_rl/rollout/vllm/process_main.py")
    for node in ast.walk(ast.parse(path.read_text())):
        rpc = isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".collective_rpc")
        if rpc and isinstance(node.args[0], ast.Constant):
            given = [x.value for x in node.keywords if x.arg == "kwargs"]
            found[node.args[0].value] = {key for value in given for key in keys_in(value)}
    return found
