#!/usr/bin/env bash
# Installs what deltasync's build, tests and quickstart need, from Debian 12's own packages. Does nothing (and needs
# no network and no root) when everything is there. `--check` only tells what is missing and fails if anything is.
set -euo pipefail

packages=(
  # build
  build-essential g++ cmake ninja-build ccache pkg-config git
  libboost1.81-dev libxxhash-dev libzstd-dev libspdlog-dev libfmt-dev libcli11-dev nlohmann-json3-dev libssl-dev
  libtomlplusplus-dev
  prometheus-cpp-dev
  # tests and lint
  libgtest-dev libgmock-dev libbenchmark-dev clang-14 clang-format-14 clang-tidy-14 libclang-rt-14-dev lld-14 shellcheck systemd
  prometheus zsh fish
  # the wheel in empty Debian systems (tools/ci/check_wheel_roots.sh)
  debootstrap iproute2
  # reference decoder, quickstart
  python3 python3-numpy python3-venv python3-pip
  # the Python package
  python3-dev
)

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
  [[ $status == installed ]] || missing+=("$package")
done

if ((${#missing[@]} == 0)); then
  exit 0
fi
echo "install_deps: missing: ${missing[*]}"
if [[ ${1:-} == --check ]]; then
  exit 1
fi

as_root=()
if ((EUID != 0)); then
  command -v sudo >/dev/null || { echo "install_deps: run this as root, or install sudo" >&2; exit 1; }
  as_root=(sudo)
fi
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -q
"${as_root[@]}" apt-get install -y -q --no-install-recommends "${missing[@]}"
