#!/usr/bin/env bash
# Purpose: what `docker run IMAGE ...` starts: the command that is given; megatron-rl if there is none, or options alone.
# Launch:  by the image. SLURM's pyxis, apptainer exec and Kubernetes' `command:` go past it: nothing here is needed for a run.
set -euo pipefail

# A user id that a cluster chose has no name, and torch's compile cache asks for one.
if ! id -un >/dev/null 2>&1; then
  export USER="${USER:-user-$(id -u)}" LOGNAME="${LOGNAME:-user-$(id -u)}"
fi
# Caches of Hugging Face, Triton and vLLM lie below HOME.
if [ ! -w "${HOME:-/}" ]; then
  home=$(mktemp -d)
  echo "entrypoint: HOME=${HOME:-} cannot be written by uid $(id -u); caches go to $home, and end with the container" >&2
  export HOME="$home"
fi
# Docker gives 64 MiB, and NCCL, the weights' segments and data loaders share memory there.
shared_kib=$(df --output=size /dev/shm 2>/dev/null | tail -n 1 || echo 0)
if [ -e /dev/nvidiactl ] && [ "${shared_kib:-0}" -lt 1048576 ]; then
  echo "entrypoint: /dev/shm holds $((shared_kib / 1024)) MiB, which is too little for several ranks; start the container with" \
    "--ipc=host, or --shm-size=16g" >&2
fi

if [ "$#" -eq 0 ] || [ "${1#-}" != "$1" ]; then
  set -- megatron-rl "$@"
fi
exec "$@"
