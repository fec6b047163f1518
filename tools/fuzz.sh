#!/usr/bin/env bash
# tools/fuzz.sh [--seconds N] [--build DIR] [--found DIR] [NAME...]: runs every fuzzer of a build (preset asan), or those
# named, for N seconds each (60), one on each core, from its committed corpus and from what DIR holds of earlier runs. New
# inputs go to DIR/NAME, those that fail to DIR/NAME-*. Prints a line for each: executions, CPU seconds, inputs.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=60
build="build-asan"
found=
names=()
while (($#)); do
  case $1 in
    --seconds) seconds=$2 && shift 2 ;;
    --build) build=$2 && shift 2 ;;
    --found) found=$2 && shift 2 ;;
    -*) sed -n '2,/^[^#]/s/^# //p' "$0" >&2 && exit 2 ;;
    *) names+=("$1") && shift ;;
  esac
done
found=${found:-$build/fuzz-found}
if ((${#names[@]} == 0)); then
  for fuzzer in "$build"/tests/fuzz/fuzz_*; do names+=("${fuzzer##*/fuzz_}"); done
fi

# fuzz NAME: one fuzzer, and its line.
fuzz() {
  local name=$1 log status=0 cpu
  log=$(mktemp)
  mkdir -p "$found/$name"
  TIMEFORMAT='%U %S'
  cpu=$({ time "$build/tests/fuzz/fuzz_$name" -max_total_time="$seconds" -verbosity=0 -print_final_stats=1 \
    -artifact_prefix="$found/$name-" "$found/$name" "tests/fuzz/corpus/$name" >"$log" 2>&1; } 2>&1) || status=$?
  if ((status)); then
    cat "$log"
    echo "fuzz_$name: ended with $status; the input that failed is $found/$name-*" >&2
  else
    cpu=$(awk '{print $1 + $2}' <<<"$cpu")
    printf '%-14s %12s executions %8s CPU seconds %6s inputs\n' "$name" \
      "$(sed -nE 's/^stat::number_of_executed_units: *//p' "$log")" "$cpu" "$(find "$found/$name" -type f | wc -l)"
  fi
  rm -f "$log"
  return "$status"
}
export -f fuzz
export build found seconds
printf '%s\n' "${names[@]}" | xargs -P "$(nproc)" -I{} bash -c 'set -euo pipefail; fuzz {}'
