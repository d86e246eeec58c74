"""The entry point of a rank: `megatron-rl verify --nproc N` runs ``torchrun … -m megatron_rl.commands.verify``."""

from __future__ import annotations

from megatron_rl.commands.verify.command import main

if __name__ == "__main__":
    main()
