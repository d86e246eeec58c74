"""The text of a translation: comments on what is left for the user to do, then our settings as YAML."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

import yaml

from megatron_rl.commands.translate.checking import Check, nested
from megatron_rl.commands.translate.translation import MISSING, Translation

WIDTH = 118


def as_yaml(translation: Translation, source: str, check: Check, notes: Sequence[str] = ()) -> str:
    """Return the text of a translation: comments for the user, then the settings as YAML.

    The comments list the keys without a value, the reasons why a run would not start, ``notes``, and
    the settings that were not translated. They end with what was checked and what was not.

    source: the name of the translated file.
    check: the result of checking the translated configuration.
    notes: sentences on parts of the script that were not read as settings.
    """
    lines = [
        f"# Translated from {translation.framework}'s {source}. docs/coming-from.md says what each setting means there "
        "and here."
    ]
    lines += _section(f"TO FILL IN ({MISSING} below); it does not load before:", _named(translation.open))
    lines += _section("WILL NOT START as it is:", check.faults)
    lines += _section("Of the script, and not taken as settings:", notes)
    lines += _section("NOT translated:", _named(translation.left))
    needless = ", ".join(sorted(translation.needless))
    lines += _section("Needs no setting here:", [needless] if needless else [])
    lines += _section("Checked:", [", ".join(check.done)] if check.done else [])
    lines += _section("Not checked:", check.not_done)
    text = yaml.safe_dump(
        nested(translation.ours), sort_keys=True, default_flow_style=False, allow_unicode=True, width=120
    )
    return "\n".join(lines) + "\n" + text


def _named(reasons: dict[str, str]) -> list[str]:
    return [f"{name}: {why}" for name, why in sorted(reasons.items())]


def _section(title: str, entries: Iterable[str]) -> list[str]:
    lines = []
    for entry in entries:
        one_line = " ".join(entry.split())
        wrapped = textwrap.wrap(one_line, WIDTH - 4, break_long_words=False, break_on_hyphens=False)
        lines += [f"#   {line}" if i == 0 else f"#     {line}" for i, line in enumerate(wrapped)]
    return ["#", f"# {title}", *lines] if lines else []
