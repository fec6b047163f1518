#!/usr/bin/env bash
# Builds the release configuration into build/; binaries land in build/bin/. Arguments go to `cmake --build`, e.g.
# `tools/build.sh --target deltasync-agent`.
set -euo pipefail
cd "$(dirname "$0")/.."

cmake --preset release >build-configure.log 2>&1 || { cat build-configure.log >&2; rm -f build-configure.log; exit 1; }
rm -f build-configure.log
cmake --build --preset release "$@"
