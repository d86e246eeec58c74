"""Puts the stand-in for Transformer Engine in this process; import it before Megatron-Core, which looks once."""

from __future__ import annotations

import sys

from megatron_rl.distributed import platform
from tests.stand_ins.transformer_engine import names

assert "megatron.core" not in sys.modules, "import tests.stand_ins.install before Megatron-Core"
names.register()
platform.transformer_engine_importable = lambda: True
