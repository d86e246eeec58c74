"""The releases of the SDK whose requests are served; both ends of the range are tested (`make test-tinker`)."""

from __future__ import annotations

import re

from megatron_rl.errors import quoted
from megatron_rl.serve.values import RequestError

OLDEST, NEWEST = (0, 34), (0, 38)


def check_sdk(version: object) -> None:
    """Raise RequestError for a release outside the range, naming it and the range."""
    found = re.match(r"(\d+)\.(\d+)", version) if isinstance(version, str) else None
    if found is None or not OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        low, high = (".".join(map(str, end)) for end in (OLDEST, NEWEST))
        raise RequestError(
            f"sdk_version={quoted(version)} is not served: this server speaks to tinker {low} to {high}; install one "
            f"of them (pip install 'tinker>={low},<{NEWEST[0]}.{NEWEST[1] + 1}')"
        )
