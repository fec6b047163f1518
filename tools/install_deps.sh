#!/usr/bin/env bash
# Installs what deltasync's build, tests and quickstart need, from Debian 12's own packages. Does nothing (and needs
# no network and no root) when everything is there. `--build`: only what the build, wheels and the quickstart need.
# `--gpu`: also what tests with CUDA 12 need. `--check` only tells what is missing and fails if anything is.
set -euo pipefail

build=(
  build-essential g++ cmake ninja-build ccache pkg-config git
  libboost1.81-dev libxxhash-dev libzstd-dev libspdlog-dev libfmt-dev libcli11-dev nlohmann-json3-dev libssl-dev
  libtomlplusplus-dev
  prometheus-cpp-dev
  # tools/build.sh configures the tests and builds them unless it is told what to build
  libgtest-dev libgmock-dev
  # cpack
  file
  # reference decoder, quickstart
  python3 python3-numpy python3-venv python3-pip
  # the Python package
  python3-dev
)
tests=(
  # tests and lint
  libbenchmark-dev clang-14 clang-format-14 clang-tidy-14 libclang-rt-14-dev lld-14 shellcheck systemd
  prometheus zsh fish
  # the wheel in empty Debian systems (tools/ci/check_wheel_roots.sh)
  debootstrap iproute2
)

check=
packages=("${build[@]}" "${tests[@]}")
for option in "$@"; do
  case $option in
    --build) packages=("${build[@]}") ;;
    --gpu) packages+=(clang-19) ;;
    --check) check=1 ;;
    *) sed -n '2,4s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  esac
done

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
  [[ $status == installed ]] || missing+=("$package")
done

if ((${#missing[@]} == 0)); then
  exit 0
fi
# shellcheck source=/dev/null
here=$(. /etc/os-release 2>/dev/null && echo "${ID:-} ${VERSION_ID:-}") || true
if [[ $here != "debian 12" ]]; then
  echo "install_deps: installs packages of Debian 12; here (${here:-another system}) install what matches them yourself" >&2
  check=1
fi
echo "install_deps: missing: ${missing[*]}"
[[ -z $check ]] || exit 1

as_root=()
if ((EUID != 0)); then
  command -v sudo >/dev/null || { echo "install_deps: run this as root, or install sudo" >&2; exit 1; }
  as_root=(sudo)
fi
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -q
"${as_root[@]}" apt-get install -y -q --no-install-recommends "${missing[@]}"
# The tests want Prometheus's programs; its service would go on, on all addresses.
if [[ " ${missing[*]} " == *" prometheus "* && -d /run/systemd/system ]]; then
  "${as_root[@]}" systemctl disable --now prometheus
fi
