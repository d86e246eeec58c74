"""The start of a rank: ``torchrun … -m megatron_rl.commands.verify`` is ``megatron-rl verify --nproc …``."""

from __future__ import annotations

from megatron_rl.commands.verify.command import main

if __name__ == "__main__":
    main()
