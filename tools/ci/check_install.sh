#!/usr/bin/env bash
# tools/ci/check_install.sh BUILD DIR: installs what BUILD (a Release build) has into DIR/prefix, and builds docs/examples/cpp
# as its users would: with the CMake package, with pkg-config, and with the source inside. Each set of programs passes
# three versions through the installed agent, and exports a model. Makes the Debian packages, and has systemd check the agent's unit.
set -euo pipefail
cd "$(dirname "$0")/../.."
source=$PWD
build=$1
mkdir -p "$2"
out=$(cd "$2" && pwd)
prefix=$out/prefix
rm -rf "$prefix" "$out/moved" "$out/debs" "$out"/by_*
# The compilers of the other builds by the same names, so that ccache knows what they compiled.
export CC=/usr/bin/cc CXX=/usr/bin/c++

cmake --install "$build" --prefix "$prefix" >"$out/install.log"
# A prefix can be moved: nothing in it names where it was made, where it was built, or where the CUDA toolkit was.
mv "$prefix" "$out/moved"
prefix=$out/moved
toolkit=$(sed -nE 's/^CUDA_cudart_static_LIBRARY:[^=]*=(.+)\/[^/]*$/\1/p' "$build/CMakeCache.txt")
if grep -rIlE "$source|$out/prefix${toolkit:+|$toolkit}" "$prefix/lib" "$prefix/include"; then
  echo "these files of the installation name the directory of its source, of its first place or of the CUDA toolkit" >&2
  exit 1
fi

version=$(sed -nE 's/^project\(deltasync VERSION ([0-9.]+).*/\1/p' CMakeLists.txt)
for program in deltasync deltasync-agent; do
  [[ $("$prefix/bin/$program" --version) == "$version" ]]
done
bash -uec '. "$1/share/bash-completion/completions/deltasync"; complete -p deltasync' - "$prefix"
for file in zsh/site-functions/_deltasync zsh/vendor-completions/_deltasync fish/vendor_completions.d/deltasync.fish; do
  grep -q publish "$prefix/share/$file"
done
sed "s|^ExecStart=|&$prefix/bin/|" "$prefix/lib/systemd/system/deltasync-agent@.service" >"$out/deltasync-agent@.service"
systemd-analyze verify "$out/deltasync-agent@.service"
(cd "$out" && cpack --config "$source/$build/CPackConfig.cmake" -B "$out/debs" >"$out/cpack.log")
for package in deltasync libdeltasync-dev; do
  dpkg-deb --contents "$out/debs/${package}_${version}_"*.deb >"$out/$package.files"
done
grep -q ' ./usr/share/bash-completion/completions/deltasync$' "$out/deltasync.files"

# run_control DIR HOST:PORT: the engine with control routes, as a client drives it.
run_control() {
  "$1/control" "$2" >"$1/control.said" &
  local control=$!
  for _ in {1..600}; do
    grep -q '^127' "$1/control.said" && break
    kill -0 "$control"
    sleep 0.1
  done
  python3 - "$(grep -m 1 '^127' "$1/control.said")" <<'CLIENT'
import sys, urllib.request
for path, body in (("/pause", b""), ("/update_weights", b'{"weight_dir": null}'), ("/resume", b"")):
    urllib.request.urlopen(urllib.request.Request(f"http://{sys.argv[1]}{path}", data=body, method="POST"), timeout=60)
CLIENT
  for _ in {1..600}; do
    grep -qx 'serves step_3' "$1/control.said" && break
    kill -0 "$control"
    sleep 0.1
  done
  kill "$control"
  wait "$control" || true
  grep -qx 'serves step_3' "$1/control.said"
}

# run HOW: the example's programs in DIR/by_HOW, one from the other, and what they must say.
run() {
  local programs=$out/by_$1 agent port
  "$prefix/bin/deltasync-agent" --name "install-$$" --shm-dir "$programs" --socket "$programs/agent.sock" \
    --listen 127.0.0.1:0 --http off --ready-file "$programs/ready" >"$programs/agent.log" 2>&1 &
  agent=$!
  trap 'kill $agent 2>/dev/null || true' EXIT
  for _ in {1..1200}; do
    [[ -s $programs/ready ]] && break
    kill -0 "$agent" || { cat "$programs/agent.log" && exit 1; }
    sleep 0.1
  done
  port=$(sed -nE 's/.*"port": *([0-9]+).*/\1/p' "$programs/ready")
  "$programs/train" "$programs/agent.sock"
  "$programs/serve" "127.0.0.1:$port" step_3 | tee "$programs/said"
  grep -qx 'embed.weight begins with 0.5 1.5 1.5 1.5' "$programs/said"
  grep -qx 'head.weight begins with 0.25 0.25 0.25 0.25' "$programs/said"
  "$programs/engine" "127.0.0.1:$port" step_3 | tee "$programs/said"
  grep -qx 'embed begins with 0.5 1.5, head_t with 0.25 0.25' "$programs/said"
  [[ ! -e $programs/control ]] || run_control "$programs" "127.0.0.1:$port"
  "$programs/export_hf" "$programs/hf" | tee "$programs/said"
  grep -qx 'model.layers.0.up_proj.weight: rows 128 to 255' "$programs/said"
  kill "$agent"
  wait "$agent" || true
  trap - EXIT
  echo "the example built by $1 works"
}

# As where there is no CUDA toolkit, which users of a library that was built with one do not need.
cmake -S docs/examples/cpp -B "$out/by_find_package" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON >/dev/null
cmake --build "$out/by_find_package"
run find_package

mkdir "$out/by_pkg_config"
PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name deltasync.pc)")
export PKG_CONFIG_PATH
read -ra flags <<<"$(pkg-config --cflags --libs deltasync)"
for program in train serve engine export_hf control; do
  c++ -std=c++20 -o "$out/by_pkg_config/$program" "docs/examples/cpp/$program.cpp" "${flags[@]}"
done
run pkg_config

# Each source by itself, and not optimized: what is asked is whether another project can build it.
cmake -S docs/examples/cpp -B "$out/by_add_subdirectory" -G Ninja -DDELTASYNC_SOURCE="$source" \
  -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O0 -DDELTASYNC_WERROR=ON >/dev/null
cmake --build "$out/by_add_subdirectory" -j "$(nproc)" >"$out/by_add_subdirectory.log" ||
  { cat "$out/by_add_subdirectory.log" && exit 1; }
run add_subdirectory
