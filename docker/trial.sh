#!/usr/bin/env bash
# Purpose: build docker/Dockerfile.cpu without a registry of images, by buildah on a Debian that debootstrap makes, and run in it
#          the quickstart, as a user id that the image does not know.
# Cost:    about ten minutes and 5 GB on two cores; the layers stay in STORE for the next time.
# Launch:  make image-trial        or        bash docker/trial.sh [arguments of `buildah bud` ...]        as root, on Debian or Ubuntu
#
#   QUICKSTART  settings of the quickstart's run, as train.num_rollouts=2
#   STORE  where the layers lie; default runs/image-trial
#   PIP_CERT, PIP_FIND_LINKS  pip's own variables: a certificate and a folder of wheels of this host, which the build then uses too
set -euo pipefail
cd "$(dirname "$0")/.."
base=debian:bookworm-slim # the Dockerfile's

missing=()
for name in buildah debootstrap; do
  command -v "$name" >/dev/null || missing+=("$name")
done
if [ "${#missing[@]}" -gt 0 ]; then
  apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" crun
fi
store=$(realpath -m "${STORE:-runs/image-trial}")
work=$(mktemp -d)
mkdir -p "$store/pip"
builder=(buildah --root "$store/layers" --runroot "$work/running")
container=""
trap '[ -z "$container" ] || "${builder[@]}" rm "$container" >/dev/null; rm -rf --one-file-system "$work"' EXIT

if ! "${builder[@]}" inspect --type image "docker.io/library/$base" >/dev/null 2>&1; then
  echo "trial.sh: making $base by debootstrap"
  debootstrap --variant=minbase bookworm "$work/debian" >"$store/debootstrap.log"
  container=$("${builder[@]}" from scratch)
  "${builder[@]}" add --quiet "$container" "$work/debian" / >/dev/null
  "${builder[@]}" commit --quiet "$container" "docker.io/library/$base" >/dev/null
  "${builder[@]}" rm "$container" >/dev/null
  container=""
fi

# pip as it is set up here: what the variables name lies below /trial in the build, and in no layer.
given=(--volume "$store/pip:/trial:ro")
{
  echo "[global]"
  if [ -n "${PIP_CERT:-}" ]; then
    cp --dereference "$PIP_CERT" "$store/pip/certificates.pem"
    echo "cert = /trial/certificates.pem"
  fi
  if [ -n "${PIP_FIND_LINKS:-}" ]; then
    given+=(--volume "$(realpath "$PIP_FIND_LINKS"):/wheels:ro" --build-arg TORCH_INDEX=file:///wheels)
    echo "find-links = /wheels"
  fi
} >"$store/pip/pip.conf"
given+=(--volume "$store/pip/pip.conf:/etc/pip.conf:ro")

echo "trial.sh: building docker/Dockerfile.cpu"
revision=$(git -c safe.directory="$PWD" rev-parse HEAD)
"${builder[@]}" bud --isolation chroot --layers --pull-never --file docker/Dockerfile.cpu --tag megatron_rl:trial \
  --build-arg VERSION=trial --build-arg REVISION="$revision" "${given[@]}" "$@" . >"$store/build.log" 2>&1 || {
  tail -n 40 "$store/build.log" >&2
  echo "trial.sh: the build failed; all of its lines are in $store/build.log" >&2
  exit 1
}
label=$("${builder[@]}" inspect --format '{{index .OCIv1.Config.Labels "org.opencontainers.image.revision"}} {{.OCIv1.Config.User}}' megatron_rl:trial)
[ "$label" = "$revision 10001" ] || {
  echo "trial.sh: the image's revision and user are $label, not $revision 10001" >&2
  exit 1
}

container=$("${builder[@]}" from --pull-never megatron_rl:trial)
entry=(/usr/bin/tini -s -- /usr/local/bin/entrypoint) # buildah run leaves the entry point out
inside=("${builder[@]}" run --isolation chroot --user 4321:4321 "$container" -- "${entry[@]}")
"${inside[@]}" --help # of megatron-rl
code=0
"${inside[@]}" bash -c 'exit 75' || code=$?
[ "$code" -eq 75 ] || {
  echo "trial.sh: a command that ended with 75 gave $code" >&2
  exit 1
}
read -r -a settings <<<"${QUICKSTART:-}"
"${inside[@]}" env RUN_DIR=/workspace/runs/quickstart bash /opt/megatron_rl/examples/quickstart/run.sh "${settings[@]}"
"${inside[@]}" test -s /workspace/runs/quickstart/report.html
echo "trial.sh: docker/Dockerfile.cpu of ${revision:0:12} builds, and its quickstart ran as uid 4321"
