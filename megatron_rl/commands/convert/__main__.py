"""The start of the command: ``python -m megatron_rl.commands.convert`` is ``megatron-rl convert``."""

from __future__ import annotations

import sys

from megatron_rl.commands.convert.command import give_back_freed_memory, main

if __name__ == "__main__":
    give_back_freed_memory()
    sys.exit(main())
