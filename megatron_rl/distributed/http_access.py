"""The access rule of a run's HTTP servers: clients with a key, and requests that name this host."""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Sequence

from megatron_rl.errors import ConfigError


def keys_in(variable: str | None, *, setting: str) -> tuple[str, ...]:
    """Return the keys, between commas, in an environment variable; none where ``variable`` is None.

    Raises ConfigError for a variable that holds none; ``setting`` names it in the configuration.
    """
    keys = tuple(key.strip() for key in os.environ.get(variable or "", "").split(",") if key.strip())
    if variable is not None and not keys:
        raise ConfigError(f"{setting}={variable} names a variable that holds no key; set it, or null for no key")
    return keys


def is_known(key: str, keys: Sequence[str]) -> bool:
    """Return whether a client's key is one of ``keys``, or there are none."""
    given = key.encode(errors="surrogateescape")
    return not keys or any(hmac.compare_digest(given, known.encode(errors="surrogateescape")) for known in keys)


def is_loopback(host: str) -> bool:
    """Return whether an address is this host's own loopback."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_loopback(host: str) -> bool:
    """Return whether a Host header names this host's loopback, with any port."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    return is_loopback(name.removeprefix("[").removesuffix("]"))
