#!/usr/bin/env bash
# Purpose: GRPO on GSM8K end to end: tokenizer and model made here, supervised warm-up, math-verify reward, greedy evaluation on
#          the test split, the zero-advantage skip at work (most groups of a small model have no right answer).
# Cost:    about 15 minutes on 2 CPU cores, 1.3 GB of memory a process (docs/evidence/recorded-runs.md has a recorded run).
# Launch:  GSM8K=<folder with train.jsonl and test.jsonl> bash examples/gsm8k/run.sh [section.key=value ...]
#          The folder is grade_school_math/data of github.com/openai/grade-school-math. RUN_DIR: the run's folder, default
#          runs/gsm8k. PROCESSES: default one per GPU, 2 without. Another model: pass model.hf_path=<folder>, see README.md.
set -euo pipefail
GSM8K="$(realpath -e "${GSM8K:?set GSM8K to the folder that holds train.jsonl and test.jsonl of GSM8K}")"
cd "$(dirname "$0")/../.."

run_dir="${RUN_DIR:-runs/gsm8k}"
python examples/gsm8k/prepare.py --gsm8k "$GSM8K" --out "$run_dir/inputs" --hidden 128 --intermediate 384 --seed 0

gpus=$(python -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')
processes="${PROCESSES:-$((gpus > 0 ? gpus : 2))}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export HF_HUB_OFFLINE=1
exec torchrun --standalone --local-addr 127.0.0.1 --nproc_per_node "$processes" -m megatron_rl.train \
  --config examples/gsm8k/gsm8k.yaml --run-dir "$run_dir" \
  model.hf_path="$run_dir/inputs/model" data.train="$run_dir/inputs/train.jsonl" eval.path="$run_dir/inputs/test.jsonl" "$@"
