#!/usr/bin/env bash
# Purpose: see a reward model once: it learns to tell right answers from wrong ones, in pairs that it was not shown too, on this machine.
# Cost:    two minutes on 2 CPU cores, under 2 GB of memory.
# Launch:  [RUN_DIR=folder] bash examples/preference/reward_model.sh [section.key=value ...]
set -euo pipefail
cd "$(dirname "$0")/../.."

run_dir="${RUN_DIR:-runs/reward_model}"
source examples/preference/start.sh
exec torchrun --standalone --local-addr 127.0.0.1 --nproc_per_node 2 \
  -m megatron_rl.train --config examples/recipes/reward_model.yaml --run-dir "$run_dir/judge" \
  parallel.pipeline=2 model.hf_path="$start" data.train="$run_dir/inputs/pairs.jsonl" data.max_prompt_tokens=16 \
  sft.steps=100 sft.epochs=null sft.samples_per_step=32 sft.lr=3e-4 sft.eval_share=0.1 sft.eval_every_steps=20 "$@"
