#!/usr/bin/env bash
# Purpose: one node's part of a run under SLURM: torchrun, and the way of a signal to its ranks.
# Launch:  srun --ntasks-per-node=1 bash node.sh <head node>:<port> <what torchrun runs> [its arguments ...]
#          by job.sh, not by hand. PROCESSES: ranks on this node, default its GPUs.
#
# A signal from SLURM may reach this script alone (proctrack/cgroup) or every process of the step (proctrack/linuxproc). torchrun would
# die of SIGUSR1, and gives its ranks 30 s after SIGTERM. So torchrun ignores SIGUSR1, and this script asks the ranks themselves: each
# finishes its step, saves a checkpoint and leaves. They are asked every second until then, since a rank that still starts ignores it.
#
# Exit code: torchrun's; but where it ended with an error after SIGUSR1, 75 (EX_TEMPFAIL: go on later), and after SIGTERM 143.
set -euo pipefail
endpoint="${1:?the first argument is the rendezvous, <head node>:<port>; job.sh makes the call}"
shift
processes="${PROCESSES:-${SLURM_GPUS_ON_NODE:-1}}"
# The head is said, not guessed: torchrun compares host names for that, which fails on hosts with several addresses.
is_head=$((SLURM_NODEID == 0))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"

asked=""
exec {never}<> <(:)
trap 'asked=USR1' USR1
trap 'asked=TERM' TERM

(
  trap '' USR1
  exec torchrun --nnodes "$SLURM_STEP_NUM_NODES" --nproc-per-node "$processes" --local-addr "$SLURMD_NODENAME" \
    --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" --rdzv-backend c10d --rdzv-endpoint "$endpoint" \
    --rdzv-conf "is_host=$is_head,read_timeout=300" "$@"
) &
launcher=$!

while kill -0 "$launcher" 2>/dev/null; do
  if [ -n "$asked" ]; then
    read -r -d '' -a ranks < <(cat "/proc/$launcher/task/"*/children 2>/dev/null) || true # read wants a NUL at the end
    [ "${#ranks[@]}" -eq 0 ] || kill -USR1 "${ranks[@]}" 2>/dev/null || true                # some may have left meanwhile
  fi
  read -r -t 1 -u "$never" || true # sleeps without a process, which a signal to the whole step would end
done
code=0
wait "$launcher" || code=$?

if [ "$code" -ne 0 ]; then
  case "$asked" in
    USR1) code=75 ;;
    TERM) code=143 ;;
  esac
  [ -z "$asked" ] || echo "node.sh: the ranks of $SLURMD_NODENAME were asked to leave (SIG$asked) and have left; torchrun calls that failed"
fi
exit "$code"
