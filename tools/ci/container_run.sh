#!/usr/bin/env bash
# tools/ci/container_run.sh ROOT DIR: what a container engine does with an image whose root is ROOT, in namespaces that
# tools/ci/check_container.sh made: DIR has its user, environment and command, and two versions of a model. The root cannot be
# written, and its volumes are the user's.
set -euo pipefail
root=$1
out=$2
user=$(<"$out/user")
mapfile -t environment < <(grep . "$out/env")
mapfile -t start < <(grep . "$out/command")

ip link set lo up
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mkdir -p "$root/dev"
mount -t tmpfs -o mode=0755 dev "$root/dev"
mkdir "$root/dev/shm"
for device in null urandom; do
  touch "$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
mount -t tmpfs -o mode=1777,size=64m shm "$root/dev/shm"
for volume in run/deltasync models; do
  mount -t tmpfs -o "mode=0700,uid=${user%:*},gid=${user#*:}" volume "$root/$volume"
done
cp -r "$out/models/." "$root/models"
chown -R "$user" "$root/models"
mount -o remount,bind,ro "$root"

as_user=(chroot --userspec="$user" --groups= "$root" env -i "${environment[@]}")
if "${as_user[@]}" touch /tmp/written 2>/dev/null; then echo "the root can be written" >&2 && exit 1; fi

"${as_user[@]}" "${start[@]}" &
agent=$!
for _ in {1..600}; do
  [[ -S $root/run/deltasync/agent.sock ]] && break
  kill -0 "$agent"
  sleep 0.1
done
"${as_user[@]}" deltasync publish --agent /run/deltasync/agent.sock --model /models/step_1 /models/step_2
"${as_user[@]}" deltasync pull --from 127.0.0.1:7070 --out /models/policy
"${as_user[@]}" cmp /models/policy/current/model.safetensors /models/step_2/model.safetensors
"${as_user[@]}" deltasync status --http 127.0.0.1:8080
kill "$agent"
wait "$agent"
echo "the image works: ${start[*]}"
