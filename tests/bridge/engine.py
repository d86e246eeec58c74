"""Imports Megatron-Core without Transformer Engine, and then stands in for it, as Megatron-Bridge's imports need.

Megatron-bridge 0.6.2 imports ``transformer_engine.pytorch`` where a module starts (``peft/lora_layers.py``), and a CPU
cannot run it. Its names are there as empty modules; nothing of them is called, since every layer that is built is of
torch. Megatron-Core, megatron-bridge, its providers and its mappings are the real ones.
"""

import logging
import warnings

warnings.filterwarnings("ignore")

from megatron_rl.model import build  # noqa: E402, F401  (Megatron-Core decides at import what is installed)
from tests.bridge_oracle import stand_in_for_transformer_engine  # noqa: E402

stand_in_for_transformer_engine()
logging.getLogger("megatron.bridge").setLevel(logging.ERROR)
