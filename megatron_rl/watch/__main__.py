"""The command that serves a run's page to a browser on this host: ``megatron-rl watch RUN [--port N]``."""

from __future__ import annotations

import argparse
import pathlib
import sys

from megatron_rl.errors import ConfigError
from megatron_rl.watch.run_folder import RunFolder
from megatron_rl.watch.server import WatchServer

EXIT_CONFIG = 2


def main(arguments: list[str] | None = None) -> int:
    """Serve a run's page until Ctrl-C. Returns 0, or 2 with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="megatron-rl watch", description="Follow a run in a browser on this host.")
    parser.add_argument("run", type=pathlib.Path, help="the run's folder, running or finished")
    parser.add_argument("--port", type=int, default=8265, help="of 127.0.0.1; 0 takes a free one; default 8265")
    options = parser.parse_args(arguments)
    try:
        server = WatchServer(RunFolder(options.run), options.port)
    except (ConfigError, OSError) as error:  # OSError: of a path that cannot be read
        print(f"megatron_rl: {error}", file=sys.stderr)
        return EXIT_CONFIG
    with server:
        print(f"{options.run}: {server.address}  (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
