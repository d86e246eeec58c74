"""The settings that may name something on the hub: their values by key, and a configuration with others in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from megatron_rl.config import Config
from megatron_rl.hub.names import HubName, Kind, name_of, name_of_path

_ONE = {
    ("model", "hf_path"): Kind.MODEL,
    ("model", "tokenizer_path"): Kind.TOKENIZER,
    ("critic", "hf_path"): Kind.MODEL,
    ("teacher", "hf_path"): Kind.MODEL,
    ("reward", "model_path"): Kind.MODEL,
    ("eval", "path"): Kind.DATA,
    ("sft", "eval_path"): Kind.DATA,
}


def values_of(config: Config) -> dict[str, tuple[Kind, str]]:
    """Return the kind and value of every setting that names a model or data, by key, as ``data.train[0]``."""
    found = {}
    for (section, field), kind in _ONE.items():
        value = dataclasses.asdict(getattr(config, section))[field]
        if value:
            found[f"{section}.{field}"] = (kind, value)
    found |= {f"data.train[{number}]": (Kind.DATA, value) for number, value in enumerate(config.data.train)}
    return found | {f"eval.sets.{name}": (Kind.DATA, value) for name, value in config.eval.sets.items()}


def names_in(config: Config) -> dict[str, tuple[Kind, HubName]]:
    """Return the hub's names in a configuration, by key. Raises ConfigError for one that is malformed."""
    found = {key: (kind, name_of(value, kind, key)) for key, (kind, value) in values_of(config).items()}
    return {key: (kind, name) for key, (kind, name) in found.items() if name is not None}


def with_paths(config: Config, paths: Mapping[str, str]) -> Config:
    """Return the configuration with paths in place of the values at their keys."""
    return _mapped(config, lambda key, value: paths.get(key, value))


def with_names(config: Config) -> Config:
    """Return the configuration with names and commits in place of fetched paths, as it can run on another host."""
    return _mapped(config, lambda key, value: str(name_of_path(value) or value))


def _mapped(config: Config, of: Callable[[str, str], str]) -> Config:
    changed: dict[str, dict[str, object]] = {}
    for key, (_, value) in values_of(config).items():
        section, _, field = key.partition(".")
        if "[" not in field and not field.startswith("sets."):
            changed.setdefault(section, {})[field] = of(key, value)
    train = tuple(of(f"data.train[{number}]", value) for number, value in enumerate(config.data.train))
    changed.setdefault("data", {})["train"] = train
    sets = {name: of(f"eval.sets.{name}", value) for name, value in config.eval.sets.items()}
    changed.setdefault("eval", {})["sets"] = sets
    sections = {name: dataclasses.replace(getattr(config, name), **fields) for name, fields in changed.items()}
    return dataclasses.replace(config, **sections)
