"""Reads a file of another framework's settings: a YAML, or the script that gives them as overrides.

Either is bounded as a configuration of ours is (megatron_rl/config/yaml_text.py), a script's words by MOST_WORD.
"""

from __future__ import annotations

import ast
import pathlib
import re
import shlex
from collections.abc import Mapping
from typing import Any

from megatron_rl.commands.translate.translation import flat, number
from megatron_rl.config.yaml_text import MOST_BYTES, parse_yaml, read_yaml
from megatron_rl.errors import ConfigError, quoted
from megatron_rl.json_text import read_bytes

MOST_WORD = 2**13  # characters of a script's word, and of a variable's value


def read_settings(path: pathlib.Path) -> dict[str, Any]:
    """Return the settings of a YAML, or of the overrides ``a.b=c`` in a script. Raises ConfigError for a bad file."""
    if path.suffix in (".yaml", ".yml"):
        return flat(read_yaml(path)[0])
    try:
        return overrides_of(read_bytes(path, "a YAML or a script", most_bytes=MOST_BYTES, error=ConfigError).decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read: not UTF-8 (byte {error.start + 1}); save it as UTF-8") from error
    except _TooLong as error:
        raise ConfigError(f"{path} holds {error} of more than {MOST_WORD} characters; shorten it") from None


class _TooLong(Exception):
    """Carries the beginning of a word that is too long."""


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
            if len(word) <= MOST_WORD:
                value = re.sub(r"\$(?:(\w+)|\{(\w+)(?::-([^{}]*))?\})", lambda m: _variable(m, variables), value)
            if equals and max(len(word), len(value)) > MOST_WORD:
                raise _TooLong(f"a word, {quoted(word, 40)},")
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
        except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two of many brackets
            return [part.strip(" '\"") for part in text.strip("[]").split(",")]
    try:
        value = parse_yaml(text, "a word")
        return number(value) if isinstance(value, str) or (isinstance(value, float) and "e" in text.lower()) else value
    except ValueError:  # no number; a ConfigError of what is no YAML is one too
        return text
