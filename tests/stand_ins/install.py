"""Puts the stand-in for Transformer Engine in this process, which must not have imported Megatron-Core.

Import it before anything that imports Megatron-Core, which decides at import what is installed. The device stays the
CPU; only what asks for Transformer Engine is told that it is there.
"""

from __future__ import annotations

import sys

from megatron_rl.distributed import platform
from tests.stand_ins.transformer_engine import names

assert "megatron.core" not in sys.modules, "import tests.stand_ins.install before Megatron-Core"
names.register()
platform.transformer_engine_importable = lambda: True
