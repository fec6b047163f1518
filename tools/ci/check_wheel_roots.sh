#!/usr/bin/env bash
# tools/ci/check_wheel_roots.sh WHEELS DIR [SUITE ...]: installs and uses the wheels in WHEELS (tools/build_wheels.sh) in Debian
# systems that have nothing but Python, made in DIR by debootstrap; by default bookworm and trixie (12 and 13). As root.
#
# They have no network but loopback, in a namespace that ends with them; pip fetches numpy's wheel for them here.
set -euo pipefail
cd "$(dirname "$0")/../.."
source=$PWD
(($# >= 2)) || { sed -n '2,3s/^# \{0,1\}//p' "$0" >&2; exit 2; }
((EUID == 0)) || { echo "check_wheel_roots: run this as root, for debootstrap and chroot" >&2; exit 1; }
wheels=$(cd "$1" && pwd)
mkdir -p "$2"
roots=$(cd "$2" && pwd)
shift 2
suites=("$@")
((${#suites[@]})) || suites=(bookworm trixie)

# inside ROOT COMMAND...: with its own mounts, processes and network, all of which end with it.
inside() {
  # shellcheck disable=SC2016  # for the inner shell
  unshare --mount --pid --fork --net bash -euc '
    root=$1; shift
    mount -t proc proc "$root/proc"
    mount -t tmpfs -o size=512m tmpfs "$root/dev/shm"
    mount -t tmpfs tmpfs "$root/tmp"
    ip link set lo up
    mkdir "$root/tmp/wheels" && cp "$0"/*.whl "$root/tmp/wheels"
    cp "$SOURCE/tests/wheel/one_version.py" "$root/tmp"
    exec chroot "$root" /usr/bin/env -i PATH=/usr/bin:/bin HOME=/root LANG=C.UTF-8 "$@"' "$files" "$@"
}
export SOURCE=$source

for suite in "${suites[@]}"; do
  root=$roots/$suite
  if [[ ! -f $root.made ]]; then
    rm -rf --one-file-system "$root"
    debootstrap --variant=minbase --include=python3-venv "$suite" "$root" >"$root.log" || { tail "$root.log" >&2; exit 1; }
    touch "$root.made"
  fi
  release=$(chroot "$root" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  files=$roots/wheels-$release
  mkdir -p "$files"
  rm -f "$files"/deltasync-*.whl
  cp "$wheels"/deltasync-*.whl "$files"
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --python-version "$release" \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --dest "$files" 'numpy>=1.26'
  echo "$suite: Python $release, $(chroot "$root" ldd --version | head -n 1)"
  inside "$root" bash -euc '
    if command -v cc c++ cmake >/dev/null; then echo "there is a compiler" >&2; exit 1; fi
    python3 -m venv /tmp/venv
    /tmp/venv/bin/pip install --quiet --disable-pip-version-check --no-index --find-links /tmp/wheels deltasync
    /tmp/venv/bin/deltasync --version
    /tmp/venv/bin/deltasync-agent --version
    /tmp/venv/bin/python /tmp/one_version.py'
done
