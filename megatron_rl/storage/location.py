"""The file or folder that a setting names: a ``pathlib.Path`` for a path, a ``RemotePath`` for a URL.

The URLs are ``s3://bucket/folder``, ``gs://bucket/folder``, ``memory://folder`` and those of every
other scheme that fsspec knows (2026.9 ``registry.py``). A driver is the package that serves a
scheme, such as s3fs. Credentials come only from the driver's own environment variables and files. A
URL that holds a password is refused, and no message repeats it.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

from megatron_rl.errors import ConfigError, quoted
from megatron_rl.storage.remote import ANSWER_S, RemotePath

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}  # by scheme, of setup.py
OF_DISK = ("file", "local")
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def is_url(text: str) -> bool:
    """Return whether a setting's text is a URL. Example: ``s3://b/f`` is one, ``C:/f`` and ``/a://b`` are not."""
    return SCHEME.match(text) is not None


def location(text: str, key: str = "the path", *, answer_s: float = ANSWER_S) -> pathlib.Path | RemotePath:
    """Return the ``pathlib.Path`` or ``RemotePath`` that a setting's text names, without a request to a store.

    key: the setting's name, for messages.
    answer_s: seconds that a store may take for one request.

    Raises ConfigError for a scheme that fsspec does not know, and for a URL with a password or a
    control character in it. For a scheme whose driver is not installed, the error names the command
    that installs it.
    """
    match = SCHEME.match(text)
    if match is None:
        return pathlib.Path(text)
    scheme = match[1].lower()
    rest = text[match.end() :]
    if "@" in (authority := rest.partition("/")[0]):
        host = authority.rpartition("@")[2]
        raise ConfigError(
            f"{key} is a URL with a name or a password in it ({scheme}://…@{host}); give them by the driver's "
            "environment variables, as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for s3"
        )
    if any(character in text for character in "\0\r\n"):
        raise ConfigError(f"{key}={quoted(text, 300)} holds a control character, and no URL does")
    if scheme in OF_DISK:
        return pathlib.Path(unquote(urlsplit(text).path))
    if scheme not in ("http", "https", "memory") and not rest.partition("/")[0]:
        raise ConfigError(f"{key}={quoted(text, 300)} names no bucket; write {scheme}://bucket/folder")
    return _remote(text.rstrip("/") if rest.strip("/") else text, scheme, key, answer_s)


def _remote(url: str, scheme: str, key: str, answer_s: float) -> RemotePath:
    import fsspec

    shown = quoted(url.partition("?")[0], 300)
    try:
        kind = fsspec.get_filesystem_class(scheme)
        system, path = fsspec.core.url_to_fs(f"{scheme}{url[len(scheme) :]}", **_options(scheme, answer_s))
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        way_out = f'pip install "megatron_rl[{extra}]"' if extra else str(error)
        raise ConfigError(f"{key}={shown}: the driver of {scheme}:// is not installed; {way_out}") from error
    except ValueError as error:
        known = "s3://, gs://, memory:// and what else fsspec knows"
        raise ConfigError(f"{key}={shown} cannot be read as a URL ({error}); {known} can") from error
    assert kind is not None
    return RemotePath(system, scheme, path, answer_s=answer_s)


def _options(scheme: str, answer_s: float) -> Mapping[str, object]:
    """Return the keyword arguments for a scheme's fsspec driver: socket deadlines, and no cached listings.

    Listings are not cached, since other ranks write too.

    answer_s: seconds that a store may take for one request.
    """
    if EXTRAS.get(scheme) == "s3":
        # s3fs 2026.9 retries after some errors, but not after a 503 without a body; botocore 1.43 does.
        waits = {"connect_timeout": min(20.0, answer_s), "read_timeout": min(60.0, answer_s)}
        return {
            "use_listings_cache": False,
            "config_kwargs": {**waits, "retries": {"max_attempts": 4, "mode": "standard"}},
        }
    return {"use_listings_cache": False} if EXTRAS.get(scheme) == "gcs" else {}
