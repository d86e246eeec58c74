"""The reader of another framework's settings: from a YAML file, or from a shell script that passes them to a program.

A YAML that is too large or too deeply nested is refused. So is a script with a word of more than
8192 characters.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.commands.translate.kinds import kind_of_command
from megatron_rl.commands.translate.shell.expansion import Value
from megatron_rl.commands.translate.shell.reading import Branch, Call, Script, read_script
from megatron_rl.commands.translate.shell.words import MOST_WORD, ScriptError, TooLong
from megatron_rl.commands.translate.yaml_settings import SUFFIXES, Settings, of_yaml, parsed
from megatron_rl.config.yaml_text import MOST_BYTES
from megatron_rl.errors import ConfigError, quoted
from megatron_rl.json_text import read_bytes

_OVERRIDE = re.compile(r"([+~]{0,2})(\w+(?:\.[\w-]+)+|model_engine)=(.*)", re.DOTALL)
_FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_OTHER_FORMS = {
    ".py": "Python, and is not run",
    ".toml": "TOML, the form of prime-rl and torchtitan",
    ".ipynb": "a notebook",
}
# verl's own YAMLs; their defaults of translated settings are the same.
_OF_VERL = ("ppo_trainer", "ppo_megatron_trainer", "dapo_trainer", "dapo_megatron_trainer")


def read_settings(path: pathlib.Path, framework: str = "verl", values: Mapping[str, str] | None = None) -> Settings:
    """Return the settings in a YAML file, or in a shell script's command that starts the framework.

    values: {name: value} of a script's variables; the script's arguments are named "1", "2", ….

    Raises ConfigError for a file that cannot be read as YAML or as a script.
    """
    if path.suffix in _OTHER_FORMS:
        raise ConfigError(
            f"{path} is {_OTHER_FORMS[path.suffix]}; give a YAML, or a script with the command that trains"
        )
    if path.suffix in SUFFIXES:
        return of_yaml(path)
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


def _of_script(script: Script, framework: str, path: pathlib.Path, text: str) -> Settings:
    # Find the framework's commands among the script's calls.
    lost = [call for call in script.calls if _OVERRIDE.match(call.words[0].text)]  # after a line without a continuation
    commands = [(call, *_named(call, flags=framework != "verl")) for call in script.calls if call not in lost]
    kinds = [
        kind_of_command(" ".join(w.text for w in call.words), [*written, *unknown])
        for call, written, unknown in commands
    ]
    own = [i for i, kind in enumerate(kinds) if kind is not None and kind.framework == framework]
    chosen = own[:1] or [i for i, kind in enumerate(kinds) if kind is not None][:1]
    if not chosen:
        held = [branch for branch in script.branches if any(_OVERRIDE.match(each) for each in branch.holds)]
        if held:
            raise ConfigError(
                f"{path}: its settings depend on unknown conditions, {quoted(held[0].condition, 80)} in "
                f"line {held[0].line} first; give the values by --set, as in --set NAME=VALUE or --set 1=VALUE"
            )
        of_text = kind_of_command(text, ())  # of a command in a here-document, say
        return Settings(kind=of_text if of_text and of_text.framework != framework else None, given={})
    # Translate the first command, and note everything that is not read.
    call, written, unknown = commands[chosen[0]]
    notes = [_note(branch) for branch in script.branches]
    notes += [f"not read: {quoted(each, 80)}" for each in script.unread]
    own_commands = "is a command of its own to bash, and given to no program"
    notes += [f"line {other.line}: {quoted(other.words[0].text, 80)} {own_commands}" for other in lost]
    if len(own) > 1:
        further = ", ".join(str(commands[i][0].line) for i in own[1:])
        notes.append(f"line {call.line} is translated; further commands of {framework}'s are not: line {further}")
    # Add the settings of a YAML that the command names.
    kind = kinds[chosen[0]]
    if kind is not None and kind.framework == framework:
        elsewhere = _elsewhere(call, framework, written, path, notes)
        written = {**elsewhere.given, **written}
        unknown = {**{name: why for name, why in elsewhere.unknown.items() if name not in written}, **unknown}
    return Settings(kind=kind, given=written, unknown=unknown, notes=notes)


def _elsewhere(call: Call, framework: str, written: dict[str, Any], script: pathlib.Path, notes: list[str]) -> Settings:
    """Return the settings of the YAML file that a command line names; empty Settings if it names no file.

    verl's YAML is not read, since it builds upon other files. For verl the result is empty, and
    ``notes`` gets a sentence if the command line names a YAML that is not one of verl's own.

    call: the command line.
    framework: ``verl``, ``trl`` or ``axolotl``.
    written: the settings of the command line; its key ``config``, the YAML's name, is removed.
    script: the path of the script; the file is looked for in the working directory, then beside it.
    notes: a list of sentences for the user.

    Raises ConfigError if TRL's or axolotl's YAML is not found.
    """
    line = " ".join(word.text for word in call.words)
    if framework == "verl":
        named = re.search(r"--config-name[= ](\S+)", line)
        if named and named[1].removesuffix(".yaml") not in _OF_VERL:
            notes.append(
                f"line {call.line}: {quoted(named[1], 80)} is a YAML of other defaults, which is not read: what it "
                "sets has verl's own defaults below"
            )
        return Settings(kind=None, given={})
    file = written.pop("config", None)
    if framework == "axolotl":
        file = next((word.text for word in call.words if word.text.endswith(SUFFIXES)), None)
    if file is None:
        return Settings(kind=None, given={})
    for path in (pathlib.Path(str(file)), script.parent / str(file)):
        if path.is_file():
            return of_yaml(path)
    raise ConfigError(
        f"{script}, line {call.line}: its settings stand in {quoted(file, 300)}, which is not here; run this where it "
        "is, or translate that file"
    )


def _note(branch: Branch) -> str:
    holds = " ".join(branch.holds)
    return f"line {branch.line} depends on {quoted(branch.condition, 80)}, and is not taken: {quoted(holds, 200)}"


def _named(call: Call, *, flags: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Return {name: value} of a command line's settings, and {name: reason} of settings whose value is not known.

    flags: True if ``--name value`` is a setting as well as ``name=value``; False if only the latter is.
        Flags of a launcher, such as ``accelerate launch``, are no settings, except
        ``--num_processes``.
    """
    written: dict[str, Any] = {}
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
        written.pop(name, None)
        unknown.pop(name, None)
        depends = list(dict.fromkeys(each for value in values for each in value.depends))
        if depends:
            on = ", ".join(quoted(each, 60) for each in depends)
            unknown[name] = f"{quoted(values[0].text, 80)} depends on {on}"
        else:
            found = [parsed(value.text) for value in values]
            written[name] = found[0] if len(found) == 1 else found
    return written, unknown


def _values_behind(words: Sequence[Value]) -> list[Value]:
    values = []
    for word in words:
        if _FLAG.fullmatch(word.text) or _OVERRIDE.fullmatch(word.text):
            break
        values.append(word)
    return values
