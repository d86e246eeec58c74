"""Settings that are taken from elsewhere: ``${section.key}`` is another setting, ``${oc.env:NAME}`` a variable.

The second form may carry a default, ``${oc.env:NAME,default}``; both are OmegaConf's, of which no other form is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from megatron_rl.errors import ConfigError, quoted

REFERENCE = re.compile(r"\$\{([^{}$]*)\}")
MOST_CHARACTERS = 100_000
MOST_LEVELS = 10


class References:
    """Resolves the references of a tree of settings.

    settings: the user's settings over the defaults, nested by section.
    """

    def __init__(self, settings: Mapping[str, object]) -> None:
        self.settings = settings

    def resolved(self, value: object, key: str, level: int = 0) -> object:
        """Return a value with every reference in it, or in a part of it, replaced.

        A text that is one whole reference becomes the other setting's value, whatever its type. Raises ConfigError.
        """
        if isinstance(value, dict):
            return {name: self.resolved(part, f"{key}.{name}".lstrip("."), level) for name, part in value.items()}
        if isinstance(value, list):
            return [self.resolved(part, f"{key}[{i}]", level) for i, part in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        if level > MOST_LEVELS:
            raise ConfigError(f"{key}={quoted(value)} refers to itself, or through more than {MOST_LEVELS} settings")
        if whole := REFERENCE.fullmatch(value):
            return self.looked_up(whole[1], key, value, level)
        text = REFERENCE.sub(lambda found: self.text(found[1], key, value, level), value)
        if len(text) > MOST_CHARACTERS:
            raise ConfigError(f"{key}={quoted(value)} becomes a text of more than {MOST_CHARACTERS} characters")
        return text

    def text(self, name: str, key: str, value: str, level: int) -> str:
        found = self.looked_up(name, key, value, level)
        if isinstance(found, dict | list):
            raise ConfigError(f"{key}={quoted(value)}: {name} is no single value; name one key of it")
        return str(found)

    def looked_up(self, name: str, key: str, value: str, level: int) -> object:
        if name.startswith("oc.env:"):
            variable, has_default, default = name.removeprefix("oc.env:").partition(",")
            found = os.environ.get(variable.strip(), default.strip() if has_default else None)
            if found is None:
                raise ConfigError(
                    f"{key}={quoted(value)}: the environment has no variable {quoted(variable)}; set it, or give a "
                    f"default, as in ${{oc.env:{variable},value}}"
                )
            return found
        found: object = self.settings
        for part in name.strip().split("."):
            if not isinstance(found, dict) or part not in found:
                raise ConfigError(
                    f"{key}={quoted(value)}: {quoted(name)} names no setting; write ${{section.key}} or "
                    "${oc.env:VARIABLE}"
                )
            found = found[part]
        return self.resolved(found, key, level + 1)
