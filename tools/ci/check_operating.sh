#!/usr/bin/env bash
# tools/ci/check_operating.sh BUILD: checks what docs/operating gives to operators, with the programs of BUILD: manifests by
# Kubernetes' schemas, every command line by running it, alert rules and the board by a real Prometheus, formulas of
# capacity by real processes, quoted messages by the sources. What is not installed is skipped and named.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=build/operating-venv
tools/python_env.sh "$venv" tests/operating/requirements.txt
DELTASYNC_BIN=$PWD/$1/bin PYTHONDONTWRITEBYTECODE=1 \
  "$venv/bin/python" -m unittest discover --start-directory tests/operating --verbose
