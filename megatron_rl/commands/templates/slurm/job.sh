# shellcheck shell=bash
# Sourced by the job.sbatch of `megatron-rl new` and by examples/slurm/*.sbatch: what they share. Sets nodes (the allocation's hosts), port,
# run_dir and container, and defines
#
#   train_on NODE... -- ARGUMENTS   the trainer over these nodes, or the module that program names, one task per node running torchrun
#                                   (node.sh); waits for its end
#   end_job                         leaves with the trainer's exit code, or requeues the job where it was asked to leave and has saved
#
# It works with bash and SLURM's own commands, on the host; only the tasks run in a container.
cd "${SLURM_SUBMIT_DIR:?this belongs to a batch script: start one with sbatch}" || exit 2
parts="${BASH_SOURCE[0]%/*}" # this folder
# shellcheck disable=SC2034  # the templates' own
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# The job's own, so that two jobs which share a node do not meet; below the ports that systems give out by themselves.
port="${PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
# The job's id stays over a requeue, so the next attempt finds the checkpoints.
run_dir="${RUN_DIR:-runs/$SLURM_JOB_NAME-$SLURM_JOB_ID}"
attempt=$((${SLURM_RESTART_COUNT:-0} + 1))

latest_checkpoint() {
  cat "$run_dir/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo none
}

# Bare metal: a virtual environment that all nodes see. A container: IMAGE, by pyxis or apptainer (container.sh).
venv="" # that the tasks activate
case "${CONTAINER:-none}" in
  none)
    venv="${VENV:-.venv}"
    # shellcheck source=/dev/null
    source "$venv/bin/activate"
    ;;
  pyxis | apptainer)
    # shellcheck source=megatron_rl/commands/templates/slurm/container.sh
    source "$parts/container.sh"
    ;;
  *)
    echo "$SLURM_JOB_NAME: CONTAINER=$CONTAINER is not known; choose none, pyxis or apptainer" >&2
    exit 2
    ;;
esac

# SLURM tells this script --signal's USR1, and SIGTERM when the job is cancelled, preempted or requeued by others.
trainer="" asked="" ended=""
trap 'asked=1; [ -z "$trainer" ] || kill -USR1 "$trainer" 2>/dev/null || true' USR1 # srun hands it to its tasks
trap 'ended=1' TERM                                                              # SLURM tells the tasks itself

# step NODE... -- COMMAND: one task on each of the nodes, begun by task.sh. Becomes srun: call it in the background.
step() {
  local hosts=() container_options=() container_command=() # of srun; before the task's command
  while [ "$1" != -- ]; do
    hosts+=("$1")
    shift
  done
  shift
  [ -n "$venv" ] || enter_container "$@"
  # srun does not take over --cpus-per-task from sbatch (since SLURM 22.05). --wait: after the first task's end the others have as long.
  exec srun --nodes="${#hosts[@]}" --ntasks="${#hosts[@]}" --ntasks-per-node=1 --nodelist="$(IFS=, && echo "${hosts[*]}")" \
    --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=0 --wait=300 --label \
    "${container_options[@]}" "${container_command[@]}" bash "$parts/task.sh" "$venv" "$@"
}

train_on() {
  local hosts=()
  while [ "$1" != -- ]; do
    hosts+=("$1")
    shift
  done
  shift
  before=$(latest_checkpoint)
  echo "job $SLURM_JOB_ID ($SLURM_JOB_NAME), attempt $attempt: ${hosts[*]}; run $run_dir, checkpoint: $before"
  step "${hosts[@]}" -- bash "$parts/node.sh" "${hosts[0]}:$port" -m "${program:-megatron_rl.train}" --run-dir "$run_dir" "$@" &
  trainer=$!
  [ -z "$asked" ] || kill -USR1 "$trainer"
  while kill -0 "$trainer" 2>/dev/null; do
    wait "$trainer" || true # a signal ends the wait, not the trainer
  done
  code=0
  wait "$trainer" || code=$?
}

end_job() {
  local after
  after=$(latest_checkpoint)
  echo "job $SLURM_JOB_ID ($SLURM_JOB_NAME), attempt $attempt: ended with $code; checkpoint: $after"
  # 75: the ranks were asked to leave, and left. Without a newer checkpoint the next attempt would do the same work again, for ever.
  if [ "$code" -eq 75 ] && [ -z "$ended" ]; then
    if [ "$after" != "$before" ]; then
      echo "job $SLURM_JOB_ID ($SLURM_JOB_NAME): requeued, to go on from checkpoint $after"
      scontrol requeue "$SLURM_JOB_ID"
    else
      echo "job $SLURM_JOB_ID ($SLURM_JOB_NAME): not requeued: this attempt saved nothing after checkpoint $before; give it more" \
        "--time, or an earlier --signal=B:USR1@<seconds>, so that a step and its checkpoint fit" >&2
    fi
  fi
  exit "$code"
}
