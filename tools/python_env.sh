#!/usr/bin/env bash
# tools/python_env.sh DIR [REQUIREMENTS [PYTHON]]: a virtual environment with what the file REQUIREMENTS names; by default
# what the Python package is built and tested with, and python3. Does nothing if it is there already. torch is of one
# release: a CPU build where pip is given one (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL), else PyPI's, which is larger.
set -euo pipefail
dir=$1
wanted=${2:-$(cd "$(dirname "$0")/.." && pwd)/tests/python/requirements.txt}
if [[ -f $dir/requirements.txt ]] && cmp -s "$wanted" "$dir/requirements.txt"; then exit 0; fi
"${3:-python3}" -m venv --clear "$dir"
"$dir/bin/pip" install --quiet --disable-pip-version-check -r "$wanted"
cp "$wanted" "$dir/requirements.txt"
