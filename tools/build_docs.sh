#!/usr/bin/env bash
# tools/build_docs.sh [serve]: the pages of docs/ as a site in build/site/, in a virtual environment of its own. A link
# or an anchor that leads nowhere, or a page that no other names, is an error. `serve` shows it at
# http://127.0.0.1:8000/ and builds it again when a page changes.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=build/docs-venv
tools/python_env.sh "$venv" tools/docs/requirements.txt
export NO_MKDOCS_2_WARNING=1 # a notice about another project, at each run
case ${1:-build} in
  build) exec "$venv/bin/mkdocs" build --strict -f tools/docs/mkdocs.yml ;;
  serve) exec "$venv/bin/mkdocs" serve -f tools/docs/mkdocs.yml ;;
  *) echo "usage: tools/build_docs.sh [serve]" >&2; exit 2 ;;
esac
