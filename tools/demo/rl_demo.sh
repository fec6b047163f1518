#!/usr/bin/env bash
# tools/demo/rl_demo.sh [options of rl_demo.py]: builds the Python package, installs what the demo needs beside it
# (transformers, matplotlib) into build/python-venv, and trains a small decoder for 50 steps with its rollouts in another
# process. What it found lies in build/rl-demo/ afterwards.
set -euo pipefail
cd "$(dirname "$0")/../.."
tools/install_deps.sh --build
tools/build_python.sh
bin=build/python-venv/bin
if ! "$bin/python" -c 'import matplotlib, transformers' 2>/dev/null; then
  # Nothing that is there already is replaced: torch least of all.
  "$bin/pip" install --quiet --disable-pip-version-check -c tests/python/requirements.txt \
    'transformers>=4.51' 'matplotlib>=3.8'
fi
PYTHONPATH=build/python exec "$bin/python" tools/demo/rl_demo.py --out build/rl-demo "$@"
