#!/usr/bin/env bash
# Purpose: see on-policy distillation once: a small student that knows little learns from a teacher's log-probs, without a reward.
# Cost:    two to three minutes on 2 CPU cores, under 2 GB of memory.
# Launch:  [RUN_DIR=folder] bash examples/distillation/run.sh [section.key=value ...]
set -euo pipefail
cd "$(dirname "$0")/../.."

run_dir="${RUN_DIR:-runs/distillation}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export HF_HUB_OFFLINE=1
teacher="$run_dir/teacher_run/checkpoints/step_140/hf"
if [ ! -d "$teacher" ]; then
  python examples/quickstart/prepare.py --out "$run_dir/inputs" --digits 1 --operations +,- --seed 0
  python examples/quickstart/prepare.py --out "$run_dir/small" --digits 1 --operations +,- --seed 0 --hidden 96 --layers 2 --heads 3 --kv-heads 1 --intermediate 192
  torchrun --standalone --local-addr 127.0.0.1 --nproc_per_node 2 \
    -m megatron_rl.train --config examples/quickstart/quickstart.yaml --run-dir "$run_dir/teacher_run" \
    model.hf_path="$run_dir/inputs/model" data.train="$run_dir/inputs/train.jsonl" sft.steps=140 train.num_rollouts=0 \
    eval.path="$run_dir/inputs/train.jsonl"
fi
exec torchrun --standalone --local-addr 127.0.0.1 --nproc_per_node 2 \
  -m megatron_rl.train --config examples/recipes/distillation.yaml --run-dir "$run_dir/student" \
  parallel.pipeline=2 model.hf_path="$run_dir/small/model" teacher.hf_path="$teacher" data.train="$run_dir/inputs/train.jsonl" \
  data.max_prompt_tokens=16 rollout.max_response_tokens=6 rollout.samples_per_prompt=8 rollout.max_batch_samples=512 \
  sft.steps=80 sft.lr=1e-3 train.num_rollouts=120 train.samples_per_mini_batch=256 optimizer.lr=4e-4 optimizer.schedule=constant \
  reward.functions=[arithmetic] eval.path="$run_dir/inputs/train.jsonl" "$@"
