#!/usr/bin/env bash
# Purpose: GRPO on a real instruct model, SmolLM2-135M-Instruct, which comes from a wheel of the package index: chat prompts,
#          one-step word problems, math-verify reward, mean@4 on held-out problems before and after.
# Cost:    20 minutes on 2 CPU cores with vLLM (docs/evidence/recorded-runs.md), 5 GB of memory a process, 1 GB of disk.
# Launch:  make real-model        or        [RUN_DIR=folder] bash examples/smollm2/run.sh [section.key=value ...]
#          ENGINE: vllm or transformers; unless set, vllm where it is installed, here or in .venv-vllm (make test-vllm).
#          Adapters: lora.rank=16 lora.alpha=32 optimizer.lr=2e-4. PROBLEMS: options of problems.py. GSM8K: the folder with
#          GSM8K's train.jsonl and test.jsonl, to train on it instead (gsm8k.yaml, runs/smollm2-gsm8k).
set -euo pipefail
[ -z "${GSM8K:-}" ] || GSM8K="$(realpath -e "$GSM8K")"
cd "$(dirname "$0")/../.."

inputs="${INPUTS:-runs/smollm2/inputs}"
python examples/smollm2/prepare.py --out "$inputs/model"
if [ -n "${GSM8K:-}" ]; then
  config=examples/smollm2/gsm8k.yaml run_dir="${RUN_DIR:-runs/smollm2-gsm8k}" data="$inputs/gsm8k"
  python examples/gsm8k/prepare.py --gsm8k "$GSM8K" --data-only --out "$data" \
    --last-line "The answer is {answer}." ${PREPARE:---max-calculations 2}
else
  config=examples/smollm2/grpo.yaml run_dir="${RUN_DIR:-runs/smollm2}" data="$inputs/data"
  python examples/smollm2/problems.py --out "$data" ${PROBLEMS:---steps 1}
fi

has_vllm='import importlib.util, sys; sys.exit(importlib.util.find_spec("vllm") is None)'
if [ -z "${ENGINE:-}" ]; then
  ENGINE=transformers
  if python -c "$has_vllm"; then
    ENGINE=vllm
  elif [ -e .venv-vllm/.installed ] && .venv-vllm/bin/python -c "$has_vllm"; then
    ENGINE=vllm
    export PATH="$PWD/.venv-vllm/bin:$PATH" VIRTUAL_ENV="$PWD/.venv-vllm"
  fi
fi
gpus=$(python -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')
processes=2
if [ "$gpus" -eq 1 ]; then
  processes=1
  set -- parallel.pipeline=1 "$@"
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export HF_HUB_OFFLINE=1
exec torchrun --standalone --local-addr 127.0.0.1 --nproc_per_node "$processes" -m megatron_rl.train \
  --config "$config" --run-dir "$run_dir" rollout.engine="$ENGINE" \
  model.hf_path="$inputs/model" data.train="$data/train.jsonl" eval.path="$data/test.jsonl" "$@"
