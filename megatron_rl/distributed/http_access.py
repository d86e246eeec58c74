"""The access rule of a run's HTTP servers: which keys and which Host headers are accepted."""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Sequence

from megatron_rl.errors import ConfigError


def keys_in(variable: str | None, *, setting: str) -> tuple[str, ...]:
    """Return the comma-separated keys in an environment variable; () if ``variable`` is None.

    setting: the setting that names the variable, for messages.

    Raises ConfigError if the variable holds no key.
    """
    keys = tuple(key.strip() for key in os.environ.get(variable or "", "").split(",") if key.strip())
    if variable is not None and not keys:
        raise ConfigError(
            f"{setting}={variable} names an environment variable that holds no key; set {variable}, or {setting}=null "
            "for no key"
        )
    return keys


def is_known(key: str, keys: Sequence[str]) -> bool:
    """Return whether a client's key is one of ``keys``. If ``keys`` is empty, every client is accepted."""
    given = key.encode(errors="surrogateescape")
    return not keys or any(hmac.compare_digest(given, known.encode(errors="surrogateescape")) for known in keys)


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is a loopback address, or "localhost"."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_loopback(host: str) -> bool:
    """Return whether a Host header names a loopback address, with any port."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    return is_loopback(name.removeprefix("[").removesuffix("]"))
