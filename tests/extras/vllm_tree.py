"""The names that a release of vLLM defines, read from its Python sources without importing them."""

from __future__ import annotations

import ast
import dataclasses
import functools
import pathlib
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Class:
    """Holds a class of vLLM with the members of its bases.

    methods: name → its definition. attributes: fields, class variables and ``self.x = …``.
    abstract: methods that a subclass must define.
    """

    methods: Mapping[str, Function]
    attributes: frozenset[str]
    abstract: frozenset[str]

    @property
    def members(self) -> set[str]:
        return {*self.methods, *self.attributes}


class Tree:
    """Answers for one release. sources: path such as ``vllm/envs.py`` → text."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.sources = sources
        self.parsed = functools.cache(lambda path: ast.parse(sources[path]))
        self.class_of = functools.cache(self._class_of)

    @classmethod
    def of_wheel(cls, path: pathlib.Path) -> Tree:
        with zipfile.ZipFile(path) as wheel:
            names = [name for name in wheel.namelist() if name.startswith("vllm/") and name.endswith(".py")]
            return cls({name: wheel.read(name).decode() for name in names})

    @classmethod
    def of_folder(cls, folder: pathlib.Path) -> Tree:
        """Read an installed package: ``folder`` is the one that holds ``vllm``."""
        return cls({str(path.relative_to(folder)): path.read_text() for path in folder.glob("vllm/**/*.py")})

    def path_of(self, module: str) -> str | None:
        stem = module.replace(".", "/")
        return next((path for path in (f"{stem}.py", f"{stem}/__init__.py") if path in self.sources), None)

    def home_of(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Return the module that defines a name, and the definition; None if the release has no such name.

        Follows imports, and ``MODULE_ATTRS`` of ``vllm/__init__.py``, which imports lazily.
        """
        path = self.path_of(module)
        if path is None:
            return None
        for node in statements(self.parsed(path).body):
            match node:
                case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef() if node.name == name:
                    return module, node
                case ast.ImportFrom() if any((alias.asname or alias.name) == name for alias in node.names):
                    real = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
                    package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
                    above = package.split(".")[: len(package.split(".")) - node.level + 1]
                    source = ".".join([*above, *filter(None, [node.module])]) if node.level else node.module
                    return self.home_of(source, real) or (module, node)
                case ast.Assign() if any(isinstance(x, ast.Name) and x.id == name for x in node.targets):
                    other = node.value.id if isinstance(node.value, ast.Name) else name  # LLMEngine = V1LLMEngine
                    return (module, node) if other == name else self.home_of(module, other)
                case ast.Assign(value=ast.Dict() as lazily) | ast.AnnAssign(value=ast.Dict() as lazily):
                    for key, value in zip(lazily.keys, lazily.values, strict=True):
                        lazy = isinstance(key, ast.Constant) and key.value == name and isinstance(value, ast.Constant)
                        if lazy and re.fullmatch(r"\.?[\w.]+:\w+", str(value.value)):
                            source, _, real = value.value.rpartition(":")
                            return self.home_of(module + source if source.startswith(".") else source, real)
        return (f"{module}.{name}", ast.Module()) if self.path_of(f"{module}.{name}") else None

    def _class_of(self, module: str, name: str) -> Class | None:
        home = self.home_of(module, name)
        if home is None or not isinstance(home[1], ast.ClassDef):
            return None
        methods: dict[str, Function] = {}
        attributes: set[str] = set()
        abstract: set[str] = set()
        for base in home[1].bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            above = self.class_of(home[0], base.id) if isinstance(base, ast.Name) else None
            if above is not None:
                methods, attributes, abstract = (
                    {**methods, **above.methods},
                    attributes | above.attributes,
                    abstract | above.abstract,
                )
        own = {node.name: node for node in home[1].body if isinstance(node, Function)}
        marked = {n for n, node in own.items() if any("abstractmethod" in ast.unparse(x) for x in node.decorator_list)}
        for node in ast.walk(home[1]):
            match node:
                case ast.AnnAssign(target=ast.Name(id=found)):
                    attributes.add(found)
                case ast.Attribute(value=ast.Name(id="self"), attr=found, ctx=ast.Store()):
                    attributes.add(found)
                case ast.Assign():
                    attributes |= {x.id for x in node.targets if isinstance(x, ast.Name)}
        return Class(
            methods=methods | own, attributes=frozenset(attributes), abstract=frozenset((abstract - set(own)) | marked)
        )

    def accepted(self, module: str, name: str) -> set[str] | None:
        """Return the keywords that a class or function takes; None if it takes any."""
        home = self.home_of(module, name)
        if home is not None and isinstance(home[1], Function):
            return keywords_of(home[1])
        found = self.class_of(module, name)
        if found is None:
            return set()
        return keywords_of(found.methods["__init__"]) if "__init__" in found.methods else set(found.attributes)

    @functools.cached_property
    def routes(self) -> set[tuple[str, str]]:
        """Return the servers' (method, path), from ``@router.get("/x")`` and its like; a mounted path is a GET."""
        entries = "\n".join(text for path, text in self.sources.items() if path.startswith("vllm/entrypoints/"))
        found = re.findall(r"\.(get|post)\(\s*\"(/[\w/]*)\"", entries)
        mounted = re.findall(r"(?:Mount|mount)\(\s*\"(/\w+)\"", entries)
        return {(method.upper(), path) for method, path in found} | {("GET", path) for path in mounted}

    def says(self, text: str) -> bool:
        """Tell whether any source holds the text."""
        return any(text in source for source in self.sources.values())


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield a module's own statements, without what type checkers alone read."""
    for node in body:
        if isinstance(node, ast.If):
            yield from () if ast.unparse(node.test).endswith("TYPE_CHECKING") else statements(node.body)
            yield from statements(node.orelse)
        elif isinstance(node, ast.Try):
            yield from statements([*node.body, *(x for handler in node.handlers for x in handler.body), *node.orelse])
        else:
            yield node


def keywords_of(function: Function) -> set[str] | None:
    """Return the names of a function's arguments; None if it takes any keyword."""
    arguments = function.args
    named = {x.arg for x in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return None if arguments.kwarg is not None else named
