#!/usr/bin/env bash
# Purpose: see Tinker's cookbook train on this backend: a server over two processes, then two of its recipes, as they are published.
# Cost:    some minutes on 2 CPU cores, under 4 GB of memory.
# Launch:  make tinker-demo       or        [RUN_DIR=folder] bash examples/tinker/run.sh [section.key=value ...]
set -euo pipefail
cd "$(dirname "$0")/../.."

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec python examples/tinker/demo.py --out "${RUN_DIR:-runs/tinker-demo}" "$@"
