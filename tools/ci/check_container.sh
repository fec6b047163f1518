#!/usr/bin/env bash
# tools/ci/check_container.sh DIR: builds the image of docs/operating/Containerfile in DIR, without a registry or a running
# engine: the base is a Debian 12 made by debootstrap, and steps run in a chroot. Then starts the image as it would be
# started, as its user and with a root file system that cannot be written: a version goes through, and its pages answer.
# Wants root, debootstrap, buildah and iproute2 (else it ends with 77: skipped), and some minutes, since the programs are
# compiled again.
set -euo pipefail
cd "$(dirname "$0")/../.."
for program in debootstrap buildah ip; do
  command -v "$program" >/dev/null || { echo "check_container: skipped: $program is not installed" && exit 77; }
done
((EUID == 0)) || { echo "check_container: skipped: only root can make a Debian to build in" && exit 77; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
containers() { buildah --storage-driver vfs --root "$out/images" --runroot "$out/run" "$@"; }

# What debian:12-slim is for this purpose, from the package source that this machine uses.
make_base() {
  local sources=/etc/apt/sources.list.d/debian.sources mirror=() container
  rm -rf "$out/base"
  if [[ -e $sources ]]; then mapfile -t mirror < <(sed -nE 's/^URIs: *([^ ]+).*/\1/p' "$sources" | head -n 1); fi
  debootstrap --variant=minbase bookworm "$out/base" "${mirror[@]}" >"$out/debootstrap.log"
  if [[ -e $sources ]]; then cp "$sources" "$out/base/etc/apt/sources.list.d/" && : >"$out/base/etc/apt/sources.list"; fi
  tar -C "$out/base" --exclude ./var/cache/apt/archives --exclude ./dev -cf "$out/base.tar" .
  container=$(containers from scratch)
  containers add --quiet "$container" "$out/base.tar" / >/dev/null
  containers commit --quiet --rm "$container" localhost/debian:12-slim >/dev/null
  rm -rf "$out/base" "$out/base.tar"
}
containers inspect --type image localhost/debian:12-slim >/dev/null 2>&1 || make_base

containers bud --layers --isolation chroot --format oci --build-arg DEBIAN=localhost/debian:12-slim \
  -f docs/operating/Containerfile -t localhost/deltasync . >"$out/build.log" 2>&1 ||
  { tail -n 40 "$out/build.log" && exit 1; }

container=$(containers from localhost/deltasync)
trap 'containers rm "$container" >/dev/null' EXIT
root=$(containers mount "$container")
rm -rf "$out/models"
for number in 1 2; do
  python3 - "$out/models/step_$number" "$number" <<'EOF'
import pathlib, struct, sys
directory, number = pathlib.Path(sys.argv[1]), int(sys.argv[2])
directory.mkdir(parents=True)
header = b'{"w":{"dtype":"BF16","shape":[64,64],"data_offsets":[0,8192]}}  '
(directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes([number]) + bytes(8191))
(directory / "config.json").write_text("{}")
EOF
done
# The image's user, environment and command, one a line.
containers inspect --type image --format '{{range .OCIv1.Config.Env}}{{println .}}{{end}}' localhost/deltasync >"$out/env"
containers inspect --type image --format '{{.OCIv1.Config.User}}' localhost/deltasync >"$out/user"
containers inspect --type image --format \
  '{{range .OCIv1.Config.Entrypoint}}{{println .}}{{end}}{{range .OCIv1.Config.Cmd}}{{println .}}{{end}}' \
  localhost/deltasync >"$out/command"
unshare --mount --net --ipc --pid --fork --kill-child bash tools/ci/container_run.sh "$root" "$out"
