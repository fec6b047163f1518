#!/usr/bin/env bash
# tools/check_operating.sh BUILD: checks what docs/operating gives to operators, with the programs of BUILD: manifests by
# Kubernetes' schemas, every command line by running it, alert rules and the board by a real Prometheus, formulas of
# capacity by real processes, quoted messages by the sources. What is not installed is skipped and named.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=build/operating-venv
wanted=tests/operating/requirements.txt
if ! cmp -s "$wanted" "$venv/requirements.txt"; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$wanted"
  cp "$wanted" "$venv/requirements.txt"
fi
DELTASYNC_BIN=$PWD/$1/bin PYTHONDONTWRITEBYTECODE=1 \
  "$venv/bin/python" -m unittest discover --start-directory tests/operating --verbose
