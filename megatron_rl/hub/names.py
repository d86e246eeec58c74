"""The names on the hub: ``owner/name@revision`` for a model, ``owner/name:config/split@revision`` for a data set.

A path that exists on this host is not taken for a name. Nor is a text with the ending of a data
file, such as ``data/train.jsonl``.
"""

from __future__ import annotations

import enum
import logging
import os
import pathlib
import re
from dataclasses import dataclass
from urllib.parse import unquote

from megatron_rl.errors import ConfigError, quoted

log = logging.getLogger(__name__)

READ = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")  # the forms of files that data/rows.py reads
URLS = "urls"  # the assets' folder of copies from URLs
LINKS = "megatron_rl"  # the assets' folder of data sets' files, in their order
_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"({_PART}/{_PART})(?::([\w.+-]*)(?:/([\w.+-]+))?)?(?:@([\w./-]+))?", re.ASCII)
_SNAPSHOT = re.compile(r".*/models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})/?", re.ASCII)
_URL = re.compile(rf".*/{URLS}/([^/]+%3A%2F%2F[^/]+)/[0-9a-f]{{32}}(/.*)?", re.ASCII)
_DATA = re.compile(rf".*/{LINKS}/([\w.-]+?)--([\w.-]+)/([0-9a-f]{{40}})/([\w.+-]+)/([\w.+-]+)/\*", re.ASCII)


class Kind(enum.Enum):
    """Names what a repository on the hub is used for; the values are the hub's own terms.

    TOKENIZER is a model's repository from which only the tokenizer is wanted.
    """

    MODEL = "model"
    TOKENIZER = "tokenizer"
    DATA = "dataset"

    @property
    def repo_type(self) -> str:
        return "dataset" if self is Kind.DATA else "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """Holds a name on the hub, taken apart.

    repo: ``owner/name``.
    subset: a data set's configuration; None if not named.
    split: a data set's split; None if not named.
    revision: a branch, a tag or a commit; None for ``main``.

    Example: ``openai/gsm8k:main/test@e53f048`` has the subset ``main`` and the split ``test``.
    """

    repo: str
    subset: str | None = None
    split: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        part = "" if self.subset is None and self.split is None else f":{self.subset or ''}"
        part += f"/{self.split}" if self.split else ""
        return f"{self.repo}{part}" + (f"@{self.revision}" if self.revision else "")


def name_of(value: str, kind: Kind, key: str) -> HubName | None:
    """Return a setting's value as a name on the hub; None if it is a path.

    An existing path takes precedence over a name of the same form, and the log says so. Raises
    ConfigError for a model's name with a configuration or split.

    key: the setting, for messages.
    """
    match = _NAME.fullmatch(value)
    if match is None or (kind is Kind.DATA and value.lower().endswith((*READ, ".txt"))):
        return None
    if os.path.lexists(value):
        log.info("%s=%s is a path on this host; the hub is not asked for it", key, value)
        return None
    repo, subset, split, revision = match.groups()
    if kind is not Kind.DATA and ":" in value:
        raise ConfigError(
            f"{key}={quoted(value, 300)} exists neither as a path nor as a name: a model on the hub is owner/name or "
            "owner/name@revision"
        )
    return HubName(repo=repo, subset=subset or None, split=split, revision=revision)


def repo_of(path: str) -> str:
    """Return ``owner/name`` of the hub's repository that ``path`` is a copy of; ``path`` itself if it is none."""
    name = name_of_path(path)
    return path if name is None else name.repo


def url_of_path(path: str) -> str | None:
    """Return the URL that a local path is a copy of; None for any other path.

    None also for the copy of a very long URL, whose folder is named by a digest.
    """
    match = _URL.fullmatch(pathlib.PurePath(path).as_posix())
    return unquote(match[1]) if match else None


def name_of_path(path: str) -> HubName | None:
    """Return the ``HubName``, with commit, that the local ``path`` is a copy of; None if it is no copy from the hub.

    path: a local folder, or a pattern of a data set's files.
    """
    posix = pathlib.PurePath(path).as_posix()
    if match := _SNAPSHOT.fullmatch(posix):
        return HubName(repo=f"{match[1]}/{match[2]}", revision=match[3])
    if match := _DATA.fullmatch(posix):
        return HubName(repo=f"{match[1]}/{match[2]}", subset=match[4], split=match[5], revision=match[3])
    return None
