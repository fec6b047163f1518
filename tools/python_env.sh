#!/usr/bin/env bash
# tools/python_env.sh DIR: a virtual environment with what the Python package is built and tested with. Does nothing if
# it is there already. torch is the CPU build of one release, so that nothing larger comes with a newer one.
set -euo pipefail
dir=$1
wanted=$(cd "$(dirname "$0")/.." && pwd)/tests/python/requirements.txt
if [[ -f $dir/requirements.txt ]] && cmp -s "$wanted" "$dir/requirements.txt"; then exit 0; fi
python3 -m venv "$dir"
"$dir/bin/pip" install --quiet --disable-pip-version-check -r "$wanted"
cp "$wanted" "$dir/requirements.txt"
