#!/usr/bin/env bash
# tools/chaos.sh [--minutes N] [--kills N] [--seed S] [--report FILE] [--keep]: trainer, agent, relay and receivers of every kind as
# real processes, killed, stopped, damaged, flooded and starved at random, while an independent checker compares every
# version that anybody commits (tests/chaos/). Fails if any was torn, lost, went back, or stayed old in silence.
set -euo pipefail
cd "$(dirname "$0")/.."
cmake --preset release >/dev/null
cmake --build --preset release -j "$(nproc)" --target deltasync deltasync-agent chaos_trainer chaos_reader deltasync_clock_shim
exec python3 tests/chaos/chaos.py "$@"
