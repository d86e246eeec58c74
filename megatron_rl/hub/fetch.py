"""The fetching of the hub's files into its cache, by huggingface_hub: configs, tokenizers, safetensors and data files.

No code and no pickle is fetched. Hugging Face's environment variables apply: HF_HOME and
HF_HUB_CACHE (the cache), HF_ENDPOINT and HF_TOKEN. If HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE or
HF_DATASETS_OFFLINE is set, only the cache is read. Files in the cache are not fetched again, and an
interrupted download continues.
"""

from __future__ import annotations

import logging
import os
import pathlib
from collections.abc import Sequence

from megatron_rl.errors import ConfigError, quoted, shortened
from megatron_rl.hub.names import HubName, Kind, name_of_path, url_of_path
from megatron_rl.json_text import read_object

log = logging.getLogger(__name__)

# Files beside the weights that copies of a model include (weights/side_files.py).
SMALL = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.spm", "*.bpe", "LICENSE*", "NOTICE*", "USE_POLICY*"]
# Folders within a repository, except additional_chat_templates: a pattern's * matches a slash too (fnmatch).
NESTED = ["[!a]*/*", "a[!d]*/*", "ad[!d]*/*"]
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
CARD = ["README.md", ".gitattributes"]
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def offline_by(kind: Kind) -> str | None:
    """Return the environment variable that forbids the network for files of ``kind``; None if no variable does."""
    names = (*OFFLINE, "HF_DATASETS_OFFLINE") if kind is Kind.DATA else OFFLINE
    return next((name for name in names if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")), None)


def commit_of(kind: Kind, name: HubName, key: str) -> str:
    """Return the commit that a name stands for, after fetching a model's config and tokenizer or a data set's card.

    Offline it is the commit that the cache knows for the name's revision.

    key: the setting that holds the name, for messages.

    Raises ConfigError if the hub does not answer or has no such repository or revision.
    """
    wanted, left_out = (CARD, None) if kind is Kind.DATA else (SMALL, [*NESTED, INDEX])
    return _snapshot(kind, name, key, wanted, left_out).name


def fetch_model(kind: Kind, name: HubName, key: str, *, weights: bool) -> pathlib.Path:
    """Return the local folder of a model at ``name.revision``. Raises ConfigError for a model without safetensors.

    key: the setting that holds the name, for messages.
    weights: whether the weights are fetched beside config and tokenizer.
    """
    if not weights or kind is not Kind.MODEL:
        return _snapshot(kind, name, key, SMALL, [*NESTED, INDEX])
    folder = _snapshot(kind, name, key, SMALL, NESTED)
    if not (folder / INDEX).is_file():
        _snapshot(kind, name, key, [SINGLE], shown=True)
        if not (folder / SINGLE).is_file() and offline_by(kind):
            raise in_words(FileNotFoundError(SINGLE), kind, name, key)
        if not (folder / SINGLE).is_file():
            raise ConfigError(
                f"{key}={quoted(str(name), 300)} has neither {SINGLE} nor {INDEX} on the hub, and no other file of "
                "weights is fetched: a pickle can run code. Take a repository with safetensors, or convert it"
            )
    elif parts := _parts(folder):
        _whole(kind, name, key, parts)
    return folder


def fetch_files(name: HubName, key: str, files: Sequence[str]) -> list[pathlib.Path]:
    """Return the paths in the cache of a data set's files at ``name.revision``, in the order of ``files``.

    key: the setting that holds the name, for messages.
    """
    return _whole(Kind.DATA, name, key, list(files))


def lacks_weights(path: str | pathlib.Path) -> bool:
    """Return whether a folder is a copy, from the hub or a URL, whose weights were not fetched, as in a dry run."""
    folder = pathlib.Path(path)
    if name_of_path(str(path)) is None and url_of_path(str(path)) is None:
        return False
    wanted = _parts(folder) if (folder / INDEX).is_file() else [SINGLE]
    return not all((folder / part).is_file() for part in wanted)


def _parts(folder: pathlib.Path) -> list[str]:
    """Return the sorted names of the safetensors files in a folder's index; a name with a slash is left out."""
    mapped = read_object(folder / INDEX).get("weight_map")
    named = set(mapped.values()) if isinstance(mapped, dict) else set()
    return sorted(
        x for x in named if isinstance(x, str) and pathlib.PurePath(x).name == x and x.endswith(".safetensors")
    )


def _whole(kind: Kind, name: HubName, key: str, files: list[str]) -> list[pathlib.Path]:
    """Return the paths of a repository's files, after fetching them.

    Raises ConfigError if one is missing afterwards.
    """
    folder = _snapshot(kind, name, key, files, shown=True)
    lost = next((file for file in files if not (folder / file).is_file()), None)
    if lost is not None:
        raise in_words(FileNotFoundError(lost), kind, name, key)
    return [folder / file for file in files]


def _snapshot(
    kind: Kind,
    name: HubName,
    key: str,
    wanted: list[str],
    left_out: list[str] | None = None,
    *,
    shown: bool = False,
) -> pathlib.Path:
    """Return the cached folder of a repository's commit, after fetching the files that match ``wanted``.

    key: the setting that holds the name, for messages.
    wanted, left_out: patterns of files to fetch, and of files among them to leave out.
    shown: whether a progress bar is shown.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm

    class Unseen(tqdm):
        def __init__(self, *given, **named) -> None:
            super().__init__(*given, **named | {"disable": True})

    try:
        path = snapshot_download(
            name.repo,
            repo_type=kind.repo_type,
            revision=name.revision,
            allow_patterns=wanted,
            ignore_patterns=left_out,
            local_files_only=offline_by(kind) is not None,
            library_name="megatron_rl",
            tqdm_class=None if shown else Unseen,
        )
    except Exception as error:  # noqa: BLE001 (huggingface_hub's, httpx's, and Python's for sockets and the disk)
        raise in_words(error, kind, name, key) from None  # a request's error may quote its headers
    return pathlib.Path(path)


def in_words(error: Exception, kind: Kind, name: HubName, key: str) -> Exception:
    """Return a ConfigError with the cause of a failed download and what to do; for a disk error, the error itself.

    key: the setting that holds the name.
    """
    from huggingface_hub import constants, errors

    what, hub = f"{key}={quoted(str(name), 300)}", constants.ENDPOINT
    thing = "data set" if kind is Kind.DATA else "model"
    by_hand = f"hf download {name.repo}" + (" --repo-type dataset" if kind is Kind.DATA else "")
    token = "HF_TOKEN is set" if os.environ.get("HF_TOKEN") else "HF_TOKEN is not set"
    # Failures of the name or the permission.
    if isinstance(error, errors.GatedRepoError):
        return ConfigError(
            f"{what} is gated: accept its terms at {hub}/{name.repo}, and give a token of that account by the variable "
            f"HF_TOKEN ({token})"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(f"{what}: {hub} has that {thing}, and no revision {quoted(name.revision)} of it")
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return ConfigError(
            f"{what} is no path on this host, and {hub} shows no {thing} of that name; mend it, or give a token by the "
            f"variable HF_TOKEN if it is private ({token})"
        )
    # Failures of the network or the disk.
    if variable := offline_by(kind):
        return ConfigError(
            f"{what} is no path on this host and not whole in the cache {constants.HF_HUB_CACHE}, and {variable} "
            f"forbids the network; fetch it where there is one ({by_hand}), or unset {variable}"
        )
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if status is None and isinstance(error, OSError) and error.errno and not isinstance(error, ConnectionError):
        return error
    reason = f"answered with status {status}" if status else f"cannot be reached ({_said(error)})"
    return ConfigError(
        f"{what} is no path on this host and not whole in the cache {constants.HF_HUB_CACHE}, and {hub} {reason}; "
        f"start again to go on, or copy the {thing} here and name its path"
    )


def _said(error: Exception) -> str:
    """Return an error's class and first line as text, with the value of HF_TOKEN replaced by ``***``."""
    line = next(iter(str(error).splitlines()), "")
    token = os.environ.get("HF_TOKEN", "")
    return shortened(f"{type(error).__name__}: {line.replace(token, '***') if token else line}", 200)
