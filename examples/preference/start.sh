# Sourced by dpo.sh and reward_model.sh: makes the quickstart's inputs and pairs under $run_dir, and $start, a model after 100 supervised steps.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export HF_HUB_OFFLINE=1
start="$run_dir/start/checkpoints/step_100/hf"
if [ ! -d "$start" ]; then
  python examples/quickstart/prepare.py --out "$run_dir/inputs" --digits 1 --operations +,- --seed 0
  python examples/preference/prepare.py --rows "$run_dir/inputs/train.jsonl" --out "$run_dir/inputs/pairs.jsonl"
  torchrun --standalone --local-addr 127.0.0.1 --nproc_per_node 2 \
    -m megatron_rl.train --config examples/quickstart/quickstart.yaml --run-dir "$run_dir/start" \
    model.hf_path="$run_dir/inputs/model" data.train="$run_dir/inputs/train.jsonl" sft.steps=100 train.num_rollouts=0 \
    eval.path="$run_dir/inputs/train.jsonl"
fi
