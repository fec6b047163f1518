#!/usr/bin/env bash
# tools/ci/check_arm64.sh DIR: builds for arm64 in DIR/build, with Debian's cross compiler and the libraries that it
# unpacks into DIR/root, and runs there under qemu-user: the tests of the formats, the delta kernels, the shared memory, the
# writer and whole updates; and one version from `publish` over an agent to `pull`. It says that the code is right there, and
# nothing of its speed; qemu orders memory as the host does, so neither what a weak order of memory might break.
# DELTASYNC_ARM64_TESTS, a pattern of ctest names, runs others.
set -euo pipefail
dir=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "$0")/../.."
root=$dir/root
libraries=(libc6-dev libstdc++-12-dev libboost1.81-dev libxxhash-dev libzstd-dev libspdlog-dev libfmt-dev libcli11-dev
  nlohmann-json3-dev libssl-dev libtomlplusplus-dev prometheus-cpp-dev libgtest-dev libgmock-dev)
tests=${DELTASYNC_ARM64_TESTS:-^test_(base|format|delta|placement|shm|writer|integration)_}
# Walks on one thread over simulated memory, the same on every processor, which qemu makes ten times as long.
left_out='^test_shm_model(_delayed)?$'

missing=()
for package in g++-aarch64-linux-gnu qemu-user; do
  dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null | grep -q '^installed' || missing+=("$package")
done
if ((${#missing[@]})); then
  ((EUID == 0)) || { echo "check_arm64: apt-get install ${missing[*]}" >&2; exit 1; }
  apt-get update -q
  DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
fi

# An apt of its own, which knows nothing of this machine's packages and changes none of them.
if [[ ! -f $root/unpacked || $(<"$root/unpacked") != "${libraries[*]}" ]]; then
  rm -rf "$root" "$dir/apt"
  mkdir -p "$root" "$dir"/apt/{state/lists/partial,cache/archives/partial}
  : >"$dir/apt/status"
  of_arm64=(-o APT::Architecture=arm64 -o APT::Architectures=arm64 -o "Dir::State=$dir/apt/state"
    -o "Dir::State::status=$dir/apt/status" -o "Dir::Cache=$dir/apt/cache" -o Debug::NoLocking=1 -o APT::Sandbox::User=root)
  apt-get "${of_arm64[@]}" update -q
  apt-get "${of_arm64[@]}" install -y -q --no-install-recommends --download-only "${libraries[@]}"
  for package in "$dir"/apt/cache/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
  # Links from the root are meant for the system's.
  find "$root" -type l -lname '/*' | while read -r link; do ln -sfn "$root$(readlink "$link")" "$link"; done
  rm -rf "$dir/apt"
  echo "${libraries[*]}" >"$root/unpacked"
fi

export DELTASYNC_ARM64_ROOT=$root
export PKG_CONFIG_LIBDIR=$root/usr/lib/aarch64-linux-gnu/pkgconfig:$root/usr/share/pkgconfig PKG_CONFIG_SYSROOT_DIR=$root
cmake -S . -B "$dir/build" -G Ninja -DCMAKE_TOOLCHAIN_FILE="$PWD/tools/cmake/aarch64-linux-gnu.cmake" \
  -DDELTASYNC_ARM64_ROOT="$root" -DCMAKE_BUILD_TYPE=Release -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=16 \
  -DDELTASYNC_BUILD_TESTS=ON
mapfile -t programs < <(ninja -C "$dir/build" -t targets all | sed -nE 's/^(test_[a-z0-9_]+): phony.*/\1/p' | grep -E "$tests" |
  grep -vE "$left_out" | sort -u)
cmake --build "$dir/build" -j "$(nproc)" --target "${programs[@]}" deltasync deltasync-agent

# What tests start by its path runs qemu: the kernel, without binfmt_misc, would run no program of arm64.
for program in "$dir"/build/bin/deltasync{,-agent}; do
  if [[ $(head -c 2 "$program") == '#!' ]]; then continue; fi
  mv "$program" "$program.arm64"
  # shellcheck disable=SC2016  # the shell that reads it expands it
  printf '#!/bin/sh\nexec qemu-aarch64 -L %q -0 "$0" %q "$@"\n' "$root" "$program.arm64" >"$program"
  chmod +x "$program"
done
# Left out: tests that start their own program again, by a name that only the kernel knows; what qemu ignores of madvise,
# which is huge pages and that a forked child has no mapping.
not_there='*DeathTest*:*HugePages*:Processes.ATrainerThatBecomes*:Processes.AForkedChild*:LocalPull.ADeadOrStopped*'
GTEST_FILTER="-$not_there" ctest --test-dir "$dir/build" --output-on-failure -j "$(nproc)" -R "$tests" -E "$left_out"

# Two versions, by programs that only qemu can run: a full update, and a delta.
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; wait; rm -rf "$work"' EXIT
python3 - "$work" <<'EOF'
import json, pathlib, random, sys
random.seed(1)
weights = bytearray(random.randbytes(1 << 20))
for step in range(2):
    home = pathlib.Path(sys.argv[1], f"step_{step}")
    home.mkdir()
    weights[step * 1000] ^= 1
    head = json.dumps({"w": {"dtype": "BF16", "shape": [512, 1024], "data_offsets": [0, len(weights)]}}).encode()
    (home / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + weights)
    (home / "config.json").write_text("{}")
EOF
in_work() { cd "$work" && exec "$dir/build/bin/$1" "${@:2}"; }  # of a subshell, which becomes the program
in_work deltasync-agent --socket ./agent.sock --shm-dir "$work" --ready-file ready.json &
for _ in {1..600}; do
  if [[ -s $work/ready.json ]]; then break; fi
  sleep 0.1
done
port=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["port"])' "$work/ready.json")
in_work deltasync pull --from "127.0.0.1:$port" --out model --follow --count 2 --json >"$work/pulled" &
receiver=$!
(in_work deltasync publish --agent ./agent.sock --model step_0 --model step_1 --interval-ms 5000)
wait "$receiver"
cat "$work/pulled"
cmp "$work"/{step_1,model/current}/model.safetensors
[[ $(grep -c '"mode":"full"' "$work/pulled") == 1 && $(grep -c '"mode":"delta"' "$work/pulled") == 1 ]]
