"""Reads a file of another framework's settings: a YAML, or the script that gives them as overrides."""

from __future__ import annotations

import ast
import pathlib
import re
import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from megatron_rl.commands.translate.translation import flat, number
from megatron_rl.errors import ConfigError


def read_settings(path: pathlib.Path) -> dict[str, Any]:
    """Return the settings of a YAML, or of the overrides ``a.b=c`` in a script. Raises ConfigError for a bad file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if path.suffix not in (".yaml", ".yml"):
        return overrides_of(text)
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} holds no settings: its YAML is no mapping")
    return flat(values)


def overrides_of(script: str) -> dict[str, Any]:
    """Return the Hydra overrides of a shell script, HOME and the variables that it sets itself put in.

    A value with a variable that the script does not set keeps its ``$``.
    """
    lines = re.sub(r"\\\n", " ", script).split("\n")
    variables: dict[str, str] = {"HOME": str(pathlib.Path.home())}
    found: dict[str, Any] = {}
    for line in lines:
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue  # half of a quoted text, of a heredoc say
        for word in words:
            name, equals, value = word.partition("=")
            value = re.sub(r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})", lambda m: _variable(m, variables), value)
            if equals and re.fullmatch(r"\w+", name) and len(words) <= 2:
                variables[name] = value
            elif equals and re.fullmatch(r"[+~]{0,2}\w+(\.\w+)+|model_engine", name):
                found[name.lstrip("+~")] = _parsed(value)
    return found


def _variable(match: re.Match[str], variables: Mapping[str, str]) -> str:
    name = match[1] or match[2]
    default = match[3] if match[3] is not None else match[0]
    return variables.get(name, default)


def _parsed(text: str) -> Any:
    """Return Hydra's value of a text: a number, a list, true, null or the text itself."""
    if text.startswith("["):
        try:
            return list(ast.literal_eval(text))
        except (ValueError, SyntaxError):
            return [part.strip(" '\"") for part in text.strip("[]").split(",")]
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        try:
            return number(value)
        except ValueError:
            return text
    return value
