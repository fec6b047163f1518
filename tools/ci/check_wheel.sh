#!/usr/bin/env bash
# tools/ci/check_wheel.sh DIR: builds the wheel for python3 into DIR (tools/build_wheels.sh), and checks it: its tag and size,
# what it asks of a system, what the module shows to others in its process. Then uses it from an environment that has
# nothing else of deltasync: one version goes from process to process; TLS beside torch's and Python's own libraries.
set -euo pipefail
cd "$(dirname "$0")/../.."
source=$PWD
bytes_max=10000000
rm -rf "$1"
mkdir -p "$1"
out=$(cd "$1" && pwd)
release=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')

fail() {
  echo "check_wheel: $*" >&2
  exit 1
}

tools/build_wheels.sh "$out" "$release"
wheel=$(echo "$out"/deltasync-*.whl)
size=$(stat -c %s "$wheel")
build-wheel/auditwheel/bin/auditwheel show "$wheel"
[[ $wheel == *-manylinux_2_34_x86_64.whl ]] || fail "$wheel is not tagged manylinux_2_34_x86_64"
((size <= bytes_max)) || fail "$wheel has $size bytes, which is more than $bytes_max"

python3 -m venv "$out/venv"
"$out/venv/bin/pip" install --quiet --disable-pip-version-check "$wheel"
package=$("$out/venv/bin/python" -c 'import importlib.util; print(*importlib.util.find_spec("deltasync").submodule_search_locations)')
# Two copies of a library get in each other's way where one shows its symbols.
shown=$(nm -D --defined-only "$package"/_native*.so | awk '{print $NF}')
[[ $shown == PyInit__native ]] || fail "_native shows more than PyInit__native: $shown"
# Of the system: glibc, libstdc++, libgcc_s. (auditwheel has checked the versions of their symbols.)
for file in "$package"/_native*.so "$package"/bin/*; do
  needed=$(readelf -d "$file" | sed -nE 's/.*NEEDED.*\[(.*)\]/\1/p')
  foreign=$(grep -vE '^(libc|libm|libgcc_s|libstdc\+\+|ld-linux-x86-64|libprometheus-cpp-core-.*)\.so\.' <<<"$needed" || true)
  [[ -z $foreign ]] || fail "$file asks for $foreign"
done

cd "$out"
env -i HOME="$out" "$out/venv/bin/python" "$source/tests/wheel/one_version.py"

# torch is in the environment of the other tests; the wheel comes before the package of that.
"$source/tools/python_env.sh" "$source/build/python-venv"
"$source/build/python-venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --target "$out/site" "$wheel"
for order in before after; do
  PYTHONPATH=$out/site:$source/tests/support "$source/build/python-venv/bin/python" \
    "$source/tests/wheel/tls_beside_torch.py" "$order"
done
echo "$(basename "$wheel"): $size bytes"
