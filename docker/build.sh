#!/usr/bin/env bash
# Purpose: build an image of this repository by docker, podman or buildah, whichever works here, with the labels' values.
# Launch:  make image, make image-cpu        or        bash docker/build.sh docker/Dockerfile [arguments of `docker build` ...]
# TAG:     of the image; default megatron_rl:<version>, and -cpu behind it for docker/Dockerfile.cpu
set -euo pipefail
cd "$(dirname "$0")/.."
file="${1:?the first argument is the Dockerfile: docker/Dockerfile or docker/Dockerfile.cpu}"
shift

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' megatron_rl/__init__.py)
revision=$(git -c safe.directory="$PWD" rev-parse HEAD 2>/dev/null || echo unknown)
created=$(git -c safe.directory="$PWD" log -1 --format=%cI 2>/dev/null || echo unknown)
tag="${TAG:-megatron_rl:$version}"
[ "${TAG:-}" ] || [ "${file%.cpu}" = "$file" ] || tag+="-cpu"

why=()
builder=""
for name in docker podman buildah; do
  if ! command -v "$name" >/dev/null; then
    why+=("no $name")
  elif fault=$("$name" info 2>&1 >/dev/null); then
    builder=$name
    break
  else
    why+=("$name does not work: ${fault%%$'\n'*}")
  fi
done
if [ -z "$builder" ]; then
  printf 'build.sh: %s\n' "${why[@]}" "install Docker 23 or newer with buildx, podman, or buildah (Debian, Ubuntu: apt-get install buildah)" >&2
  exit 1
fi
echo "build.sh: $tag by $builder, from $file of ${revision:0:12}"
export DOCKER_BUILDKIT=1
exec "$builder" build -f "$file" -t "$tag" --build-arg "VERSION=$version" --build-arg "REVISION=$revision" \
  --build-arg "CREATED=$created" "$@" .
