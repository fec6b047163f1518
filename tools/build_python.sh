#!/usr/bin/env bash
# tools/build_python.sh [JOBS]: the Python package in build/python, for use from the tree (PYTHONPATH=build/python), and
# the environment build/python-venv that it is built and tested with.
set -euo pipefail
cd "$(dirname "$0")/.."
tools/python_env.sh build/python-venv
cmake --preset release -DDELTASYNC_PYTHON=ON -DPython_EXECUTABLE="$PWD/build/python-venv/bin/python" >/dev/null
cmake --build --preset release -j "${1:-$(nproc)}" --target _native_stub deltasync deltasync-agent
