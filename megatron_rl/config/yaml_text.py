"""A strict reader of YAML files that people write: an error is one sentence with file, line and the way out.

It takes bounded time.

Refused are: text that is not UTF-8, tabs, a key that stands twice, keys that are no texts, tags,
the merge key and several documents. Refused are also more than MOST_BYTES bytes, MOST_LEVELS levels
or MOST_VALUES values, counted as often as aliases repeat them. Numbers are read as in YAML 1.2 (1e-3
is a number, 010 and 1:30 are not), dates as texts.
"""

from __future__ import annotations

import pathlib
import re

import yaml

from megatron_rl.errors import ConfigError, quoted
from megatron_rl.json_text import read_bytes

MOST_BYTES = 2**18
MOST_VALUES = 10_000
MOST_LEVELS = 20
Lines = dict[str, int]  # the line of each dotted key, from 1


class _Loader(yaml.SafeLoader):
    """Reads YAML with unquoted scalars as null, true, false, integers, floats or texts, by YAML 1.2's rules."""

    yaml_implicit_resolvers = {
        first: [pair for pair in pairs if pair[0].rpartition(":")[2] in ("bool", "null")]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_PATTERN = r"[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d[\d_]*(?=[eE]))([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
FLOAT = re.compile(rf"^({_PATTERN})$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9][\d_]*)$"), list("-+0123456789"))


def read_yaml(path: str | pathlib.Path) -> tuple[dict[str, object], Lines]:
    """Return (mapping, lines) of a YAML file: its values, {} for an empty file, and the line of each dotted key.

    Raises ConfigError for a file that cannot be read or is refused (see the module).
    """
    content = read_bytes(path, "a YAML file", most_bytes=MOST_BYTES, error=ConfigError)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        line = content.count(b"\n", 0, fault.start) + 1
        raise ConfigError(f"{path}, line {line}: not UTF-8 (byte {fault.start + 1}); save it as UTF-8") from None
    lines: Lines = {}
    value = parse_yaml(text, str(path), lines)
    if value is not None and not isinstance(value, dict):
        raise ConfigError(
            f"{path} must hold sections with keys, as in 'train: {{num_rollouts: 3}}', and it holds {quoted(value)}"
        )
    return value or {}, lines


def parse_yaml(text: str, where: str, lines: Lines | None = None) -> object:
    """Return the value of a YAML text.

    where: the file or the setting that the text comes from; every message begins with it.
    lines: an empty dict, which gets the line of each dotted key; None for a text of a single line.

    Raises ConfigError for a text that is refused (see the module).
    """
    reader = _Reader(where, lines)
    try:
        _check_tokens(text, reader)
        return reader.read(text)
    except yaml.MarkedYAMLError as error:
        raise reader.fault(error, _reason(error)) from None
    except yaml.reader.ReaderError as error:
        mark = yaml.Mark(where, 0, text.count("\n", 0, error.position), 0, None, 0)
        raise reader.fault(mark, f"the character U+{ord(text[error.position]):04X} is not allowed there") from None


def _check_tokens(text: str, reader: _Reader) -> None:
    """Raise ConfigError if a YAML text has tags, or too many values or levels."""
    # Before the full reading, which could take minutes.
    depth = count = 0
    for token in yaml.scan(text, _Loader):
        if isinstance(token, yaml.TagToken):
            tag = "".join(part or "" for part in token.value)
            raise reader.fault(token, f"the tag {quoted(tag)} is not read; remove it")
        kind = type(token).__name__
        starts = kind.endswith(("MappingStartToken", "SequenceStartToken"))
        depth += starts - (kind in ("FlowMappingEndToken", "FlowSequenceEndToken", "BlockEndToken"))
        count += starts or kind in ("ScalarToken", "AliasToken")
        reader.bound(token, count, depth)


def _reason(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or error.context or "not valid YAML"
    if "'\\t'" in problem:
        return "a tab stands there; indent with spaces"
    if "undefined alias" in problem:
        return f"no anchor is called &{problem.split(chr(39))[1]}; put quotes around a text that begins with *"
    if "expected a single document" in (error.context or ""):
        return "a second document begins there; keep one"
    return f"not valid YAML: {error.context + ', ' if error.context else ''}{problem}"


class _Reader:
    """Builds plain values from a text's nodes, counts the values and notes the lines of keys."""

    def __init__(self, where: str, lines: Lines | None) -> None:
        self.where, self.lines, self.count = where, lines, 0

    def fault(self, at: object, reason: str) -> ConfigError:
        """Return a ConfigError whose message gives the line of ``at`` and the reason.

        at: PyYAML's mark of a position in the text, or a node, token or exception that has one.
        """
        for name in ("problem_mark", "context_mark", "start_mark"):
            if isinstance(mark := vars(at).get(name), yaml.Mark):
                at = mark
                break
        line = f", line {at.line + 1}" if isinstance(at, yaml.Mark) and self.lines is not None else ""
        return ConfigError(f"{self.where}{line}: {reason}")

    def bound(self, place: object, count: int, depth: int) -> None:
        if count > MOST_VALUES or depth > MOST_LEVELS:
            most = f"{MOST_VALUES} values" if count > MOST_VALUES else f"{MOST_LEVELS} levels"
            raise self.fault(place, f"more than {most}, aliases written out; shorten it")

    def read(self, text: str) -> object:
        self.loader = _Loader(text)
        node = self.loader.get_single_node()
        return None if node is None else self.build(node, "", 0)

    def build(self, node: yaml.Node, key: str, depth: int) -> object:
        self.count += 1
        self.bound(node, self.count, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(part, f"{key}[{i}]", depth + 1) for i, part in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, key, depth)
        try:
            value = self.loader.construct_object(node)
        except ValueError:  # an integer of thousands of digits
            raise self.fault(node, f"{quoted(node.value)} cannot be read as a number") from None
        if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
            raise self.fault(node, f"{quoted(value)} holds NUL or half a surrogate pair; remove it")
        return value

    def mapping(self, node: yaml.MappingNode, key: str, depth: int) -> dict[str, object]:
        values: dict[str, object] = {}
        first: dict[str, int] = {}
        for name_node, value_node in node.value:
            name = self.build(name_node, key, depth + 1)
            if not isinstance(name, str):
                written = name_node.value if isinstance(name_node, yaml.ScalarNode) else name
                raise self.fault(name_node, f"the key {quoted(written)} is not a text; put quotes around it")
            if name == "<<":
                raise self.fault(name_node, "the merge key << is not read; write the keys out")
            line = name_node.start_mark.line + 1
            if name in values:
                raise self.fault(name_node, f"the key {quoted(name)} is already on line {first[name]}; keep one")
            first[name], inner = line, f"{key}.{name}".lstrip(".")
            if self.lines is not None:
                self.lines.setdefault(inner, line)
            values[name] = self.build(value_node, inner, depth + 1)
        return values
