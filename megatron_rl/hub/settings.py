"""The replacement of the hub's names and of URLs in a configuration's settings by local paths, and the reverse.

The modules that fetch are imported only if a setting holds a name or a URL.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from megatron_rl.config import Config
from megatron_rl.hub.names import Kind, name_of, name_of_path, url_of_path

_SETTINGS = {
    ("model", "hf_path"): Kind.MODEL,
    ("model", "tokenizer_path"): Kind.TOKENIZER,
    ("critic", "hf_path"): Kind.MODEL,
    ("teacher", "hf_path"): Kind.MODEL,
    ("reward", "model_path"): Kind.MODEL,
    ("eval", "path"): Kind.DATA,
    ("sft", "eval_path"): Kind.DATA,
}


def fetched(config: Config, *, weights: bool = True, pins: bool = True) -> Config:
    """Return the configuration with a local path in place of each URL and each name on the hub, after fetching them.

    A configuration without URLs and names is returned unchanged.

    weights: whether the weights of policy, critic and teacher are fetched; a dry run reads only
        config and tokenizer.
    pins: whether the commits are written to the run's folder.

    Raises ConfigError on every rank for a name that cannot be fetched, and if the other ranks do
    not answer in time.
    """
    values = _values(vars(config))
    urls = {key: (kind, value) for key, (kind, value) in values.items() if "://" in value}
    names = {key: (kind, name_of(value, kind, key)) for key, (kind, value) in values.items()}
    names = {key: (kind, name) for key, (kind, name) in names.items() if name is not None}
    if not names and not urls:
        return config
    from megatron_rl.hub.resolve import local_copies, local_paths

    without = () if weights else ("model.hf_path", "critic.hf_path", "teacher.hf_path")
    if config.model.init != "pretrained":
        without = (*without, "model.hf_path")
    resumes = config.checkpoint.resume != "never"
    paths: dict[str, str] = {}
    if names:
        paths |= local_paths(names, config.run, without_weights=without, resumes=resumes, pins=pins)
    if urls:
        paths |= local_copies(urls, config.run, without_weights=without)
    return dataclasses.replace(config, **_changed(vars(config), lambda key, value: paths.get(key, value)))


def with_names(config: Config) -> Config:
    """Return the configuration for another host: each local copy's path becomes its URL, or its name with a commit."""

    def named(_: str, value: str) -> str:
        return url_of_path(value) or str(name_of_path(value) or value)

    return dataclasses.replace(config, **_changed(vars(config), named))


def _values(sections: Mapping[str, Any]) -> dict[str, tuple[Kind, str]]:
    """Return {key: (kind, value)} of every setting that names a model or data, with keys such as ``data.train[0]``.

    sections: {name: section} of the configuration.
    """
    values = {}
    for (section, field), kind in _SETTINGS.items():
        value = vars(sections[section])[field]
        if value:
            values[f"{section}.{field}"] = (kind, value)
    values |= {f"data.train[{number}]": (Kind.DATA, value) for number, value in enumerate(sections["data"].train)}
    return values | {f"eval.sets.{name}": (Kind.DATA, value) for name, value in sections["eval"].sets.items()}


def _changed(sections: Mapping[str, Any], of: Callable[[str, str], str]) -> dict[str, Any]:
    """Return the sections that name models or data, {name: section}, with each such name replaced.

    sections: {name: section} of the configuration.
    of: called with (key, value) of a setting that names a model or data; returns the new value.
    """
    changed: dict[str, dict[str, object]] = {}
    for key, (_, value) in _values(sections).items():
        section, _, field = key.partition(".")
        if "[" not in field and not field.startswith("sets."):
            changed.setdefault(section, {})[field] = of(key, value)
    train = tuple(of(f"data.train[{number}]", value) for number, value in enumerate(sections["data"].train))
    changed.setdefault("data", {})["train"] = train
    sets = {name: of(f"eval.sets.{name}", value) for name, value in sections["eval"].sets.items()}
    changed.setdefault("eval", {})["sets"] = sets
    return {name: dataclasses.replace(sections[name], **fields) for name, fields in changed.items()}
