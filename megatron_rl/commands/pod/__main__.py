"""The entry point of ``python -m megatron_rl.commands.pod``, which `megatron-rl pod` starts."""

from __future__ import annotations

import sys

from megatron_rl.commands.pod import request

if __name__ == "__main__":
    request.listen()
    from megatron_rl.commands.pod.command import main  # takes seconds, in which a request to leave would be lost

    sys.exit(main())
