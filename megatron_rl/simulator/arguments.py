"""The command-line arguments that ``megatron-rl simulate`` and ``megatron_rl.train --dry-run`` share."""

from __future__ import annotations

import argparse
import pathlib


def add_arguments(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the arguments of a forecast that are no settings of the configuration, such as ``--nodes``."""
    parser.add_argument(
        "--nodes",
        type=int,
        help="nodes of the job; without it WORLD_SIZE or SLURM's variables say, else one is assumed",
    )
    parser.add_argument("--gpus-per-node", type=int, help="default 8, or SLURM_GPUS_ON_NODE")
    parser.add_argument(
        "--from-run", metavar="FOLDER", help="a run's folder: --trace and --coefficients by the files that it wrote"
    )
    parser.add_argument(
        "--trace", help="lengths and rewards per sample: a JSONL file, or a run's folder with trace.jsonl"
    )
    parser.add_argument(
        "--lengths", help="lognormal:MEAN,SIGMA of response tokens, without --trace; default half the limit, 0.5"
    )
    parser.add_argument(
        "--pass-rate", help="beta:A,B of each prompt's chance of reward 1, without --trace; default beta:0.5,0.5"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, help="of each prompt, without --trace; default half of data.max_prompt_tokens"
    )
    parser.add_argument(
        "--coefficients", help="JSON, or a run's folder: its fitted stages, or a machine's rates; without it --flops"
    )
    parser.add_argument(
        "--flops", type=float, help="FLOP/s of one GPU in matrix products, stated; default 4e14, of a mixture 2.7e14"
    )
    parser.add_argument("--gpu-memory-gib", type=float, default=80.0, help="of one GPU; default 80")
    parser.add_argument(
        "--host-gb-per-s", type=float, default=2.0, help="of a host from and to storage, in GB (1e9 bytes); default 2"
    )
    parser.add_argument("--svg", type=pathlib.Path, help="write a picture of the pipeline, dense and skip, there")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures there")
