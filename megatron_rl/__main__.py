"""The entry point of ``python -m megatron_rl``, which is the command ``megatron-rl``."""

from __future__ import annotations

import sys

from megatron_rl.commands.command import main

if __name__ == "__main__":
    sys.exit(main())
