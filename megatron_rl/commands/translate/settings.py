"""Reads a file of another framework's settings: a YAML, or the script that gives them to a program.

Either is bounded as a configuration of ours is (megatron_rl/config/yaml_text.py), a script's words by MOST_WORD.
"""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.commands.translate.kinds import Kind, kind_of_command, kind_of_names
from megatron_rl.commands.translate.shell.expansion import Value
from megatron_rl.commands.translate.shell.reading import Branch, Call, Script, read_script
from megatron_rl.commands.translate.shell.words import MOST_WORD, ScriptError, TooLong
from megatron_rl.commands.translate.translation import flat, number
from megatron_rl.config.yaml_text import MOST_BYTES, parse_yaml, read_yaml
from megatron_rl.errors import ConfigError, quoted
from megatron_rl.json_text import read_bytes

_OVERRIDE = re.compile(r"([+~]{0,2})(\w+(?:\.[\w-]+)+|model_engine)=(.*)", re.DOTALL)
_OTHER_FORMS = {
    ".py": "Python, and is not run",
    ".toml": "TOML, the form of prime-rl and torchtitan",
    ".ipynb": "a notebook",
}
_REFERENCE = re.compile(r"\$\{(?:oc\.select:\s*)?([\w.]+)(?:,([^{}]*))?\}")
_MOST_PASSES = 5  # references to references
_FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Holds what a file sets.

    kind: whose it is; None if nothing says so.
    given: name → value. unknown: name → what its value depends on.
    notes: what of the file is not among them, a line each.
    """

    kind: Kind | None
    given: Mapping[str, Any]
    unknown: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()


def read_settings(path: pathlib.Path, framework: str = "verl", values: Mapping[str, str] | None = None) -> Settings:
    """Return the settings of a YAML, or of the command in a script that is the framework's.

    values: of the script's variables and arguments, by name. Raises ConfigError for a bad file.
    """
    if path.suffix in _OTHER_FORMS:
        raise ConfigError(
            f"{path} is {_OTHER_FORMS[path.suffix]}; give a YAML, or a script with the command that trains"
        )
    if path.suffix in (".yaml", ".yml", ".json"):
        found = followed(flat(read_yaml(path)[0]))
        refers = {k: f"{v!r} refers to another setting" for k, v in found.items() if isinstance(v, str) and "${" in v}
        given = {name: value for name, value in found.items() if name not in refers}
        return Settings(kind=kind_of_names(found), given=given, unknown=refers)
    try:
        text = read_bytes(path, "a YAML or a script", most_bytes=MOST_BYTES, error=ConfigError).decode()
        script = read_script(text, str(path), values or {})
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read: not UTF-8 (byte {error.start + 1}); save it as UTF-8") from error
    except TooLong as error:
        raise ConfigError(f"{path} holds {error} of more than {MOST_WORD} characters; shorten it") from None
    except ScriptError as error:
        raise ConfigError(f"{path}, {error}") from None
    return _of_script(script, framework, path, text)


def followed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with Hydra's references to one another put in, where those have values of their own."""
    found = dict(settings)
    for _ in range(_MOST_PASSES):
        for name, value in found.items():
            if not isinstance(value, str) or "${" not in value:
                continue
            whole_value = _REFERENCE.fullmatch(value)
            if whole_value:
                found[name] = _referred(whole_value, found)
            else:
                text = _REFERENCE.sub(lambda match: str(_referred(match, found)), value)
                found[name] = text if len(text) <= MOST_WORD else value
    return found


def _referred(match: re.Match[str], settings: Mapping[str, Any]) -> Any:
    name, default = match[1], match[2]
    value = settings.get(name, match[0] if default is None else parsed(default.strip()))
    return match[0] if isinstance(value, str) and "${" in value else value


def _of_script(script: Script, framework: str, path: pathlib.Path, text: str) -> Settings:
    lost = [call for call in script.calls if _OVERRIDE.match(call.words[0].text)]  # behind a line that does not go on
    commands = [(call, *_named(call, flags=framework == "TRL")) for call in script.calls if call not in lost]
    kinds = [
        kind_of_command(" ".join(w.text for w in call.words), [*given, *unknown]) for call, given, unknown in commands
    ]
    own = [i for i, kind in enumerate(kinds) if kind is not None and kind.framework == framework]
    chosen = own[:1] or [i for i, kind in enumerate(kinds) if kind is not None][:1]
    if not chosen:
        held = [branch for branch in script.branches if any(_OVERRIDE.match(each) for each in branch.holds)]
        if held:
            raise ConfigError(
                f"{path}: its settings stand under conditions that are not known, {quoted(held[0].condition, 80)} in "
                f"line {held[0].line} first; give the values by --set, as in --set NAME=VALUE or --set 1=VALUE"
            )
        of_text = kind_of_command(text, ())  # of a command in a here-document, say
        return Settings(kind=of_text if of_text and of_text.framework != framework else None, given={})
    call, given, unknown = commands[chosen[0]]
    notes = [_note(branch) for branch in script.branches]
    notes += [f"not read: {quoted(each, 80)}" for each in script.unread]
    own_commands = "is a command of its own to bash, and given to no program"
    notes += [f"line {other.line}: {quoted(other.words[0].text, 80)} {own_commands}" for other in lost]
    if len(own) > 1:
        further = ", ".join(str(commands[i][0].line) for i in own[1:])
        notes.append(f"line {call.line} is translated; further commands of {framework}'s are not: line {further}")
    return Settings(kind=kinds[chosen[0]], given=given, unknown=unknown, notes=notes)


def _note(branch: Branch) -> str:
    holds = " ".join(branch.holds)
    return f"line {branch.line} depends on {quoted(branch.condition, 80)}, and is not taken: {quoted(holds, 200)}"


def _named(call: Call, *, flags: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings of a command line, and those whose value is not known.

    flags: whether ``--name value`` behind the program is a setting too; of a launcher's, ``--num_processes`` is.
    """
    given: dict[str, Any] = {}
    unknown: dict[str, str] = {}
    words = list(call.words)
    programs = [i for i, word in enumerate(words) if re.search(r"(^|/)trl$|\.py$|^-m$", word.text)]
    program = programs[-1] if programs else 0
    for i, word in enumerate(words):
        override, flag = _OVERRIDE.fullmatch(word.text), _FLAG.fullmatch(word.text)
        if override and override[1] != "~":
            name, values = override[2], [Value(override[3], word.depends)]
        elif flag and flags and (i > program or flag[1] == "num_processes"):
            name = flag[1].replace("-", "_")
            behind = _values_behind(words[i + 1 :])[: None if i > program else 1]
            values = [Value(flag[2], word.depends)] if flag[2] is not None else behind or [Value("true")]
        else:
            continue
        given.pop(name, None)
        unknown.pop(name, None)
        depends = list(dict.fromkeys(each for value in values for each in value.depends))
        if depends:
            on = ", ".join(quoted(each, 60) for each in depends)
            unknown[name] = f"{quoted(values[0].text, 80)} depends on {on}"
        else:
            found = [parsed(value.text) for value in values]
            given[name] = found[0] if len(found) == 1 else found
    return given, unknown


def _values_behind(words: Sequence[Value]) -> list[Value]:
    found = []
    for word in words:
        if _FLAG.fullmatch(word.text) or _OVERRIDE.fullmatch(word.text):
            break
        found.append(word)
    return found


def parsed(text: str) -> Any:
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
