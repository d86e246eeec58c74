#!/usr/bin/env bash
# Purpose: a run of one process, without torchrun: on the GPU, or on the CPU where there is none. Goes on by itself when started again.
# Cost:    one process until the run ends.
# Launch:  bash examples/torchrun/one_process.sh --config FILE [--run-dir DIR] [section.key=value ...]
#          in the environment that has megatron_rl. All of it goes to megatron_rl.train. SAVE_EVERY: RL steps between checkpoints, 10.
set -euo pipefail
cd "$(dirname "$0")/../.."

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(nproc)}"
exec python -m megatron_rl.train "checkpoint.save_every_rollouts=${SAVE_EVERY:-10}" "$@"
