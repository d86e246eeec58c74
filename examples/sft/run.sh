#!/usr/bin/env bash
# Purpose: see supervised training once: conversations of two turns, the loss on the assistant's tokens, held-out loss, a resumable run.
# Cost:    under two minutes on 2 CPU cores, under 2 GB of memory.
# Launch:  [RUN_DIR=folder] bash examples/sft/run.sh [section.key=value ...]
set -euo pipefail
cd "$(dirname "$0")/../.."

run_dir="${RUN_DIR:-runs/sft}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export HF_HUB_OFFLINE=1
if [ ! -f "$run_dir/inputs/chats.jsonl" ]; then
  python examples/quickstart/prepare.py --out "$run_dir/inputs" --digits 1 --operations +,- --seed 0
  python examples/sft/prepare.py --inputs "$run_dir/inputs"
fi
exec torchrun --standalone --local-addr 127.0.0.1 --nproc_per_node 2 \
  -m megatron_rl.train --config examples/recipes/sft.yaml --run-dir "$run_dir/run" \
  parallel.pipeline=2 model.hf_path="$run_dir/inputs/model" data.train="$run_dir/inputs/chats.jsonl" \
  data.template=chat data.messages_key=messages data.max_prompt_tokens=16 rollout.max_response_tokens=6 \
  sft.steps=0 sft.epochs=16 sft.samples_per_step=64 sft.lr=1e-3 sft.eval_share=0.1 sft.eval_every_steps=25 sft.save_every_steps=50 "$@"
