"""Reward workers of the tests."""

from __future__ import annotations

SHORT_S = 0.2  # met only by what never ends
