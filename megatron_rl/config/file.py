"""Functions that load a Config from a file or mapping and overrides, and that write a Config as YAML or plain values.

OmegaConf merges the settings over the defaults.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_rl.config.checks import hints_of
from megatron_rl.config.sections import Config
from megatron_rl.config.typed import build_section, escaped, fitted, hint_at, holds_text
from megatron_rl.config.yaml_text import MOST_LEVELS, Lines, parse_yaml, read_yaml
from megatron_rl.errors import ConfigError, quoted, shortened

Tree = dict[str, object]


def load_config(
    source: str | os.PathLike[str] | Mapping[str, object] | DictConfig | None = None, overrides: Sequence[str] = ()
) -> Config:
    """Return a checked Config: the defaults, replaced by the source's settings, replaced by the overrides.

    source: a YAML file's path, or the settings as a mapping or as OmegaConf's DictConfig. None: the
        defaults alone.
    overrides: texts ``section.key=value``.

    Source and overrides may hold OmegaConf's interpolations, which refer to the merged settings
    (megatron_rl/config/interpolation.py).

    Raises ConfigError for a setting that cannot work. If a file sets it, the message begins with the
    file and the line.
    """
    # The layers, and the lines of settings that no override replaces.
    tree, lines = _read(source)
    tree = {name: value for name, value in tree.items() if value is not None}  # a section whose keys are comments
    layers = [tree, *map(_parse_override, overrides)]
    lines = {key: line for key, line in lines.items() if not any(_holds(layer, key) for layer in layers[1:])}
    overridden = {key for layer in layers[1:] for key in _keys(layer)}
    # Checked against each other, merged, then checked against the fields' types.
    try:
        for below, above in itertools.combinations(layers, 2):
            _check_over(below, above)
        settings = _merged(layers)
        for section, key in (("skip", "mode"), ("rollout", "routing_replay")):
            if isinstance(part := settings.get(section), dict) and part.get(key) is False:
                part[key] = "off"  # YAML reads a bare off as the boolean
        return _typed(fitted(Config, settings))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    except ConfigError as error:
        raise ConfigError(_with_place(str(error), str(source), lines, overridden)) from None


def _merged(layers: Sequence[Tree]) -> Tree:
    """Return nested dicts of settings merged into one; later values replace earlier, interpolations are evaluated."""
    if not any(_has_interpolation(layer) for layer in layers):
        return OmegaConf.to_container(OmegaConf.unsafe_merge(*map(OmegaConf.create, layers)))
    from megatron_rl.config.interpolation import Interpolations

    interpolations = Interpolations()
    merged = OmegaConf.unsafe_merge(*(OmegaConf.create(interpolations.taken_out(layer)) for layer in layers))
    return interpolations.put_in(OmegaConf.to_container(merged), lambda: config_to_dict(Config()))


def _has_interpolation(value: object) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_interpolation, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and "${" in value


def _check_over(below: object, above: object, key: str = "") -> None:
    """Raise ConfigError if the settings ``above`` cannot be merged over the settings ``below``.

    They cannot if one has a list where the other has keys. They cannot either if ``below`` sets a
    whole section by an interpolation, and ``above`` sets a key of that section.
    """
    if {type(below), type(above)} == {dict, list}:
        raise ConfigError(f"{key} is {quoted(below)} in one place and {quoted(above)} in another; write it once")
    if isinstance(below, str) and "${" in below and isinstance(above, dict) and above:
        name = next(iter(above))
        raise ConfigError(
            f"{key} is set by the interpolation {quoted(below)}, and {key}.{name} on its own; write the keys of {key} "
            "out"
        )
    if isinstance(below, dict) and isinstance(above, dict):
        for name in below.keys() & above.keys():
            _check_over(below[name], above[name], f"{key}.{name}".lstrip("."))


def _typed(settings: Tree) -> Config:
    """Return the Config of settings merged over the defaults.

    settings: a tree whose values have the types of their fields.
    """
    defaults = {name: _structured(hints_of(Config)[name]) for name in settings}
    merged = OmegaConf.unsafe_merge(OmegaConf.create(defaults), escaped(settings))
    return build_section(Config, OmegaConf.to_container(merged, resolve=True))


@functools.cache
def _structured(section: type) -> DictConfig:
    """Return a section's defaults as OmegaConf's structured config, which is cached: callers must not change it."""
    settings = OmegaConf.structured(section, flags={"no_deepcopy_set_nodes": True})  # its nodes are new
    inner = [settings[name] for name, hint in hints_of(section).items() if dataclasses.is_dataclass(hint)]
    for part in (settings, *inner):
        OmegaConf.set_readonly(part, False)  # OmegaConf 2.3 merges nothing into the config of a frozen dataclass
    return settings


def _read(source: object) -> tuple[Tree, Lines]:
    """Return (settings in plain values, {dotted key: line}) of a source; no lines are known unless it is a file."""
    if source is None:
        return {}, {}
    if isinstance(source, str | os.PathLike):
        return read_yaml(source)
    if not isinstance(source, Mapping):
        raise ConfigError(f"the configuration is {quoted(source)}; give a file's path, a mapping or a DictConfig")
    return _plain(source, ""), {}


def _plain(value: object, key: str) -> object:
    """Return a mapping, or a value within it, as plain dicts, lists and scalars; OmegaConf's containers are converted.

    key: the dotted key of the value, for messages.
    """
    if isinstance(value, DictConfig | ListConfig):
        is_part = value._get_parent() is not None  # a part's interpolations refer to the whole: resolve them here
        return _plain(OmegaConf.to_container(value, resolve=is_part), key)
    if key.count(".") > MOST_LEVELS:
        raise ConfigError(f"{shortened(key)} is nested deeper than {MOST_LEVELS} levels")
    if isinstance(value, Mapping):
        if odd := [name for name in value if not isinstance(name, str)]:
            raise ConfigError(f"the key {quoted(odd[0])} of {key or 'the configuration'} is not a text")
        return {name: _plain(part, f"{key}.{name}".lstrip(".")) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, f"{key}.{i}") for i, part in enumerate(value)]
    if value is None or isinstance(value, str | int | float | os.PathLike):
        return os.fspath(value) if isinstance(value, os.PathLike) else value
    raise ConfigError(f"{key}={quoted(value)} must be a text, a number, true, false, null, a list or a mapping")


def _parse_override(override: str) -> Tree:
    key, equals, text = override.partition("=")
    bare = key.strip().lstrip("+~-")
    if not equals or not bare:
        raise ConfigError(
            f"override {quoted(override)} is not of the form section.key=value, without spaces around the ="
        )
    if bare != key.strip():
        from megatron_rl.config.known_names import RENAMED
        from megatron_rl.config.nearest import meant

        is_known = bare in RENAMED or hint_at(Config, bare) is not None
        keys, note = ([RENAMED.get(bare, bare)], "") if is_known else meant(Config, Config, bare)
        how = f"as in {keys[0]}={shortened(text)}" if keys else f"and {note}"
        raise ConfigError(
            f"override {quoted(override)}: a setting is written without {quoted(key.strip()[0])} before it, {how}"
        )
    value = _override_value(bare, text, override)
    for name in reversed(bare.split(".")):
        value = {name: value}
    return value


def _override_value(key: str, text: str, override: str) -> object:
    """Return the value of an override, read as YAML.

    If the field holds texts, a value that is a number, a mapping or no valid YAML stays as written.

    key: the override's dotted key.
    text: the value as written.
    override: the whole override, for messages.
    """
    if re.search("[\ud800-\udfff]", override):
        raise ConfigError(f"override {quoted(override)} is not UTF-8")
    if not text.strip():
        raise ConfigError(f"override {quoted(override)} gives no value; write null for none, '\"\"' for an empty text")
    hint = hint_at(Config, key)
    wants_text = holds_text(hint) and not (text.lstrip()[0] == "[" and hint == tuple[str, ...])
    try:
        value = text.strip() if text.lstrip()[:2] == "${" else parse_yaml(text, f"override {quoted(override)}")
    except ConfigError:
        if wants_text:
            return text
        raise
    return (
        text if wants_text and isinstance(value, int | float | dict | list) and not isinstance(value, bool) else value
    )


def _holds(tree: Tree, key: str) -> bool:
    """Return whether a tree of settings sets the value at a dotted key, or replaces a section that holds the key."""
    part: object = tree
    for name in key.split("."):
        if not isinstance(part, dict):
            return True
        if name not in part:
            return False
        part = part[name]
    return not isinstance(part, dict)


def _keys(tree: Tree, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of an override's tree, outer keys first. Example: a.b=1 gives a, a.b."""
    for name, part in tree.items():
        yield f"{prefix}{name}"
        if isinstance(part, dict):
            yield from _keys(part, f"{prefix}{name}.")


def _with_place(message: str, path: str, lines: Lines, overridden: Collection[str]) -> str:
    """Return an error message with a prefix that says where its keys were set: in which lines, or on the command line.

    In a message about an unknown key, only that key is looked up, not the known keys that are advised.

    path: the file's name.
    lines: {dotted key: its line in the file}.
    overridden: the dotted keys of the overrides.
    """
    said = message.split(" (value ")[0] if message.startswith("unknown config key ") else message
    named = set(re.findall(r"[\w-]+(?:\.[\w-]+)+", said))
    named |= set(re.findall(r"^(?:unknown )?(?:config key )?([\w-]+)(?![\w.-])", said))
    found = sorted({lines[key] for key in named if key in lines})
    places = [f"{path}, line{'s' * (len(found) > 1)} {', '.join(map(str, found))}"] if found else []
    if named & set(overridden) or any("." in key and key in said for key in overridden):
        places.append("the command line" if found else "on the command line")
    return f"{' and '.join(places)}: {message}" if places else message


def config_to_dict(config: Config) -> dict[str, dict]:
    """Return {section: {key: value}} of a Config, in plain values that JSON and YAML can hold."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def config_to_yaml(config: Config) -> str:
    """Return a Config as YAML, with every setting written out; ``load_config`` of it gives an equal Config."""
    return OmegaConf.to_yaml(OmegaConf.create(escaped(config_to_dict(config))))
