#!/usr/bin/env bash
# Purpose: see DPO once: a model that knows half of the arithmetic learns from right and wrong answers side by side, on this machine.
# Cost:    two minutes on 2 CPU cores, under 2 GB of memory.
# Launch:  [RUN_DIR=folder] bash examples/preference/dpo.sh [section.key=value ...]
set -euo pipefail
cd "$(dirname "$0")/../.."

run_dir="${RUN_DIR:-runs/dpo}"
source examples/preference/start.sh
exec torchrun --standalone --local-addr 127.0.0.1 --nproc_per_node 2 \
  -m megatron_rl.train --config examples/recipes/dpo.yaml --run-dir "$run_dir/dpo" \
  parallel.pipeline=2 model.hf_path="$start" data.train="$run_dir/inputs/pairs.jsonl" data.max_prompt_tokens=16 rollout.max_response_tokens=6 \
  sft.steps=80 sft.epochs=null sft.samples_per_step=32 sft.lr=1e-4 sft.warmup_steps=5 sft.eval_share=0.1 sft.eval_every_steps=20 \
  reward.functions=[arithmetic] eval.path="$run_dir/inputs/train.jsonl" "$@"
