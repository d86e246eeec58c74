# shellcheck shell=bash disable=SC2034,SC2154  # parts and run_dir are job.sh's, container_options and container_command step's
# Sourced by job.sh if CONTAINER is pyxis (enroot with NVIDIA's plugin for srun) or apptainer. Defines
#
#   enter_container COMMAND...   sets container_options and container_command, by which a task of this command runs in IMAGE
#
#   IMAGE              pyxis: nvcr.io#nvidia/pytorch:25.06-py3 or a .sqsh file; apptainer: a .sif file or docker://...
#   MOUNTS             between commas, SOURCE[:TARGET[:FLAGS]]; a source without a target keeps its path
#   CONTAINER_OPTIONS  further words for srun (pyxis) or for apptainer exec
#
# Mounted by themselves, each at its own path: the folder of the job, the run's folder, these scripts, the prologue, Hugging Face's
# cache, and every path on the command line that is there on the host: model, data, configuration.
# The image needs bash and megatron_rl with its requirements; a repository in the job's folder comes before the image's package.
: "${IMAGE:?CONTAINER=$CONTAINER needs IMAGE; pyxis: nvcr.io#nvidia/pytorch:25.06-py3 or a .sqsh file, apptainer: a .sif file or docker://...}"

# add_mount SOURCE[:TARGET[:FLAGS]]: to mounts, unless a folder of own_place, which are mounted at their own paths, holds it.
add_mount() {
  local source="${1%%:*}" target="" folder
  [ "$source" = "$1" ] || target="${1#*:}"
  if [ -z "$target" ]; then
    for folder in "${own_place[@]}"; do
      case "$source/" in "$folder"/*) return 0 ;; esac
    done
    own_place+=("$source")
  fi
  mounts+=("$source:${target:-$source}")
}

# add_path PATH: the path, and the place that links on its way lead to, if it is there. Not the system's, which the image has of its own,
# and none with a comma or a colon, which cannot be a mount.
add_path() {
  local path
  [ -e "$1" ] || return 0
  for path in "$(realpath -s -- "$1")" "$(realpath -- "$1")"; do
    path="${path%%/snapshots/*}" # files of Hugging Face's cache are links to its blobs/
    case "$path/" in
      // | /bin/* | /dev/* | /etc/* | /lib*/* | /proc/* | /sbin/* | /sys/* | /usr/* | *[,:]*) ;;
      *) add_mount "$path" ;;
    esac
  done
}

# The network's variables and the cache's, with which an image's own values would compete. Keys stay off the command line.
passed_on() {
  compgen -e | grep -E '^(NCCL|GLOO|UCX|FI|IBV|MLX5|TORCH_NCCL)_|^(CUDA_DEVICE_MAX_CONNECTIONS|OMP_NUM_THREADS|HF_HOME|HF_HUB_CACHE|HF_HUB_OFFLINE)$' || true
}

enter_container() {
  local mounts=() own_place=() variables=() further=() word
  case "$PWD" in *[,:]*)
    echo "$SLURM_JOB_NAME: $PWD has a comma or a colon, at which $CONTAINER parts its mounts; submit from another folder" >&2
    exit 2
    ;;
  esac
  export HF_HOME="${HF_HOME:-$HOME/.cache/huggingface}"
  mkdir -p "$run_dir"
  mkdir -p "$HF_HOME" 2>/dev/null || true # else there is no cache to share
  add_path "$PWD"
  while IFS= read -r -d , word; do
    [ -z "$word" ] || add_mount "$word"
  done <<<"${MOUNTS:-},"
  for word in "$parts" "$run_dir" "$HF_HOME" "${HF_HUB_CACHE:-}" "${MEGATRON_RL_PROLOGUE:-}" "$@"; do
    case "$word" in */*) add_path "${word#"${word%%[=/]*}"=}" ;; esac # of "data.train=/data/a.jsonl" what follows the "="
  done
  while IFS= read -r word; do
    variables+=("$word=${!word}")
  done < <(passed_on)
  read -r -a further <<<"${CONTAINER_OPTIONS:-}"

  case "$CONTAINER" in
    pyxis)
      container_options=(--container-image="$IMAGE" --container-mounts="$(IFS=, && echo "${mounts[*]}")" --container-workdir="$PWD"
        --no-container-mount-home "${further[@]}")
      ;;
    apptainer)
      container_command=(apptainer exec --nv)
      for word in "${mounts[@]}"; do
        container_command+=(--bind "$word")
      done
      container_command+=(--pwd "$PWD" "${further[@]}" "$IMAGE")
      ;;
  esac
  container_command+=(env "${variables[@]}")
  echo "job $SLURM_JOB_ID ($SLURM_JOB_NAME): in $IMAGE by $CONTAINER, with ${mounts[*]}"
}
