#!/usr/bin/env bash
# On a machine with a CUDA device, which needs neither a network nor Debian's packages: builds, runs every test that needs
# a device (ctest -L gpu, tests/python/**/test_*cuda.py) and `deltasync bench gpu` at 1% and 5%, and writes the results to one
# JSON file, whatever of it was reached within the limit. Fails if there is no device, if a test or a bench fails or is not
# reached, or if a test is skipped. Aims that are missed are named, and fail nothing.
#
#   tools/gpu_check.sh [--packed FILE | --debs DIR] [--out FILE] [--limit SECONDS] [--shm-dir DIR]
#   tools/gpu_check.sh --pack FILE [--arch 90] [--python PYTHON]
#   tools/gpu_check.sh --fetch DIR
#
# --pack builds on a machine without a device, for one of this architecture, and puts all that is run into FILE (about
# 15 MB), for --packed there: no time of the device's is spent on compiling. With a PYTHON of 3.12 or later that has nanobind
# the Python package is in it, too, for the tests by a python3 there that has torch and pytest.
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
  sed -n '2,19s/^# \{0,1\}//p' "$0"
  exit "$1"
}

debs=
out=build-gpu/gpu_check.json
fetch=
limit=570
shm=
pack=
packed=
device_arch=90
python=
while (($#)); do
  case $1 in
    --debs) debs=$(realpath "${2:?}"); shift ;;
    --out) out=${2:?}; shift ;;
    --fetch) fetch=${2:?}; shift ;;
    --limit) limit=${2:?}; shift ;;
    --shm-dir) shm=${2:?}; shift ;;
    --pack) pack=$(realpath "${2:?}"); shift ;;
    --packed) packed=$(realpath "${2:?}"); shift ;;
    --arch) device_arch=${2:?}; shift ;;
    --python) python=$(realpath -s "$(command -v "${2:?}")"); shift ;;
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

# ---- the build, with a device or without ----
configuration=(
  -S . -B build-gpu -DCMAKE_BUILD_TYPE=Release -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=16
  -DDELTASYNC_BUILD_TESTS=ON -DDELTASYNC_CUDA=ON -DDELTASYNC_WERROR=OFF
)
targets=(gpu_tests deltasync deltasync-bench deltasync-agent)

# A program that says "90 81000 NAME" of a device of compute capability 9.0, or what is wrong with it.
write_probe() {
  cat >"$1" <<'CUDA'
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
}

# The libraries that the programs name go along, but for those of the C library and of the driver.
make_pack() {
  local extra=() name found
  if command -v ninja >/dev/null; then extra+=(-G Ninja); fi
  if [[ -n $python ]]; then
    extra+=(-DDELTASYNC_PYTHON=ON -DPython_EXECUTABLE="$python" -DSKBUILD_SABI_COMPONENT=Development.SABIModule)
    targets+=(_native)
  fi
  cmake "${configuration[@]}" -DCMAKE_CUDA_ARCHITECTURES="$device_arch" "${extra[@]}" "-DCMAKE_BUILD_RPATH=\$ORIGIN/../lib;\$ORIGIN/../../lib" \
    -DCMAKE_EXE_LINKER_FLAGS=-Wl,--disable-new-dtags >/dev/null
  cmake --build build-gpu -j "$(nproc)" --target "${targets[@]}"
  rm -rf build-gpu/packed
  mkdir -p build-gpu/packed/{lib,bin,tests,python}
  (cd build-gpu && find . -name CTestTestfile.cmake -not -path './packed/*' -exec cp --parents {} packed/ \;)
  pwd >build-gpu/packed/built_in
  write_probe build-gpu/packed/probe.cu
  nvcc -gencode "arch=compute_$device_arch,code=sm_$device_arch" -o build-gpu/packed/probe build-gpu/packed/probe.cu
  cp build-gpu/bin/deltasync{,-agent,-bench} build-gpu/packed/bin/
  for name in $(ctest --test-dir build-gpu -L gpu -N | sed -nE 's/^ *Test +#[0-9]+: //p'); do
    cp "build-gpu/tests/$name" build-gpu/packed/tests/
  done
  if [[ -n $python ]]; then
    cp -rL build-gpu/python/deltasync build-gpu/packed/python/
    rm -rf build-gpu/packed/python/deltasync/bin
    ln -s ../../bin build-gpu/packed/python/deltasync/bin
  fi
  find build-gpu/packed -type f -perm /111 -exec strip {} +
  find build-gpu/packed \( -path '*/bin/*' -o -path '*/tests/*' -o -name '*.so' \) -type f -perm /111 -exec ldd {} + |
    sed -nE 's/.* => (\/[^ ]*lib(xxhash|zstd|ssl|crypto|prometheus[^ ]*)\.so[^ ]*) .*/\1/p' | sort -u |
    while read -r found; do cp -L "$found" build-gpu/packed/lib/; done
  tar -C build-gpu/packed -czf "$pack" .
  echo "gpu_check: $pack, $(($(stat -c %s "$pack") >> 20)) MiB"
}

if [[ -n $pack ]]; then
  make_pack
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

unpack_packed() {
  local from
  tar -C build-gpu -xzf "$packed" || stop tools "$packed is no archive of --pack"
  from=$(cat build-gpu/built_in)
  find build-gpu -name CTestTestfile.cmake -exec sed -i "s|$from/|$PWD/|g" {} +
}

# at_least WANTED FOUND: versions.
at_least() { [[ $(printf '%s\n' "$1" "$2" | sort -V | head -n 1) == "$1" ]]; }

check_tools() {
  local version
  command -v python3 >/dev/null || stop tools "there is no python3"
  if [[ -n $packed ]]; then
    command -v ctest >/dev/null || stop tools "there is no ctest"
    return
  fi
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
  local found
  begin "device"
  if [[ -n $packed ]]; then
    cp build-gpu/probe "$results/probe"
  else
    write_probe "$results/probe.cu"
    timeout 120 nvcc -o "$results/probe" "$results/probe.cu" >"$results/probe.log" 2>&1 ||
      stop device "nvcc cannot compile with this g++: $(error_in "$results/probe.log")"
  fi
  found=$(timeout 60 "$results/probe" 2>&1) || stop device "no device: ${found:-the probe ended without a word}"
  read -r device_arch device_mib found <<<"$found"
  record device "$found" "$device_mib"
  echo "gpu_check: $found, $device_mib MiB free"
}

# ---- the build, until three fifths of the limit ----
build() {
  local status=0 log=$results/configure.log time
  begin "build"
  timeout 120 cmake "${configuration[@]}" -DCMAKE_CUDA_ARCHITECTURES="$device_arch" "${cmake_arguments[@]}" \
    >"$log" 2>&1 || status=$?
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
    --target "${targets[@]}" 2>&1 | tee "$results/build.log" || status=$?
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

# By this machine's own Python, if it has what they need.
run_python_tests() {
  local status=0 log=$results/python.log time
  begin "python"
  if [[ ! -e build-gpu/python/deltasync ]]; then
    stage python "not built" "--pack has no --python"
    return
  fi
  if ! python3 -c 'import torch, pytest' 2>"$log"; then
    stage python "not reached" "python3: $(tail -n 1 "$log")"
    return
  fi
  time=$(($(left) - limit / 5))
  local files=(tests/python/test_cuda.py)
  if python3 -c 'import megatron.core, transformers' 2>/dev/null; then
    files+=(tests/python/trainers/test_megatron_cuda.py)
  fi
  PYTHONPATH=build-gpu/python:${PYTHONPATH-} timeout -k 10 $((time > 5 ? time : 5)) python3 -m pytest "${files[@]}" -q \
    -p no:cacheprovider --junitxml "$results/tests/python.xml" 2>&1 | tee "$log" || status=$?
  case $status in
    0) stage python ok ;;
    124 | 137) stage python "timed out" "$(tail -n 1 "$log")" ;;
    *) stage python failed "$(tail -n 1 "$log")" ;;
  esac
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

if [[ -n $packed ]]; then
  unpack_packed
elif [[ -n $debs ]]; then
  unpack
fi
check_tools
check_device
if [[ -n $packed ]]; then stage build ok; else build; fi
run_tests
run_python_tests
run_benches
