#!/usr/bin/env bash
# Purpose: the beginning of each task on each node, the trainer's and vLLM's: the user's prologue, then the command, in this process.
# Launch:  srun ... bash task.sh <the virtual environment, or "" in a container> <command> [its arguments ...]; by job.sh, not by hand.
#
# MEGATRON_RL_PROLOGUE: a file that is sourced here, before Python starts: `module load`, the fabric's variables, LD_LIBRARY_PATH. What it
# puts on PATH comes behind the virtual environment.
set -euo pipefail
venv="${1?the first argument is the virtual environment, or nothing in quotes}"
command=("${@:2}") # a prologue may change the arguments
prologue="${MEGATRON_RL_PROLOGUE:-}"
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}" # NCCL's own reason, where a network or a device fails

if [ -n "$prologue" ]; then
  case "$prologue" in */*) ;; *) prologue="./$prologue" ;; esac # else bash would look for it on PATH
  [ -r "$prologue" ] || {
    echo "task.sh: MEGATRON_RL_PROLOGUE=$MEGATRON_RL_PROLOGUE is no file that ${SLURMD_NODENAME:-this node} can read; give a path that all nodes see" >&2
    exit 2
  }
  code=0
  set +eu # modules and conda name variables that nobody has set
  # shellcheck source=/dev/null
  source "$prologue" || code=$?
  set -eu
  [ "$code" -eq 0 ] || {
    echo "task.sh: MEGATRON_RL_PROLOGUE=$MEGATRON_RL_PROLOGUE ended with $code on ${SLURMD_NODENAME:-this node}; its lines are above" >&2
    exit 2
  }
  # shellcheck source=/dev/null
  [ -z "$venv" ] || source "$venv/bin/activate"
fi
# Offload, checkpoints and the weights' copies lock host memory.
ulimit -l unlimited 2>/dev/null || [ "$(ulimit -l)" = unlimited ] ||
  echo "task.sh: ${SLURMD_NODENAME:-this node} locks at most $(ulimit -l) KiB of memory (ulimit -l); PropagateResourceLimitsExcept=MEMLOCK in slurm.conf, or LimitMEMLOCK=infinity for slurmd, lifts that" >&2
exec "${command[@]}"
