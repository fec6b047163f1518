#!/usr/bin/env bash
# On a machine with a CUDA device, which needs neither a network nor Debian's packages: builds, runs every test that needs
# a device (ctest -L gpu) and `deltasync bench gpu` at 1% and 5%, and writes the results to one JSON file, whatever of it
# was reached within the limit. Fails if there is no device, if a test or a bench fails or is not reached, or if a test is
# skipped. Aims that are missed are named, and fail nothing.
#
#   tools/gpu_check.sh [--debs DIR] [--out FILE] [--limit SECONDS] [--shm-dir DIR]
#   tools/gpu_check.sh --fetch DIR
#
# --fetch fills DIR (about 18 MB) with the .deb files of the libraries and of ninja, on a Debian 12 machine with a network;
# --debs unpacks those into build-gpu/prefix instead of using installed ones. g++ (12 or later), CMake 3.25, python3 and the
# CUDA toolkit have to be there. --limit is 570 by default. --shm-dir is where the bench's shared memory goes: by default
# /dev/shm, or another place if that is small.
set -euo pipefail
cd "$(dirname "$0")/.."

# Nothing of the system's own: these run beside whatever libc is there. So no compiler, no CMake, no Python.
packages=(
  libboost1.81-dev libxxhash-dev libxxhash0 libzstd-dev libzstd1 libspdlog-dev libspdlog1.10 libfmt-dev libfmt9
  libcli11-dev libtomlplusplus-dev nlohmann-json3-dev libssl-dev libssl3 libgtest-dev libgmock-dev googletest
  pkgconf pkgconf-bin libpkgconf3 ninja-build
)

usage() {
  sed -n '2,15s/^# \{0,1\}//p' "$0"
  exit "$1"
}

debs=
out=build-gpu/gpu_check.json
fetch=
limit=570
shm=
while (($#)); do
  case $1 in
    --debs) debs=$(realpath "${2:?}"); shift ;;
    --out) out=${2:?}; shift ;;
    --fetch) fetch=${2:?}; shift ;;
    --limit) limit=${2:?}; shift ;;
    --shm-dir) shm=${2:?}; shift ;;
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

# ---- what was reached, a line each, from which gpu_results.py makes the JSON ----
results=build-gpu/check
rm -rf "$results"
mkdir -p "$results" "$(dirname "$out")"
SECONDS=0
left() { echo $((limit - SECONDS)); }

# record FIELD...: tabs between them.
record() {
  local IFS=$'\t' line
  line=$*
  echo "${line//$'\n'/ }" >>"$results/state.tsv"
}

began=0
begin() {
  began=$SECONDS
  echo "gpu_check: $1"
}

# stage NAME STATUS [REASON]: what became of it since begin.
stage() { record stage "$1" "$2" $((SECONDS - began)) "${3-}"; }

# stop STAGE REASON: no more is reached.
stop() {
  stage "$1" failed "$2"
  echo "gpu_check: $2" >&2
  exit 1
}

# The first error in a compiler's output, else the last line.
error_in() { grep -m 1 -E '[Ee]rror:' "$1" || tail -n 1 "$1"; }

mounted=
finish() {
  local status=$?
  trap - EXIT
  if [[ -n $mounted ]]; then umount -l "$mounted" || true; fi
  record total "$limit" "$SECONDS"
  if ! command -v python3 >/dev/null; then
    echo '{"verdict": "failed", "reasons": ["there is no python3"]}' >"$out"
  elif ! python3 tools/ci/gpu_results.py --results "$results" --out "$out"; then
    status=$((status ? status : 1))
  fi
  exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# ---- what has to be there ----
prefix=$PWD/build-gpu/prefix
cmake_arguments=()

# Debian's pkg-config and CMake files name /usr, or find their place from where they are.
unpack() {
  command -v dpkg >/dev/null || stop tools "there is no dpkg, which unpacks .deb files"
  rm -rf "$prefix"
  mkdir -p "$prefix"
  local deb found=
  for deb in "$debs"/*.deb; do
    [[ -e $deb ]] || break
    found=1
    dpkg -x "$deb" "$prefix"
  done
  [[ -n $found ]] || stop tools "no .deb files in $debs"
  find "$prefix" -name '*.pc' -exec sed -i "s|^prefix=/usr|prefix=$prefix/usr|; s|=/usr/|=$prefix/usr/|" {} +
  # Only what is built here may load these libraries: with LD_LIBRARY_PATH the machine's own cmake, of another release,
  # would be given them, too.
  local libraries=$prefix/usr/lib/x86_64-linux-gnu pkgconf=$prefix/bin/pkgconf
  mkdir -p "$prefix/bin"
  printf '#!/bin/sh\nLD_LIBRARY_PATH=%q exec %q "$@"\n' "$libraries" "$prefix/usr/bin/pkgconf" >"$pkgconf"
  chmod +x "$pkgconf"
  export PATH=$prefix/usr/bin:$PATH
  export PKG_CONFIG_LIBDIR=$libraries/pkgconfig:$prefix/usr/share/pkgconfig
  export CPLUS_INCLUDE_PATH=$prefix/usr/include:$prefix/usr/include/x86_64-linux-gnu
  export CMAKE_PREFIX_PATH=$prefix/usr
  cmake_arguments+=(
    -DOPENSSL_ROOT_DIR="$prefix/usr" -DBOOST_ROOT="$prefix/usr" -DPKG_CONFIG_EXECUTABLE="$pkgconf"
    -DCMAKE_BUILD_RPATH="$libraries" "-DCMAKE_EXE_LINKER_FLAGS=-Wl,--disable-new-dtags"  # for the libraries' libraries, too
  )
}

# at_least WANTED FOUND: versions.
at_least() { [[ $(printf '%s\n' "$1" "$2" | sort -V | head -n 1) == "$1" ]]; }

check_tools() {
  local version
  command -v python3 >/dev/null || stop tools "there is no python3"
  command -v cmake >/dev/null || stop tools "there is no cmake; 3.25 or later is needed"
  version=$(cmake --version | sed -nE '1s/.* ([0-9.]+).*/\1/p')
  at_least 3.25 "$version" || stop tools "cmake is $version; 3.25 or later is needed"
  command -v g++ >/dev/null || stop tools "there is no g++; 12 or later is needed"
  version=$(g++ -dumpfullversion)
  at_least 12 "$version" || stop tools "g++ is $version; 12 or later is needed"
  if command -v ninja >/dev/null; then
    cmake_arguments+=(-G Ninja)
  elif ! command -v make >/dev/null; then
    stop tools "there is neither ninja nor make"
  fi
  if [[ -x /usr/local/cuda/bin/nvcc ]]; then export PATH=$PATH:/usr/local/cuda/bin; fi
  command -v nvcc >/dev/null || stop tools "there is no nvcc on the PATH or in /usr/local/cuda"
}

# Before minutes of building: that nvcc takes this g++, and that a kernel which it makes runs. device_arch is 90 for 9.0,
# device_mib the free memory.
check_device() {
  begin "device"
  cat >"$results/probe.cu" <<'CUDA'
#include <cstdio>
__global__ void write(int* at) { *at = 42; }
int main() {
  int count = 0;
  int* on_device = nullptr;
  int value = 0;
  std::size_t available = 0;
  std::size_t all = 0;
  cudaDeviceProp device{};
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count == 0) error = cudaErrorNoDevice;
  if (error == cudaSuccess) error = cudaGetDeviceProperties(&device, 0);
  if (error == cudaSuccess) error = cudaMalloc(&on_device, sizeof(int));
  if (error == cudaSuccess) {
    write<<<1, 1>>>(on_device);
    error = cudaGetLastError();
  }
  if (error == cudaSuccess) error = cudaMemcpy(&value, on_device, sizeof(int), cudaMemcpyDeviceToHost);
  if (error == cudaSuccess) error = cudaMemGetInfo(&available, &all);
  if (error != cudaSuccess) return std::printf("%s\n", cudaGetErrorString(error)), 1;
  if (value != 42) return std::printf("a kernel did nothing\n"), 1;
  std::printf("%d%d %zu %s\n", device.major, device.minor, available >> 20, device.name);
}
CUDA
  local found
  timeout 120 nvcc -o "$results/probe" "$results/probe.cu" >"$results/probe.log" 2>&1 ||
    stop device "nvcc cannot compile with this g++: $(error_in "$results/probe.log")"
  found=$(timeout 60 "$results/probe" 2>&1) || stop device "no device: ${found:-the probe ended without a word}"
  read -r device_arch device_mib found <<<"$found"
  record device "$found" "$device_mib"
  echo "gpu_check: $found, $device_mib MiB free"
}

# ---- the build, until three fifths of the limit ----
build() {
  local status=0 log=$results/configure.log time
  begin "build"
  timeout 120 cmake -S . -B build-gpu -DCMAKE_BUILD_TYPE=Release -DDELTASYNC_BUILD_TESTS=ON -DDELTASYNC_CUDA=ON \
    -DDELTASYNC_WERROR=OFF -DCMAKE_CUDA_ARCHITECTURES="$device_arch" "${cmake_arguments[@]}" >"$log" 2>&1 || status=$?
  if ((status)); then
    cat "$log" >&2
    stop build "cmake: $(grep -m 1 -A 3 'CMake Error' "$log" | tr -s '\n ' ' ')"
  fi
  if ! grep -q 'devices are supported' "$log"; then
    grep -i cuda "$log" >&2 || true
    stop build "cmake found no CUDA that it can use: $(grep -m 1 'CUDA' "$log" || echo 'it says nothing of CUDA')"
  fi
  time=$((limit * 3 / 5 - SECONDS))
  timeout -k 10 $((time > 1 ? time : 1)) cmake --build build-gpu -j "$(nproc)" \
    --target gpu_tests deltasync deltasync-bench deltasync-agent 2>&1 | tee "$results/build.log" || status=$?
  if ((status == 124 || status == 137)); then stop build "the build did not end within $((SECONDS - began)) s"; fi
  if ((status)); then stop build "the build failed: $(error_in "$results/build.log")"; fi
  stage build ok
}

# ---- the tests, of which each is bounded, until a quarter of the limit is left ----
run_tests() {
  local name time status=ok
  begin "tests"
  mkdir -p "$results/tests"
  for name in $(ctest --test-dir build-gpu -L gpu -N | sed -nE 's/^ *Test +#[0-9]+: //p'); do
    time=$(($(left) - limit / 4))
    if ((time < 5)); then
      record test "$name"
      status="timed out"
      continue
    fi
    timeout -k 10 $((time + 15)) ctest --test-dir build-gpu -R "^$name\$" --timeout "$((time < 180 ? time : 180))" \
      --no-tests=error --output-on-failure --test-output-size-passed 1000000 \
      --output-junit "$PWD/$results/tests/$name.xml" || true
    [[ -e $results/tests/$name.xml ]] || record test "$name"
  done
  stage tests "$status"
}

# ---- the bench ----
mib_free_in() { df --output=avail -BM "$1" 2>/dev/null | tail -n 1 | tr -dc 0-9 || true; }

is_memory() { [[ $(stat -f -c %T "$1") == tmpfs ]]; }

# Where shared memory for two halves of 16 GiB is: containers have 64 MiB in /dev/shm by default, and others half of what
# was memory when they started. So a tmpfs of our own first, if that may be mounted; then other memory, then a disk; if there
# is not enough for the first bench anywhere, where the most is.
choose_shm() {
  local place free most=0
  if [[ -z $shm ]]; then
    mkdir -p build-gpu/shm
    umount -l build-gpu/shm 2>/dev/null || true  # of a run that was killed
    free=$(mib_free_in /dev/shm)
    if ((${free:-0} < 34 * 1024)) && mount -t tmpfs -o size=80% deltasync build-gpu/shm 2>/dev/null
    then
      mounted=$PWD/build-gpu/shm
      shm=$mounted
    fi
  fi
  if [[ -z $shm ]]; then
    for place in /dev/shm /tmp /run "$PWD/build-gpu/shm"; do
      if [[ $place =~ ^/(tmp|run)$ ]] && ! is_memory "$place"; then continue; fi
      free=$(mib_free_in "$place")
      if [[ ! -w $place ]] || ((${free:-0} <= most)); then continue; fi
      shm=$place
      most=$free
      if ((most >= 2200)); then break; fi
    done
  fi
  [[ $shm == /dev/shm ]] || echo "gpu_check: /dev/shm has $(mib_free_in /dev/shm) MiB: shared memory goes to $shm"
  mkdir -p "$shm"
  shm_mib=$(mib_free_in "$shm")
}

# bench MIB DENSITY
bench() {
  local name=bench_$1_$2 start=$SECONDS status=0 word=ok gib time
  time=$(left)
  gib=$(awk -v mib="$1" 'BEGIN {print mib / 1024}')
  if ((time < 10)); then
    record bench "$1" "$2" "not reached" 0 ""
    return
  fi
  echo "gpu_check: bench gpu, $gib GiB, density $2, in $shm"
  timeout -k 5 "$time" build-gpu/bin/deltasync bench gpu --model-gib "$gib" --density "$2" --threads "$(nproc)" \
    --shm-dir "$shm" --json >"$results/$name.json" 2>"$results/$name.log" || status=$?
  if ((status == 124 || (status == 137 && $(left) < 10))); then
    word="timed out"
  elif ((status)); then
    word=failed
  fi
  cat "$results/$name.json" "$results/$name.log"
  record bench "$1" "$2" "$word" $((SECONDS - start)) "$(tail -n 1 "$results/$name.log")"
}

# fits MIB: an fp32 master, two versions and more on the host; two halves; two versions and more on the device.
fits() {
  local host allowed used
  host=$(awk '/^MemAvailable/ {print int($2 / 1024)}' /proc/meminfo)
  # A container's limit; its shared memory counts against it.
  allowed=$(cat /sys/fs/cgroup/memory.max 2>/dev/null || echo max)
  used=$(cat /sys/fs/cgroup/memory.current 2>/dev/null || echo 0)
  if [[ $allowed =~ ^[0-9]+$ ]] && (((allowed - used) / 1048576 < host)); then host=$(((allowed - used) / 1048576)); fi
  ((host > 6 * $1 && shm_mib > 2 * $1 + 64 && device_mib > 3 * $1))
}

# A small model first, which says how long a large one takes: then the largest for which there is room and time.
run_benches() {
  local start first=1024 mib taken
  choose_shm
  while ((first > 16)) && ! fits "$first"; do first=$((first / 2)); done
  echo "gpu_check: memory in MiB: $(free -m | awk '/^Mem/ {print $2 " in all, " $7 " available"}'), $shm_mib in $shm"
  start=$SECONDS
  bench "$first" 0.01
  taken=$((SECONDS - start + 1))
  for mib in 16384 8192 4096 2048 $first; do
    # What a disk takes at first says nothing of how fast it is.
    if ((mib > first)) && ! is_memory "$shm"; then continue; fi
    if fits "$mib" && (($(left) > 2 * taken * mib / first)); then break; fi
  done
  ((mib == first)) || bench "$mib" 0.01
  bench "$mib" 0.05
}

if [[ -n $debs ]]; then unpack; fi
check_tools
check_device
build
run_tests
run_benches
