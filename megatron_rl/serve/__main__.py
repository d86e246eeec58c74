"""The server's command: torchrun --nproc_per_node 2 -m megatron_rl.serve --config FILE [section.key=value ...]"""

from __future__ import annotations

from typing import NoReturn

from megatron_rl import cli
from megatron_rl.config import Config


def serve(config: Config) -> bool:
    """Serve Tinker's API until the process is asked to end. Returns True: the run was not preempted."""
    from megatron_rl.serve.server import serve as run  # Megatron-Core is imported from here on

    return run(config)


def command_line() -> NoReturn:
    """Run the command line and end the process with its exit code."""
    cli.end_process(lambda: cli.main(serve, program=cli.SERVER))


if __name__ == "__main__":
    command_line()
