"""Predicts a configuration's time and memory on N nodes, and what the zero-advantage skip gains, on a laptop.

    megatron-rl simulate --config my.yaml --nodes 512 --lengths lognormal:2000,0.7 --svg pipeline.svg
    megatron-rl simulate --from-run runs/my-run --nodes 4   # its config.yaml, samples and measured costs

The trainer's own planner plans the optimizer steps. The samples come from a trace or from stated
distributions. No process group is joined, no model is built, and no GPU is needed. Of model.hf_path
only config.json is read. See docs/simulate-cluster.md.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from megatron_rl import hub
from megatron_rl.config import load_config
from megatron_rl.errors import ConfigError
from megatron_rl.simulator.arguments import add_arguments
from megatron_rl.simulator.command import simulate_job

EXIT_CONFIG = 2


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="megatron-rl simulate",
        description=__doc__.split("\n")[0],
        epilog="example: megatron-rl simulate --config my.yaml --nodes 512 --svg pipeline.svg",
    )
    parser.add_argument(
        "--config", help="YAML file; everything it leaves out has a default; with --from-run by default that run's"
    )
    add_arguments(parser)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_intermixed_args(arguments)
    try:
        path = options.config
        if path is None and options.from_run is not None and pathlib.Path(options.from_run).is_dir():
            path = pathlib.Path(options.from_run) / "config.yaml"
        config = hub.fetched(load_config(path, options.overrides), weights=False, pins=False)
        shortfall = simulate_job(config, options)
        if shortfall is not None:
            raise ConfigError(shortfall)
        return 0
    except (ConfigError, OSError) as error:
        print(f"megatron_rl: {error}", file=sys.stderr)
        return EXIT_CONFIG


if __name__ == "__main__":
    sys.exit(main())
