#!/usr/bin/env bash
# Purpose: a run on this host that survives its ranks: when one dies, torchrun ends the others and starts all of them again, and they go
#          on from the latest checkpoint by themselves. Over several hosts: MAX_RESTARTS=3 with many_nodes.sh.
#          The number of ranks stays the same: a range of hosts (--nnodes 1:4) would change the layout of the checkpoint in mid-run.
# Cost:    this host until the run ends; after a death at most SAVE_EVERY RL steps are done again.
# Launch:  [MAX_RESTARTS=3] bash examples/torchrun/elastic.sh --config FILE [--run-dir DIR] [section.key=value ...]
#          PROCESSES: default one per GPU, 2 without. SAVE_EVERY: RL steps between checkpoints, default 10. SIGUSR1 to a rank makes all
#          save and start again; SIGTERM to torchrun makes them save and ends the run.
set -euo pipefail
cd "$(dirname "$0")/../.."

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}" # seconds for step and checkpoint after SIGTERM
# torch 2.13 hands ranks that start again the store of the dead ones, whose addresses they then try to reach; this gives a new one.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node "${PROCESSES:-$((gpus > 0 ? gpus : 2))}" \
  --max-restarts "${MAX_RESTARTS:-3}" \
  -m megatron_rl.train "checkpoint.save_every_rollouts=${SAVE_EVERY:-10}" "$@"
