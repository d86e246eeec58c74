#!/usr/bin/env bash
# Purpose: an agent program with an unmodified OpenAI client makes the rollouts, and is trained on the tokens that were sampled.
# Cost:    minutes on 2 CPU cores, under 2 GB of memory; pip install -e ".[agent]" brings the client.
# Launch:  [RUN_DIR=folder] [PROCESSES=n] bash examples/agent/run.sh [section.key=value ...]
set -euo pipefail
cd "$(dirname "$0")/../.."

run_dir="${RUN_DIR:-runs/agent}"
python examples/calculator/prepare.py --out "$run_dir/inputs" --call-share 0.3 --seed 0
python examples/agent/prepare.py "$run_dir/inputs"

gpus=$(python -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')
processes="${PROCESSES:-$((gpus > 0 ? gpus : 2))}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export HF_HUB_OFFLINE=1
exec torchrun --standalone --local-addr 127.0.0.1 --nproc_per_node "$processes" -m megatron_rl.train \
  --config examples/agent/agent.yaml --run-dir "$run_dir" \
  model.hf_path="$run_dir/inputs/model" data.train="$run_dir/inputs/train.jsonl" eval.path="$run_dir/inputs/test.jsonl" "$@"
