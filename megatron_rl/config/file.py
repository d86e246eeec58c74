"""Files and overrides, merged over the defaults into a Config; and a Config written as YAML."""

from __future__ import annotations

import dataclasses
import difflib
import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

import yaml

from megatron_rl.config.ranges import hints_of
from megatron_rl.config.references import References
from megatron_rl.config.sections import Config
from megatron_rl.config.typed import RENAMED, build_section, hint_at, holds_text
from megatron_rl.config.yaml_text import FLOAT, Lines, parse_yaml, read_yaml
from megatron_rl.errors import ConfigError, quoted, shortened

Tree = dict[str, object]


def load_config(path: str | pathlib.Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Load the defaults, then the YAML file, then ``section.key=value`` overrides.

    Raises ConfigError with the file and line of the setting, where it stands in a file.
    """
    tree, lines = read_yaml(path) if path is not None else ({}, {})
    tree = {name: value for name, value in tree.items() if value is not None}  # a section whose keys are comments
    for override in overrides:
        setting = _parse_override(override)
        tree = _merged(tree, setting)
        lines = {key: line for key, line in lines.items() if not _holds(setting, key)}
    try:
        defaults = json.loads(json.dumps(dataclasses.asdict(Config())))
        settings = References(_merged(defaults, tree)).resolved(tree, "")
        for section, key in (("skip", "mode"), ("rollout", "routing_replay")):
            if isinstance(found := settings.get(section), dict) and found.get(key) is False:
                found[key] = "off"  # YAML reads a bare off as the boolean
        return build_section(Config, settings)
    except ConfigError as error:
        raise ConfigError(_with_place(str(error), str(path), lines)) from None


def right_key(key: str) -> str:
    """Return a key's name of today, or the nearest one there is."""
    if key in RENAMED or hint_at(Config, key) is not None:
        return RENAMED.get(key, key)
    return difflib.get_close_matches(key[:100], list(all_keys()), n=1, cutoff=0.0)[0]


def all_keys(cls: type = Config, prefix: str = "") -> Iterator[str]:
    """Yield the dotted key of every setting."""
    for name, hint in hints_of(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from all_keys(hint, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _parse_override(override: str) -> Tree:
    key, equals, text = override.partition("=")
    bare = key.strip().lstrip("+~-")
    if not equals or not bare:
        raise ConfigError(
            f"override {quoted(override)} is not of the form section.key=value, without spaces around the ="
        )
    if bare != key.strip():
        raise ConfigError(
            f"override {quoted(override)}: a setting is written without {quoted(key.strip()[0])} before it, as in "
            f"{right_key(bare)}={shortened(text)}"
        )
    value = _override_value(bare, text, override)
    for name in reversed(bare.split(".")):
        value = {name: value}
    return value


def _override_value(key: str, text: str, override: str) -> object:
    """Return the value of an override; what is no YAML scalar is still a text where the field holds one."""
    if re.search("[\ud800-\udfff]", override):
        raise ConfigError(f"override {quoted(override)} is not UTF-8")
    if not text.strip():
        raise ConfigError(f"override {quoted(override)} gives no value; write null for none, '\"\"' for an empty text")
    hint = hint_at(Config, key)
    wants_text = holds_text(hint) and not (text.lstrip()[0] == "[" and hint == tuple[str, ...])
    try:
        value = parse_yaml(text, f"override {quoted(override)}")
    except ConfigError:
        if wants_text:
            return text
        raise
    return (
        text if wants_text and isinstance(value, int | float | dict | list) and not isinstance(value, bool) else value
    )


def _merged(below: Mapping[str, object], above: Mapping[str, object]) -> Tree:
    """Return ``below`` with the settings of ``above`` over it, section by section."""
    both = dict(below)
    for name, value in above.items():
        held = both.get(name)
        both[name] = _merged(held, value) if isinstance(held, dict) and isinstance(value, dict) else value
    return both


def _holds(tree: Tree, key: str) -> bool:
    """Tell whether a tree sets the value at a dotted key, or a section that it stands in."""
    found: object = tree
    for name in key.split("."):
        if not isinstance(found, dict):
            return True
        if name not in found:
            return False
        found = found[name]
    return not isinstance(found, dict)


def _with_place(message: str, path: str, lines: Lines) -> str:
    """Return a message that begins with the file and the lines of the keys that it names."""
    named = set(re.findall(r"[\w-]+(?:\.[\w-]+)+", message))
    named |= set(re.findall(r"^(?:unknown )?(?:config key )?([\w-]+)(?![\w.-])", message))
    found = sorted({lines[key] for key in named if key in lines})
    if not found:
        return message
    return f"{path}, line{'s' * (len(found) > 1)} {', '.join(map(str, found))}: {message}"


def config_to_dict(config: Config) -> dict[str, dict]:
    """Return the resolved configuration as plain values, which JSON and YAML hold unchanged."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


class _Dumper(yaml.SafeDumper):
    """Puts quotes around every text that ``parse_yaml`` would read as a number."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))


def config_to_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML, every default filled in."""
    return yaml.dump(config_to_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
