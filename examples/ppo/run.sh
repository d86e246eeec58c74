#!/usr/bin/env bash
# Purpose: PPO with a critic end to end: a model made by the quickstart's supervised warm-up, a critic grown from it on a grid of its own.
# Cost:    about three and a half minutes on 2 CPU cores, under 3 GB of memory (docs/ppo.md has a recorded run).
# Launch:  bash examples/ppo/run.sh [section.key=value ...]
#          RUN_DIR: the run's folder, default runs/ppo; the model to start from goes to $RUN_DIR/start.
set -euo pipefail
cd "$(dirname "$0")/../.."

run_dir="${RUN_DIR:-runs/ppo}"
start="$run_dir/start/checkpoints/step_140/hf"
if [ ! -d "$start" ]; then
  RUN_DIR="$run_dir/start" bash examples/quickstart/run.sh train.num_rollouts=0 metrics.progress=false
fi

gpus=$(python -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')
processes=2
if [ "$gpus" -eq 1 ]; then
  processes=1
  set -- parallel.pipeline=1 critic.parallel.pipeline=1 critic.parallel.tensor=1 "$@"
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export HF_HUB_OFFLINE=1
exec torchrun --standalone --local-addr 127.0.0.1 --nproc_per_node "$processes" -m megatron_rl.train \
  --config examples/ppo/ppo.yaml --run-dir "$run_dir" \
  model.hf_path="$start" data.train="$run_dir/start/inputs/train.jsonl" "$@"
