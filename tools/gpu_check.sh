#!/usr/bin/env bash
# On a machine with a CUDA device, which needs neither a network nor Debian's packages: builds, runs every test that needs
# a device (ctest -L gpu) and `deltasync bench gpu` at 1% and 5%, and writes the results to one JSON file. Fails if there is
# no device, if a test or the bench fails, or if a test is skipped.
#
#   tools/gpu_check.sh [--debs DIR] [--out FILE]
#   tools/gpu_check.sh --fetch DIR
#
# --fetch fills DIR (about 18 MB) with the .deb files of the libraries, on a Debian 12 machine with a network; --debs
# unpacks those into build-gpu/prefix instead of using installed ones. g++ (12 or later), CMake 3.25, ninja (or make),
# python3 and the CUDA toolkit have to be there.
set -euo pipefail
cd "$(dirname "$0")/.."

# Libraries only, and never the system's own: these run beside whatever libc is there.
packages=(
  libboost1.81-dev libxxhash-dev libxxhash0 libzstd-dev libzstd1 libspdlog-dev libspdlog1.10 libfmt-dev libfmt9
  libcli11-dev nlohmann-json3-dev libssl-dev libssl3 libgtest-dev libgmock-dev googletest libnuma1
  pkgconf pkgconf-bin libpkgconf3
)

usage() {
  sed -n '2,12s/^# \{0,1\}//p' "$0"
  exit "$1"
}

debs=
out=build-gpu/gpu_check.json
fetch=
while (($#)); do
  case $1 in
    --debs) debs=$(realpath "${2:?}"); shift ;;
    --out) out=${2:?}; shift ;;
    --fetch) fetch=${2:?}; shift ;;
    --help) usage 0 ;;
    *) usage 2 ;;
  esac
  shift
done

if [[ -n $fetch ]]; then
  mkdir -p "$fetch"
  (cd "$fetch" && apt-get download -q "${packages[@]}")
  exit 0
fi

prefix=$PWD/build-gpu/prefix
mkdir -p build-gpu "$(dirname "$out")"
cmake_arguments=()

# Debian's pkg-config and CMake files name /usr, or find their place from where they are.
unpack() {
  rm -rf "$prefix"
  mkdir -p "$prefix"
  local deb found=
  for deb in "$debs"/*.deb; do
    [[ -e $deb ]] || break
    found=1
    dpkg -x "$deb" "$prefix"
  done
  [[ -n $found ]] || { echo "gpu_check: no .deb files in $debs" >&2; exit 1; }
  find "$prefix" -name '*.pc' -exec sed -i "s|^prefix=/usr|prefix=$prefix/usr|; s|=/usr/|=$prefix/usr/|" {} +
  local libraries=$prefix/usr/lib/x86_64-linux-gnu
  export PATH=$prefix/usr/bin:$PATH
  export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  export PKG_CONFIG_LIBDIR=$libraries/pkgconfig:$prefix/usr/share/pkgconfig
  export CPLUS_INCLUDE_PATH=$prefix/usr/include:$prefix/usr/include/x86_64-linux-gnu
  export CMAKE_PREFIX_PATH=$prefix/usr
  cmake_arguments+=(-DOPENSSL_ROOT_DIR="$prefix/usr" -DBOOST_ROOT="$prefix/usr" -DPKG_CONFIG_EXECUTABLE="$prefix/usr/bin/pkgconf")
}

if [[ -n $debs ]]; then unpack; fi
if command -v ninja >/dev/null; then cmake_arguments+=(-G Ninja); fi
if [[ -x /usr/local/cuda/bin/nvcc ]]; then export PATH=$PATH:/usr/local/cuda/bin; fi
command -v nvcc >/dev/null || { echo "gpu_check: no nvcc on the PATH or in /usr/local/cuda" >&2; exit 1; }

began=$SECONDS
echo "gpu_check: build"
cmake -S . -B build-gpu -DCMAKE_BUILD_TYPE=Release -DDELTASYNC_BUILD_TESTS=ON -DDELTASYNC_CUDA=ON \
  "${cmake_arguments[@]}" >build-gpu/configure.log 2>&1 || { cat build-gpu/configure.log >&2; exit 1; }
grep -h 'CUDA' build-gpu/configure.log || true
cmake --build build-gpu -j "$(nproc)" --target gpu_tests deltasync
build_s=$((SECONDS - began))

echo "gpu_check: tests"
began=$SECONDS
tests=0
ctest --test-dir build-gpu -L gpu --timeout 180 --no-tests=error --output-on-failure --test-output-size-passed 1000000 \
  --output-junit "$PWD/build-gpu/gpu_tests.xml" || tests=$?
tests_s=$((SECONDS - began))

# The model twice in shared memory, its fp32 master, and a copy: of what is there.
available=$(awk '/^MemAvailable/ {print int($2 / 1048576)}' /proc/meminfo)
shared=$(df --output=avail -BG /dev/shm | tail -n 1 | tr -dc 0-9)
gib=1
for candidate in 16 8 4 2; do
  if ((available > 6 * candidate && shared > 2 * candidate)); then gib=$candidate; break; fi
done
bench=0
rm -f build-gpu/gpu_bench_*.json
for density in 0.01 0.05; do
  echo "gpu_check: bench gpu, $gib GiB, density $density"
  timeout 120 build-gpu/bin/deltasync bench gpu --model-gib "$gib" --density "$density" --threads "$(nproc)" --json \
    >"build-gpu/gpu_bench_$density.json" || bench=$?
  cat "build-gpu/gpu_bench_$density.json"
done

python3 tools/gpu_results.py --junit build-gpu/gpu_tests.xml --bench build-gpu/gpu_bench_*.json --ctest-status "$tests" \
  --bench-status "$bench" --build-s "$build_s" --tests-s "$tests_s" --out "$out"
