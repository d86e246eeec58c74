"""The sampled completions and their rewards: chosen, shortened, written as JSON lines, shown as text, and read back.

A completion may hold hostile text. In completions.jsonl it stands inside JSON strings. On a
terminal, a page and elsewhere it is first made ``visible``: no character of it can then move a
cursor, reverse a line or look like another.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import pathlib
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_rl.errors import quoted
from megatron_rl.json_text import check, open_regular, parse_json
from megatron_rl.types import Rollout

log = logging.getLogger(__name__)

FILE_NAME = "completions.jsonl"
ROLLOUTS_FOLDER = "rollouts"  # folder of whole rollouts (saved_rollouts.py)
TRAIN = "train"  # the source of a rollout's completions
MOST_LINE_BYTES = 1 << 24  # the most bytes of a completion's line
LOGGED_CHARS = 400  # the most characters of each text in the log
LOGGED_PER_SOURCE = 2  # the best and the worst of one prompt
_ASIDE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # numbers that JSON cannot hold
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Holds one completion as it is recorded, with long texts shortened.

    source:    "train", or the name of the completion's evaluation as in its metrics: "eval/<name>",
        "eval/<name>_before".
    sample:    the sample's name, ``<prompt>#<number in its group>``.
    answer:    the column that reward functions get as ``answer``; None if the data have no such
        column.
    reward:    the total reward, from which the advantage is computed; None if the sample was
        excluded from its group.
    rewards:   {reward function's name: its reward}; None where the function did not apply.
    advantage: the sample's advantage, or the mean over its loss tokens if they differ; None at
        evaluation.
    response_tokens: the number of its response tokens.
    weight_version: the version of the oldest weights that generated any of its tokens.
    excluded:  the environment's error that excluded the sample from its group; None if there was
        none.
    rollout:   the number of the rollout, from 1; None at evaluation.
    step:      the optimizer step of the metrics.jsonl row that was written together with it.
    """

    source: str
    sample: str
    prompt: str
    response: str
    answer: str | None
    reward: float | None
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    advantage: float | None = None
    finish_reason: str
    response_tokens: int
    weight_version: int
    excluded: str | None = None
    rollout: int | None = None
    step: int | None = None


_KINDS = {
    **dict.fromkeys(("source", "sample", "prompt", "response", "answer", "finish_reason", "excluded"), str),
    **dict.fromkeys(("response_tokens", "weight_version", "rollout", "step"), int),
    **dict.fromkeys(("reward", "advantage"), float),
    "rewards": dict,
}
_NULLABLE = ("answer", "excluded", "rollout", "reward", "advantage")


def cut(value: object, most_chars: int) -> str:
    """Return a value as text, with the middle left out if it has more than ``most_chars`` characters.

    A note in the middle gives the number of characters left out. Half a surrogate pair, which no
    strict JSON reader takes, is replaced by U+FFFD.

    Example: ``cut("abcdefgh", 4)`` is ``"ab […4 characters…] gh"``.
    """
    text = value if isinstance(value, str) else str(value)
    if len(text) > most_chars:
        head, tail = most_chars // 2, most_chars - most_chars // 2
        text = f"{text[:head]} […{len(text) - most_chars} characters…] {text[len(text) - tail :]}"
    return _SURROGATE.sub("\ufffd", text)


def visible(text: str) -> str:
    r"""Return the text with control, format and other invisible characters written as escapes.

    Line breaks ("\n"), spaces and tabs stay.

    Example: ``visible("\x1b[2J")`` is ``"\\x1b[2J"``.
    """
    return "".join(map(_visible_character, text))


def _visible_character(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return character
    return character.encode("unicode_escape").decode("ascii")


def of_rollout(
    rollout: Rollout,
    *,
    source: str,
    reward: float | None,
    rewards: Mapping[str, float | None],
    most_chars: int,
    advantage: float | None = None,
    number: int | None = None,
) -> Completion:
    """Return the record of one sample.

    rollout: the sample with its prompt and response.
    source, rewards, advantage: as in Completion.
    reward: the total reward; None or NaN for an excluded sample.
    most_chars: the length to which texts are cut.
    number: the number of the rollout, from 1; None at evaluation.
    """
    answer = rollout.prompt.columns.get("answer")
    return Completion(
        source=source,
        sample=rollout.sample_id,
        prompt=cut(rollout.prompt.text, most_chars),
        response=cut(rollout.text, most_chars),
        answer=None if answer is None else cut(answer, most_chars),
        reward=None if reward is None or math.isnan(reward) else float(reward),
        rewards=dict(rewards),
        advantage=advantage,
        finish_reason=rollout.finish_reason,
        response_tokens=len(rollout.response_ids),
        weight_version=rollout.weight_version,
        excluded=None if rollout.excluded is None else cut(rollout.excluded, most_chars),
        rollout=number,
    )


def share_of_groups(num_groups: int, group_size: int, count: int) -> list[int]:
    """Return, for each group, how many of its completions to show: ``count`` in all, if there are so many.

    The first groups give two each, for their best and worst sample. They give more only if there
    are too few groups.

    Example: 8 groups of 4 samples, ``count`` 3: ``[2, 1, 0, 0, 0, 0, 0, 0]``.
    """
    each = min(group_size, max(2, math.ceil(count / max(num_groups, 1))))
    return [max(0, min(each, count - each * number)) for number in range(num_groups)]


def best_to_worst(rewards: Sequence[float | None], count: int) -> list[int]:
    """Return the indices of ``count`` samples of a group, spread evenly over the ranking from the best to the worst.

    A sample without a reward ranks as the worst.

    Example: ``best_to_worst([0.0, 1.0, None, 0.5], 2)`` is ``[1, 2]``.
    """
    values = [-math.inf if value is None or math.isnan(value) else value for value in rewards]
    order = sorted(range(len(values)), key=lambda index: -values[index])
    places = np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int)
    return [order[place] for place in places]


def plain(value: float | None) -> float | None:
    """Return a number rounded to six digits; None for None and for a number that JSON cannot hold (NaN, infinity)."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def to_row(completion: Completion) -> dict[str, object]:
    """Return a completion as a JSON-able dict; a number that JSON cannot hold becomes text, as "inf"."""

    def written(value: object) -> object:
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    row = {key: written(value) for key, value in dataclasses.asdict(completion).items()}
    row["rewards"] = {name: written(value) for name, value in completion.rewards.items()}
    return row


def _from_row(row: Mapping[str, object], where: str) -> Completion:
    """Return the completion of one dict that ``to_row`` made.

    where: ``<file>:<line>``, for error messages.

    Raises ValueError for a missing, unknown or wrong field.
    """
    if row.keys() != _KINDS.keys():
        odd = ", ".join(sorted(map(quoted, row.keys() ^ _KINDS.keys())))
        raise ValueError(f"{where}: fields are missing or unknown: {odd:.200}; delete the line")

    def checked(name: str, value: object, kind: type) -> object:
        if kind is float and isinstance(value, str) and value in _ASIDE:
            return _ASIDE[value]
        return (
            value if value is None and name in _NULLABLE else check(value, f"{where}: {name}", kind, error=ValueError)
        )

    values = {name: checked(name, value, _KINDS[name]) for name, value in row.items()}
    values["rewards"] = {name: checked("reward", value, float) for name, value in values["rewards"].items()}
    return Completion(**values)


def read_completions(path: str | pathlib.Path) -> Iterator[Completion]:
    """Yield the completions of a completions.jsonl, in order.

    A last line without a newline, which an interrupted write leaves, is left out.

    Raises ValueError ``<file>:<line>: ...`` for a malformed line, OSError if the path is no regular
    file.
    """
    with open_regular(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_LINE_BYTES), b""), start=1):
            where = f"{path}:{number}"
            if len(line) == MOST_LINE_BYTES:
                raise ValueError(f"{where}: the line has {MOST_LINE_BYTES} bytes or more; delete it")
            if not line.endswith(b"\n"):
                return  # the run was interrupted while it wrote the line
            row = check(parse_json(line, where, error=ValueError), where, dict, error=ValueError)
            yield _from_row(row, where)


def short(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def headline(completion: Completion) -> str:
    """Return one line of text on a completion: its name, rewards, advantage, length and finish reason."""
    facts = [f"reward {short(completion.reward)}"]
    if len(completion.rewards) > 1:
        facts += [f"{name} {short(value)}" for name, value in completion.rewards.items()]
    if completion.advantage is not None:
        facts.append(f"advantage {short(completion.advantage)}")
    facts += [f"{completion.response_tokens} tokens", completion.finish_reason]
    if completion.excluded is not None:
        facts.append(f"excluded: {completion.excluded}")
    return visible(f"{completion.sample}: {', '.join(facts)}").replace("\n", " ")


def as_text(completion: Completion, *, most_chars: int | None = None) -> str:
    """Return a completion as plain text: its headline, then every line of its texts behind a ``|``.

    So no text of the completion can look like another line of the output.

    most_chars: the length to which each text is cut; None to keep it as recorded.
    """
    lines = [headline(completion)]
    for name in ("prompt", "response", "answer"):
        text = getattr(completion, name)
        if text is not None:
            shown = visible(text if most_chars is None else cut(text, most_chars))
            lines += [f"  {name if first else '':<8} | {line}" for first, line in _numbered(shown)]
    return "\n".join(lines)


def print_some(completions: Sequence[Completion], *, every_rollouts: int) -> None:
    """Log the best and the worst completion of one prompt.

    completions: the recorded completions of one source at one step, of which the first two are
        logged. The recorder puts the best and the worst of the first prompt there.
    every_rollouts: training completions are logged once in so many rollouts, evaluation completions
        always; 0 logs none of either.
    """
    first = completions[0]
    if every_rollouts == 0 or (first.rollout is not None and (first.rollout - 1) % every_rollouts):
        return
    where = first.source if first.rollout is None else f"rollout {first.rollout}"
    shown = "\n".join(as_text(each, most_chars=LOGGED_CHARS) for each in completions[:LOGGED_PER_SOURCE])
    log.info("completions of %s (step %s), more in %s:\n%s", where, first.step, FILE_NAME, shown)


def _numbered(text: str) -> list[tuple[bool, str]]:
    return [(number == 0, line) for number, line in enumerate(text.split("\n"))]
