"""The entry point of ``python -m megatron_rl.commands.convert``, which `megatron-rl convert` starts."""

from __future__ import annotations

import sys

from megatron_rl.commands.convert.command import give_back_freed_memory, main

if __name__ == "__main__":
    give_back_freed_memory()
    sys.exit(main())
