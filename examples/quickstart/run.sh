#!/usr/bin/env bash
# Purpose: see the whole way of the data once: supervised warm start, then GRPO with the zero-advantage skip, on this machine.
# Cost:    minutes on 2 CPU cores, under 2 GB of memory. With GPUs: PP=2 over NCCL with two or more, one process with one.
# Launch:  make quickstart        or        [RUN_DIR=folder] [FAMILY=qwen3_5_text] [PREPARE="--test-rows 40"] bash examples/quickstart/run.sh [section.key=value ...]
set -euo pipefail
cd "$(dirname "$0")/../.."

run_dir="${RUN_DIR:-runs/quickstart}"
python examples/quickstart/prepare.py --out "$run_dir/inputs" --digits 1 --operations +,- --seed 0 --family "${FAMILY:-qwen2}" \
  ${PREPARE:-}

gpus=$(python -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')
processes=2
if [ "$gpus" -eq 1 ]; then
  processes=1
  set -- parallel.pipeline=1 "$@"
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export HF_HUB_OFFLINE=1
exec torchrun --standalone --local-addr 127.0.0.1 --nproc_per_node "$processes" -m megatron_rl.train \
  --config examples/quickstart/quickstart.yaml --run-dir "$run_dir" \
  model.hf_path="$run_dir/inputs/model" data.train="$run_dir/inputs/train.jsonl" "$@"
