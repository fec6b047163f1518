#!/usr/bin/env bash
# tools/check_wheel.sh DIR: builds the wheel into DIR and uses it from an environment that has nothing else of deltasync:
# the package imports without torch, its programs run, and a version goes from a trainer to a receiver.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$1
tools/python_env.sh build/python-venv
rm -rf "$out"
mkdir -p "$out"
# The compilers of the other builds by the same names, so that ccache knows what they compiled.
CC=/usr/bin/cc CXX=/usr/bin/c++ build/python-venv/bin/pip wheel --quiet --disable-pip-version-check \
  --no-deps --no-build-isolation --config-settings=build-dir="$PWD/build-wheel" --wheel-dir "$out" .
python3 -m venv "$out/venv"
"$out/venv/bin/pip" install --quiet --disable-pip-version-check "$out"/deltasync-*.whl
cd "$out"
venv/bin/deltasync --version
venv/bin/deltasync-agent --help >/dev/null
venv/bin/python - <<'EOF'
import importlib.metadata
import importlib.resources
import sys

import numpy as np

import deltasync

weights = {"w": np.arange(12, dtype=np.float32).reshape(3, 4)}
with deltasync.WeightManager(weights, name=f"wheel-{deltasync.make_epoch():x}") as manager:
    manager.offload(weights)
    with deltasync.Receiver(manager.endpoint) as receiver:
        receiver.update()
        assert np.array_equal(dict(receiver.arrays())["w"], weights["w"])
assert "torch" not in sys.modules
package = importlib.resources.files("deltasync")
assert all(package.joinpath(name).is_file() for name in ("py.typed", "_native.pyi"))
plugins = {entry.group for entry in importlib.metadata.distribution("deltasync").entry_points}
assert plugins >= {"vllm.general_plugins", "sglang.srt.plugins"}, plugins
print("wheel: a version went through", deltasync.__version__)
EOF
