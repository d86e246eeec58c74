"""The models and data named by a URL, such as ``s3://bucket/model``: each node copies them once to its disk.

An object is one file in a store. The copies lie in the assets folder of the hub's cache, under the
URL and a digest of the objects' names, sizes and version tags. So a changed object is copied again.
A copy is whole or absent. Of a model only configs, tokenizer and safetensors are copied, as from
the hub: no pickle and no code.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import json
import logging
import os
import pathlib
import secrets
import shutil
from collections.abc import Mapping
from urllib.parse import quote

from megatron_rl.errors import ConfigError, quoted
from megatron_rl.hub.names import URLS, Kind
from megatron_rl.storage.location import location
from megatron_rl.storage.remote import RemotePath

log = logging.getLogger(__name__)

SMALL = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.spm", "*.bpe", "LICENSE*", "NOTICE*")
WEIGHTS = ("*.safetensors",)
COPY_BYTES = 1 << 22


def copy_of(kind: Kind, url: str, key: str, *, weights: bool) -> str:
    """Return the local path of a URL's copy, after copying if there is no copy yet.

    If the URL is a glob pattern, the result is a pattern that matches the copies in the order of
    their names.

    key: the setting that holds the URL, for messages.
    weights: whether a model's weights are copied beside config and tokenizer.

    Raises ConfigError, naming the setting, if an object is missing, refused or does not answer.
    """
    try:
        found, one = _objects(kind, url, key, weights=weights)
        if not found:
            raise ConfigError(f"{key}={quoted(url, 300)}: {_lacking(kind)}")
        folder = _folder(url, found)
        if not folder.is_dir():
            _copy(found, folder)
    except OSError as error:
        raise ConfigError(f"{key}={quoted(url, 300)} cannot be read: {error}") from error
    log.info("%s: %s is read from %s", key, url, folder)
    if one:
        return str(folder / next(iter(found)))
    return str(folder / "*") if glob.has_magic(url) else str(folder)


def _lacking(kind: Kind) -> str:
    if kind is Kind.DATA:
        return "there is no such object, and none matches; name one, a pattern, or a folder of datasets' save_to_disk"
    return "there is no config.json; name the folder of a Hugging Face model with config.json and safetensors"


def _objects(kind: Kind, url: str, key: str, *, weights: bool) -> tuple[dict[str, tuple[RemotePath, str]], bool]:
    """Return ({local name: (object, version text)} of the objects to copy, whether the URL names a single object).

    A local name is the file's name in the copy; for a glob pattern it begins with a number. The
    version text changes if the object does.

    weights: whether a model's weights are copied too.
    """
    if kind is Kind.DATA and glob.has_magic(url):
        place = location(url, key)
        matched = place.matches()
        width = len(str(len(matched)))
        return {f"{number:0{width}}-{path.name}": (path, tag) for number, (path, tag) in enumerate(matched)}, False
    place = location(url, key)
    there = place.versions()
    if kind is Kind.DATA:
        if "" in there:
            return {place.name: (place, there[""])}, True
        return {name: (place / name, tag) for name, tag in there.items()}, False
    wanted = SMALL + WEIGHTS * (weights and kind is Kind.MODEL)
    names = [x for x in there if "/" not in x and any(fnmatch.fnmatchcase(x, pattern) for pattern in wanted)]
    return {name: (place / name, there[name]) for name in names} if "config.json" in names else {}, False


def _folder(url: str, found: Mapping[str, tuple[RemotePath, str]]) -> pathlib.Path:
    """Return the path of the folder for a URL's copy, ``.../<URL>/<digest of found>`` in the hub's cache.

    The URL is quoted; a long URL is replaced by its digest.

    found: {local name: (object, text that changes if the object does)}.
    """
    from huggingface_hub import cached_assets_path

    facts = json.dumps([[name, str(path), tag] for name, (path, tag) in found.items()])
    name = quote(url, safe="")
    parent = name if len(name) < 200 else hashlib.sha256(url.encode()).hexdigest()
    root = cached_assets_path(library_name="megatron_rl", namespace=URLS, subfolder=parent)
    return pathlib.Path(root, hashlib.sha256(facts.encode()).hexdigest()[:32])


def _copy(found: Mapping[str, tuple[RemotePath, str]], folder: pathlib.Path) -> None:
    """Copy every object to a temporary folder, and rename that folder to ``folder``.

    If another process has made ``folder`` meanwhile, its folder stays and this copy is removed.

    found: {local name: (object, text that changes if the object does)}.
    """
    partial = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.partial")
    try:
        for name, (path, _) in found.items():
            target = partial / name
            if not target.resolve().is_relative_to(partial.resolve()):
                raise ConfigError(f"{path} has a name that leads out of its folder; it is not copied")
            target.parent.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as source, target.open("wb") as file:
                shutil.copyfileobj(source, file, COPY_BYTES)
        try:
            os.replace(partial, folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
