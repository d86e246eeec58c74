#!/usr/bin/env bash
# Purpose: a run over several hosts without a scheduler: this, on each of them, with the same arguments. With SLURM: examples/slurm.
#          Goes on by itself when started again on all of them.
# Cost:    the hosts until the run ends.
# Launch:  NNODES=2 HEAD=node-a:29400 bash examples/torchrun/many_nodes.sh --config FILE [--run-dir DIR] [section.key=value ...]
#          HEAD: one of the hosts, by a name that the others resolve, and a port that is free there. PROCESSES: on this host, default one
#          per GPU, 1 without. LOCAL_ADDR: this host as the others reach it, where its own name does not do. NCCL_SOCKET_IFNAME,
#          GLOO_SOCKET_IFNAME: the network card to use, where there are several. MAX_RESTARTS: see elastic.sh; default 0.
#          SAVE_EVERY: RL steps between checkpoints, default 10. The folder of the run must be one that all hosts see.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${NNODES:?set NNODES to the number of hosts}" "${HEAD:?set HEAD to <one of the hosts>:<port>, the same on all of them}"

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # a new store for ranks that start again: elastic.sh says why
exec torchrun --nnodes "$NNODES" --nproc-per-node "${PROCESSES:-$((gpus > 0 ? gpus : 1))}" ${LOCAL_ADDR:+--local-addr "$LOCAL_ADDR"} \
  --rdzv-id "${RUN_ID:-megatron_rl}" --rdzv-backend c10d --rdzv-endpoint "$HEAD" --max-restarts "${MAX_RESTARTS:-0}" \
  -m megatron_rl.train "checkpoint.save_every_rollouts=${SAVE_EVERY:-10}" "$@"
