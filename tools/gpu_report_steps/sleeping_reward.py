"""Rewards by the parity of the length, and on rank 1 sleeps from the second rollout on: a fault for faults.py."""

from __future__ import annotations

import os
import time

NEVER_S = 3600.0
_calls = [0]


def score(prompts: list, completions: list, completion_ids: list, **columns: object) -> list[float]:
    _calls[0] += 1
    if os.environ.get("RANK") == "1" and _calls[0] > 1:
        time.sleep(NEVER_S)
    return [float(len(ids) % 2) for ids in completion_ids]
