"""The files of a data set on the hub: those of one configuration and split, linked in order in one folder.

`datasets` reads the repository's card and file names, and knows the files of each split.
data/rows.py reads the rows, as in any file. The links lie in the assets folder of the hub's cache,
with one folder for each commit and split.
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.distributed.atomic_file import replace_text
from megatron_rl.errors import ConfigError, quoted
from megatron_rl.hub.fetch import fetch_files, in_words, offline_by
from megatron_rl.hub.names import LINKS, READ, HubName, Kind
from megatron_rl.json_text import read_object

log = logging.getLogger(__name__)

TRAIN = "data.train"
CHOICES = "choices.json"


def fetch_data(name: HubName, key: str) -> str:
    """Return a glob pattern that matches the local files of a data set at the commit ``name.revision``.

    Sorted by name, the files are in the data set's order.

    key: the setting that names the data set, for messages.

    Raises ConfigError if the name leaves out a configuration or split although there are several,
    and for a file that data/rows.py does not read.
    """
    known = _known(name, key)
    if known is not None:
        return known
    subset, split, files = choose_files(name, key)
    other = [file for file in files if not file.lower().endswith(READ)]
    if other:
        raise ConfigError(
            f"{key}={quoted(str(name), 300)}: the file {quoted(other[0], 200)} is of no form that is read here "
            f"({', '.join(READ)}); save the data set by datasets' save_to_disk, and name that folder"
        )
    pattern = _linked(replace(name, subset=subset, split=split), fetch_files(name, key, files))
    replace_text(_folder(name) / CHOICES, json.dumps(_choices(name) | {_asked_for(name, key): [subset, split]}))
    return pattern


def choose_files(name: HubName, key: str) -> tuple[str, str, list[str]]:
    """Return (configuration, split, the split's files in the repository) of a data set, as `datasets` finds them.

    key: the setting that names the data set; under ``data.train`` the split "train" is chosen if
        none is named.

    Raises ConfigError without a network, for a choice that is missing or unknown, and if `datasets`
    finds no data.
    """
    if offline_by(Kind.DATA) is not None:
        raise in_words(FileNotFoundError("the split's files are not known"), Kind.DATA, name, key)
    builders = _Builders(name, key)
    subset, split = name.subset, name.split
    if subset is not None and split is None and subset not in builders.subsets:
        subset, split = None, subset  # owner/name:test, of a data set whose configuration need not be named
    if subset is None:
        subset = builders.default
    if subset is None or subset not in builders.subsets:
        raise ConfigError(
            f"{key}={quoted(str(name), 300)}: name one of its configurations, {', '.join(builders.subsets[:20])}, as "
            f"in {name.repo}:{builders.subsets[0]}"
        )
    splits = builders.files(subset)
    if split is None:
        split = next(iter(splits)) if len(splits) == 1 else "train" if key.startswith(TRAIN) else None
    if split not in splits:
        first = next(iter(splits), "train")
        raise ConfigError(
            f"{key}={quoted(str(name), 300)}: name one of its splits, {', '.join(splits)}, as in "
            f"{name.repo}:{subset}/{'test' if 'test' in splits else first}"
        )
    log.info("%s: configuration %s, split %s, %d files", key, subset, split, len(splits[split]))
    return subset, split, splits[split]


class _Builders:
    """Asks the package `datasets` for a repository's configurations and splits; raises ConfigError for its errors."""

    def __init__(self, name: HubName, key: str) -> None:
        self._name, self._key = name, key
        try:
            import datasets
        except ImportError as error:
            raise ConfigError(
                f"{key}={quoted(str(name), 300)} is a name on the hub, whose splits the package datasets knows, and it "
                f"cannot be imported ({error}): pip install 'megatron_rl[data]'"
            ) from error
        self._datasets = datasets
        given = {"path": name.repo, "revision": name.revision}
        self.subsets: Sequence[str] = self._asked(datasets.get_dataset_config_names, **given)
        only = self.subsets[0] if len(self.subsets) == 1 else None
        self.default = only or self._asked(datasets.get_dataset_default_config_name, **given)

    def files(self, subset: str) -> Mapping[str, list[str]]:
        """Return {split: names of its files in the repository} of configuration ``subset``."""
        given = {"path": self._name.repo, "name": subset, "revision": self._name.revision}
        builder = self._asked(self._datasets.load_dataset_builder, **given)
        root = f"hf://datasets/{self._name.repo}@{self._name.revision}/"
        splits = {str(split): [str(url) for url in urls] for split, urls in builder.config.data_files.items()}
        outside = next((url for urls in splits.values() for url in urls if not url.startswith(root)), None)
        if outside is not None:
            raise ConfigError(
                f"{self._key}={quoted(str(self._name), 300)} lists the file {quoted(outside, 200)}, which lies outside "
                "its repository, and is not fetched; name a file of your own"
            )
        return {split: [url.removeprefix(root) for url in urls] for split, urls in splits.items()}

    def _asked(self, function: Any, **given: Any) -> Any:
        from huggingface_hub.errors import HfHubHTTPError

        try:
            return function(**given)
        except (HfHubHTTPError, ConnectionError) as error:
            raise in_words(error, Kind.DATA, self._name, self._key) from None
        except Exception as error:  # a card or file names that datasets cannot use
            raise ConfigError(
                f"{self._key}={quoted(str(self._name), 300)}: datasets finds no data there ({type(error).__name__}: "
                f"{quoted(str(error).splitlines()[0] if str(error) else '', 200)}); fetch its files and name those"
            ) from error


def _folder(name: HubName) -> pathlib.Path:
    from huggingface_hub import cached_assets_path, constants

    place = (LINKS, name.repo.replace("/", "--"), str(name.revision))
    return cached_assets_path(*place, assets_dir=constants.HF_ASSETS_CACHE)


def _known(name: HubName, key: str) -> str | None:
    """Return the glob pattern of a data set's files if the cache has all of them; None if the hub must be asked."""
    chosen = _choices(name).get(_asked_for(name, key))
    if not isinstance(chosen, list) or len(chosen) != 2:
        return None
    folder = _folder(name).joinpath(*map(str, chosen))
    links = list(folder.glob("*"))
    return f"{folder}/*" if links and all(link.exists() for link in links) else None


def _choices(name: HubName) -> dict[str, object]:
    """Return {result of ``_asked_for``: [configuration, split] chosen for it}, saved for a data set's commit.

    {} if none is saved.
    """
    file = _folder(name) / CHOICES
    return read_object(file) if file.is_file() else {}


def _asked_for(name: HubName, key: str) -> str:
    """Return the text by which ``_choices`` finds the configuration and split that were chosen for ``name``.

    A name without a split may mean another split under ``data.train`` than under other settings.
    So the text says whether the setting is ``data.train``.

    key: the setting that names the data set.
    """
    return f"{name.subset or ''}/{name.split or ''}{' of data.train' if key.startswith(TRAIN) else ''}"


def _linked(name: HubName, paths: Sequence[pathlib.Path]) -> str:
    """Link a data set's files in order in one folder, and return the pattern that matches the links.

    Another node that shares the cache may make the folder first; its links are then used.
    """
    folder = _folder(name) / name.subset / name.split
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    partial.mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(paths):
        (partial / f"{number:05d}-{path.name}").symlink_to(path)
    try:
        os.rename(partial, folder)
    except OSError:  # it exists: of the same commit, so of the same files
        if not folder.is_dir():
            raise
        for link in partial.iterdir():
            link.unlink()
        partial.rmdir()
    return f"{folder}/*"
