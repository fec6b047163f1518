#!/usr/bin/env bash
# Checks that need no build: formatting, the rules of the tree, its words, shell scripts, Python (ruff).
# `tools/lint.sh tidy` runs clang-tidy over what ships instead, `tools/lint.sh tidy tests` over the tests (both need a
# configured build-asan/); `tools/lint.sh fix` formats the sources in place.
set -euo pipefail
cd "$(dirname "$0")/.."

sources() { git ls-files -co --exclude-standard -- '*.cpp' '*.hpp' | while read -r f; do [[ -f $f ]] && echo "$f"; done; }

case ${1:-check} in
  fix)
    sources | xargs clang-format-14 -i
    ;;
  tidy)
    # Sources that the configured tree really compiles; headers are checked through them. Tests want theirs precompiled.
    [[ ${2:-} != tests ]] || cmake --build build-asan --target deltasync_test_headers deltasync_test_headers-O0
    python3 tools/lint/tidy_files.py build-asan/compile_commands.json "${2:-product}" |
      xargs -P "$(nproc)" -n 1 clang-tidy-14 -p build-asan --quiet --warnings-as-errors='*'
    ;;
  check)
    sources | xargs clang-format-14 --dry-run -Werror
    python3 tools/lint/check_tree.py
    python3 tools/lint/check_words.py
    python3 tools/lint/check_reach.py
    git ls-files -co --exclude-standard -- '*.sh' '.ci/run' | xargs shellcheck
    tools/python_env.sh build/lint-venv tools/lint/requirements.txt
    build/lint-venv/bin/ruff check --quiet src/python tests/python tests/chaos tests/lab tests/operating tests/wheel \
      tools/lab tools/lab.py
    ;;
  *)
    echo "usage: tools/lint.sh [check|tidy [tests]|fix]" >&2
    exit 2
    ;;
esac
