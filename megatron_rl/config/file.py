"""Files and overrides, which OmegaConf merges into a Config; and a Config written as YAML."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import pathlib

from megatron_rl.config.sections import Config
from megatron_rl.errors import ConfigError

# Keys of earlier releases and their names of today; a section's name renames all of its keys.
RENAMED = {
    "train.steps": "train.num_rollouts",
    "train.prompts_per_step": "train.prompts_per_rollout",
    "train.export_every": "train.export_every_rollouts",
    "warmup": "sft",
    "critic.warmup_steps": "critic.warmup_rollouts",
    "checkpoint.save_every": "checkpoint.save_every_rollouts",
    "reference.refresh_every": "reference.refresh_every_rollouts",
    "eval.every": "eval.every_rollouts",
    "metrics.dense_every": "metrics.dense_every_rollouts",
    "weight_sync.interval": "weight_sync.interval_steps",
    "rollout.producer.depth": "rollout.producer.prefetch_rollouts",
    "rollout.producer.max_staleness": "rollout.producer.max_staleness_steps",
    "reward.overlong_buffer": "reward.overlong_buffer_tokens",
    "replay.size": "replay.capacity_groups",
    "replay.max_age": "replay.max_age_versions",
    "reroll.buffer_size": "reroll.capacity_prompts",
}


def _check_keys(tree: dict, cls: type, prefix: str = "") -> None:
    known = {f.name: f for f in dataclasses.fields(cls)}
    for key, value in tree.items():
        if f"{prefix}{key}" in RENAMED:
            raise ConfigError(
                f"config key {prefix}{key} (value {value!r}) is called {RENAMED[f'{prefix}{key}']} now; rename it"
            )
        if key not in known:
            nearest = difflib.get_close_matches(str(key), list(known), n=1, cutoff=0.0)
            raise ConfigError(
                f"unknown config key {prefix}{key} (value {value!r}); the nearest known key is {prefix}{nearest[0]}"
            )
        section = known[key].default_factory
        if dataclasses.is_dataclass(section) and isinstance(section, type):
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{prefix}{key}={value!r} must be a section with keys, as in "
                    f"{prefix}{key}.{dataclasses.fields(section)[0].name}"
                )
            _check_keys(value, section, f"{prefix}{key}.")


def _with_lists(tree: dict, cls: type) -> dict:
    """Return the settings with a bare text in place of a list as a list of one; an empty text is an empty list."""
    sections = {f.name: f for f in dataclasses.fields(cls)}
    lists = {}
    for key, value in tree.items():
        section = sections[key].default_factory
        if dataclasses.is_dataclass(section):
            lists[key] = _with_lists(value, section)
        elif isinstance(value, str) and sections[key].type.startswith("tuple[str"):
            lists[key] = [value] if value else []
        else:
            lists[key] = value
    return lists


def load_config(path: str | pathlib.Path | None = None, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Load the defaults, then the YAML file, then ``section.key=value`` overrides.

    Raises ConfigError or FileNotFoundError.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    layers = []
    if path is not None:
        layers.append(OmegaConf.load(path))
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"override {override!r} is not of the form section.key=value")
    try:
        layers.append(OmegaConf.from_dotlist(list(overrides)))
        settings = OmegaConf.merge(*layers)
        if OmegaConf.select(settings, "skip.mode") is False:  # YAML reads a bare off as the boolean
            OmegaConf.update(settings, "skip.mode", "off")
        tree = OmegaConf.to_container(settings, resolve=True)
        if not isinstance(tree, dict):
            raise ConfigError(f"{path} must hold sections with keys, and it holds a {type(tree).__name__}")
        _check_keys(tree, Config)
        return OmegaConf.to_object(OmegaConf.merge(_defaults(), _with_lists(tree, Config)))
    except OmegaConfBaseException as error:
        key = error.full_key or ""
        cause = error.__cause__
        if isinstance(cause, ConfigError):
            raise cause from None
        raise ConfigError(f"config key {key}: {str(error).splitlines()[0]}") from error


@functools.cache
def _defaults():
    """Build OmegaConf's typed tree of the defaults, once.

    It takes four fifths of the time of reading a configuration; merging copies it.
    """
    from omegaconf import OmegaConf

    return OmegaConf.structured(Config)


def config_to_dict(config: Config) -> dict[str, dict]:
    """Return the resolved configuration as plain values, which JSON and YAML hold unchanged."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def config_to_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML, every default filled in."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(config_to_dict(config)))
