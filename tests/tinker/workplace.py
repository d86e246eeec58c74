"""The folder in which recipes find a model and data sets, as the example makes it."""

import sys

from tests.runs.command import ROOT

sys.path.insert(0, str(ROOT / "examples" / "tinker"))

from workplace import BASE, CHAT, make_workplace

__all__ = ["BASE", "CHAT", "make_workplace"]
