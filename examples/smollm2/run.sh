#!/usr/bin/env bash
# Purpose: GRPO on a real instruct model, SmolLM2-135M-Instruct, which comes from a wheel of the package index: chat prompts,
#          one-step word problems, math-verify reward, mean@4 on held-out problems before and after.
# Cost:    4 GB of memory and 1 GB of disk on 2 CPU cores; the time is not measured on a quiet machine yet.
# Launch:  make real-model        or        [RUN_DIR=folder] bash examples/smollm2/run.sh [section.key=value ...]
#          ENGINE: vllm or transformers; unless set, vllm where it is installed, here or in .venv-vllm (make test-vllm).
#          Adapters: lora.rank=16 lora.alpha=32 optimizer.lr=2e-4. PROBLEMS: options of problems.py.
set -euo pipefail
cd "$(dirname "$0")/../.."

run_dir="${RUN_DIR:-runs/smollm2}"
inputs="${INPUTS:-runs/smollm2/inputs}"
python examples/smollm2/prepare.py --out "$inputs/model"
python examples/smollm2/problems.py --out "$inputs/data" ${PROBLEMS:---steps 1}

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
exec torchrun --standalone --nproc_per_node "$processes" -m megatron_rl.train \
  --config examples/smollm2/grpo.yaml --run-dir "$run_dir" rollout.engine="$ENGINE" \
  model.hf_path="$inputs/model" data.train="$inputs/data/train.jsonl" eval.path="$inputs/data/test.jsonl" "$@"
