#!/usr/bin/env bash
# Purpose: the quickstart's task with rollouts made while the trainer trains (docs/async.md): streaming, corrections, replay, re-roll.
# Cost:    minutes on 2 CPU cores, under 3 GB of memory. Stop it with Ctrl-C and start it again: it goes on from its last checkpoint.
# Launch:  [RUN_DIR=folder] [PROCESSES=n] bash examples/async/run.sh [section.key=value ...]
#          With vLLM in the environment: bash examples/async/run.sh rollout.engine=vllm rollout.num_engines=1 weight_sync.in_flight=true
set -euo pipefail
cd "$(dirname "$0")/../.."

run_dir="${RUN_DIR:-runs/async}"
python examples/quickstart/prepare.py --out "$run_dir/inputs" --digits 1 --operations +,- --seed 0

gpus=$(python -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export HF_HUB_OFFLINE=1
exec torchrun --standalone --local-addr 127.0.0.1 --nproc_per_node "${PROCESSES:-$((gpus > 0 ? gpus : 2))}" -m megatron_rl.train \
  --config examples/async/async.yaml --run-dir "$run_dir" \
  model.hf_path="$run_dir/inputs/model" data.train="$run_dir/inputs/train.jsonl" "$@"
