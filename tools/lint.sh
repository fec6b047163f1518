#!/usr/bin/env bash
# Checks that need no build: formatting, the rules of the tree, shell scripts. `tools/lint.sh tidy` runs clang-tidy
# instead (needs a configured build-clang/); `tools/lint.sh fix` formats the sources in place.
set -euo pipefail
cd "$(dirname "$0")/.."

sources() { git ls-files -co --exclude-standard -- '*.cpp' '*.hpp' | while read -r f; do [[ -f $f ]] && echo "$f"; done; }

case ${1:-check} in
  fix)
    sources | xargs clang-format-14 -i
    ;;
  tidy)
    # Sources that the configured tree really compiles; headers are checked through them.
    python3 tools/lint/tidy_files.py build-clang/compile_commands.json |
      xargs -P "$(nproc)" -n 1 clang-tidy-14 -p build-clang --quiet --warnings-as-errors='*'
    ;;
  check)
    sources | xargs clang-format-14 --dry-run -Werror
    python3 tools/lint/check_tree.py
    git ls-files -co --exclude-standard -- '*.sh' '.ci/run' | xargs shellcheck
    ;;
  *)
    echo "usage: tools/lint.sh [check|tidy|fix]" >&2
    exit 2
    ;;
esac
