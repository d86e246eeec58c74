#!/usr/bin/env bash
# Purpose: a run over all GPUs of this host, by torchrun. Goes on by itself when started again with the same command.
# Cost:    this host until the run ends.
# Launch:  bash examples/torchrun/one_node.sh --config FILE [--run-dir DIR] [section.key=value ...]
#          in the environment that has megatron_rl. All of it goes to megatron_rl.train. PROCESSES: default one per GPU, 2 without.
#          SAVE_EVERY: RL steps between checkpoints, default 10.
set -euo pipefail
cd "$(dirname "$0")/../.."

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node "${PROCESSES:-$((gpus > 0 ? gpus : 2))}" \
  -m megatron_rl.train "checkpoint.save_every_rollouts=${SAVE_EVERY:-10}" "$@"
