#!/usr/bin/env bash
# Everything that must hold, from a fresh clone on. Stops at the first stage that fails; the last line says
# `N passed, N failed` over all stages (a ctest entry is one, a build or a lint check is one).
#
#   tools/test.sh                 all stages
#   tools/test.sh release lint    only these
#   tools/test.sh --share release asan [STAGE...]
#                                 release and asan share the C++ tests: each runs those that can show something there
#                                 (tools/cmake/DeltasyncTargets.cmake), and names those that it leaves to the other
#
# Stages: release  g++ release build, every test
#         lint     formatting, tree rules, shell scripts, ruff (tools/lint.sh)
#         asan     clang 14 with its warnings as errors, AddressSanitizer + UndefinedBehaviorSanitizer: every test, then
#                  every libFuzzer target for a few seconds
#         tsan     ThreadSanitizer, the tests of code that runs on several threads, and of the delta kernels
#         python   the Python package: mypy, and its tests
#         install  the library as installed, and inside another project: docs/examples/cpp built with each, and run
#         operating  what docs/operating gives to operators: manifests, alerts, board, pages (tools/ci/check_operating.sh)
#         docs     the pages of docs/ as a site, without links that lead nowhere; what they show is run; their words
#         container  the image of docs/operating/Containerfile, built without a registry, and run (tools/ci/check_container.sh)
#         wheel    the Python package as a portable wheel: its tag, size and symbols; used in an empty environment
#         tidy     clang-tidy over the sources that ship (tools/lint.sh tidy)
#         upgrade  the last release of the protocol before this one against this one (tools/ci/test_upgrade.sh)
#         megatron two models on the real Megatron, in both of its releases (tools/test_engines.sh megatron runs all)
#         ray      a fleet on a Ray cluster of a lab's hosts (tools/test_engines.sh ray)
#         gpu      the CUDA code without a device: all tests that want one, over an emulated runtime (five minutes)
#         arm64    only when it is named: cross-compiled, under qemu-user: formats, kernels, shared memory, writer, updates
#                  (tools/ci/check_arm64.sh)
#         chaos    ten minutes of killing, stopping, damaging and flooding real processes (tools/chaos.sh)
set -uo pipefail
cd "$(dirname "$0")/.." || exit

jobs=$(nproc)
test_jobs=$((2 * jobs)) # most tests wait more than they compute
reports=build/reports # of every test how long it took, as JUnit's XML
mkdir -p "$reports"
passed=0
failed=0
skipped=0
skips=
share=OFF
if [[ ${1:-} == --share ]]; then
  share=ON
  shift
fi
stages=("$@")
((${#stages[@]})) || stages=(release lint docs install operating asan python wheel container tsan tidy upgrade megatron ray gpu chaos)

finish() {
  if [[ -n ${skips//[[:space:]]/} ]]; then printf 'skipped, with their reasons:\n%s' "$(sed '/^[[:space:]]*$/d' <<<"$skips")"$'\n'; fi
  if ((skipped)); then echo "$skipped skipped whole"; fi
  echo "$passed passed, $failed failed"
  if ((failed)); then exit 1; else exit 0; fi
}

# step NAME COMMAND...: one check; ends the run if it fails. A command that ends with 77 has skipped all of it. What it
# printed of its skips (`skipped: REASON`, or unittest's `skipped 'REASON'`) is named at the end.
step() {
  local name=$1 began=$SECONDS status=0 log
  shift
  echo "== $name"
  log=$(mktemp)
  "$@" 2>&1 | tee "$log" || status=$?
  skips+=$(sed -nE "s/^.* skipped(: | ')([^']*)'?\$/  $name: \2/p" "$log" | sort -u)$'\n'
  rm -f "$log"
  case $status in
    0)
      passed=$((passed + 1))
      echo "== $name: ok, $((SECONDS - began)) s"
      ;;
    77)
      skipped=$((skipped + 1))
      echo "== $name: skipped"
      ;;
    *)
      failed=$((failed + 1))
      echo "== $name: FAILED"
      finish
      ;;
  esac
}

# shellcheck disable=SC2317  # called through step
configure() {
  local log
  log=$(cmake --preset "$1" -DDELTASYNC_SHARE_TESTS="$share" "${@:2}" 2>&1) || { echo "$log"; return 1; }
}

# left_to_other PRESET, run_by PRESET: the tests that a build has disabled for the other one, and those that it runs.
left_to_other() { ctest --preset "$1" -N | sed -nE 's/^ *Test +#[0-9]+: (\S+) \(Disabled\)$/\1/p' | sort; }
# shellcheck disable=SC2317  # called through step
run_by() { ctest --preset "$1" -N | sed -nE 's/^ *Test +#[0-9]+: (\S+)$/\1/p' | sort; }

# shellcheck disable=SC2317  # called through step
each_is_run() {
  local lost
  configure release && configure asan || return
  lost=$(sort -u <(comm -23 <(left_to_other release) <(run_by asan)) <(comm -23 <(left_to_other asan) <(run_by release)))
  [[ -z $lost ]] || { echo "neither build runs: $lost"; return 1; }
}

build() {
  step "$1: configure" configure "$1"
  step "$1: build" cmake --build --preset "$1" -j "$jobs"
}

# tests PRESET [ctest arguments]: counts what ctest counted. A skipped entry counts as neither passed nor failed; every
# skipped case is named with its reason at the end.
tests() {
  local preset=$1 report total wrong left others status
  shift
  echo "== $preset: tests"
  report=$PWD/$reports/$preset.xml
  status=0
  ctest --preset "$preset" -j "$test_jobs" --output-junit "$report" \
    --test-output-size-passed 1000000 "$@" || status=$?
  slowest "$preset" "$report"
  total=$(junit_count tests "$report")
  wrong=$(junit_count failures "$report")
  left=$(junit_count skipped "$report")
  others=$(junit_count disabled "$report")
  if ((others)); then echo "== $preset: $others left to the other build: $(left_to_other "$preset" | xargs)"; fi
  skips+=$(skip_reasons "$preset" "$report")$'\n'
  passed=$((passed + total - wrong - left - others))
  failed=$((failed + wrong))
  skipped=$((skipped + left))
  if ((total == 0)); then
    echo "== $preset: ctest ran no test"
    failed=$((failed + 1))
  elif ((status != 0 && wrong == 0)); then
    echo "== $preset: ctest ended with $status"
    failed=$((failed + 1))
  fi
  if ((failed)); then finish; fi
}

# junit_count ATTRIBUTE REPORT: a count of the report's first element, 0 if there is none.
junit_count() {
  local count
  count=$(sed -nE "s/^(.*[[:space:]])?$1=\"([0-9]+)\".*/\2/p" "$2" | head -n 1)
  echo "${count:-0}"
}

# slowest NAME REPORT: the ten that took longest, in seconds.
slowest() {
  echo "== $1: the slowest, in seconds ($2 has all)"
  sed -nE 's/.*<testcase .*name="([^"]+)".* time="([0-9.]+)".*/\2 \1/p' <(sed 's/<testcase/\n<testcase/g' "$2") |
    sort -rn | head -n 10
}

# skip_reasons PRESET REPORT: the reasons for which GoogleTest cases skipped themselves.
skip_reasons() {
  sed -nE "/: Skipped\$/{n;s/^/  $1: /p}" "$2" | sort -u
}

# The tests of code that runs on several threads or shares memory, by name; and the kernels, whose masks g++ 12 got wrong
# under the register pressure of this build.
concurrent='^test_(base_thread|base_trace|base_until|delta_(decode_)?kernels|delta_merge|shm|net|writer|agent|receiver|relay|gpu_(fake|emul))'
# Long walks on one thread, which take this build many minutes; their pools run in test_receiver_pull and test_delta_merge
# as well.
one_thread='^test_(shm_model|receiver_target_conformance|delta_merge_scalar)'

run_stage() {
  case $1 in
    release)
      build release
      tests release
      ;;
    asan)
      build asan
      tests asan
      step "fuzz" tools/fuzz.sh --seconds 5
      ;;
    tsan) run_tsan ;;
    lint) step "lint" tools/lint.sh ;;
    docs)
      step "docs: site" tools/build_docs.sh
      step "docs: words" python3 tools/docs/budget.py
      step "docs: release build" tools/build.sh -j "$jobs" --target deltasync deltasync-agent
      step "docs: python build" tools/build_python.sh "$jobs"
      step "docs: snippets" python3 tools/docs/snippets.py
      ;;
    python) run_python ;;
    install)
      build release
      step "install" tools/ci/check_install.sh build build/install-check
      ;;
    operating)
      build release
      step "operating" tools/ci/check_operating.sh build
      ;;
    container) step "container" tools/ci/check_container.sh build/container ;;
    wheel) step "wheel" tools/ci/check_wheel.sh build/wheel ;;
    upgrade) step "upgrade" tools/ci/test_upgrade.sh build ;;
    tidy)
      step "asan: configure" configure asan
      step "clang-tidy" tools/lint.sh tidy
      ;;
    megatron) step "megatron" tools/test_engines.sh megatron -- -k 'qwen3_moe-tp2-pp2-ep2] or gpt_oss-tp2-pp2' ;;
    ray) step "ray" tools/test_engines.sh ray ;;
    gpu) run_gpu ;;
    arm64) step "arm64" tools/ci/check_arm64.sh build-arm64 ;;
    chaos) step "chaos" tools/chaos.sh --minutes 10 ;;
  esac
}

# What ctest runs a part of: without its filters, and with other orders of threads each time.
run_gpu() {
  local name programs toolkit=()
  if ! command -v nvcc >/dev/null && [[ ! -x /usr/local/cuda/bin/nvcc ]]; then
    if tools/cuda_wheels.sh; then
      toolkit=(-DCMAKE_CUDA_COMPILER="$PWD/build/cuda/bin/nvcc" -DCUDAToolkit_ROOT="$PWD/build/cuda")
    fi
  fi
  if tools/install_deps.sh --gpu && tools/cuda_wheels.sh --toolkit 12; then
    toolkit+=(-DDELTASYNC_EMULATED_CUDA12="$PWD/build/cuda12")
  else
    step "gpu: CUDA 12" bash -c 'echo "skipped: there is no clang 19, or tools/cuda_wheels.sh brought no headers of CUDA 12"; exit 77'
  fi
  step "gpu: configure" configure release "${toolkit[@]}"
  mapfile -t programs < <(ninja -C build -t targets all | sed -nE 's/^(test_[a-z0-9_]+_emulated): phony.*/\1/p' | sort -u)
  if ((${#programs[@]} == 0)); then
    step "gpu" bash -c 'echo "skipped: there is no nvcc, which makes the kernels'"'"' PTX, and tools/cuda_wheels.sh brought none"; exit 77'
    return
  fi
  step "gpu: build" cmake --build --preset release -j "$jobs" --target "${programs[@]}"
  for name in "${programs[@]}"; do
    step "gpu: $name" env DELTASYNC_EMULATED_SEED="$RANDOM" "build/tests/$name" --gtest_brief=1
  done
}

run_tsan() {
  local targets
  step "tsan: configure" configure tsan
  mapfile -t targets < <(ninja -C build-tsan -t targets all | sed -nE 's/^(test_[a-z0-9_]+): phony.*/\1/p' |
    grep -E "$concurrent" | grep -vE "$one_thread" | sort -u)
  if ((${#targets[@]} == 0)); then
    echo "== tsan: no target matches $concurrent"
    failed=$((failed + 1))
    finish
  fi
  step "tsan: build" cmake --build --preset tsan -j "$jobs" --target "${targets[@]}"
  tests tsan -R "$concurrent" -E "$one_thread"
}

run_python() {
  local report bin=build/python-venv/bin status=0 total wrong left
  step "python: build" tools/build_python.sh "$jobs"
  step "python: mypy" env MYPYPATH=build/python "$bin/mypy" -p deltasync
  step "python: mypy of the lab" env MYPYPATH=tools:tools/lab "$bin/mypy" tools/lab.py tests/lab/*.py
  echo "== python: tests"
  report=$reports/python.xml
  # More than one at a time: they wait for other processes more than they compute.
  PYTHONPATH=build/python "$bin/python" -m pytest -q -rs -n "$((jobs + 1))" --dist worksteal --junitxml "$report" \
    tests/python || status=$?
  slowest python "$report"
  total=$(junit_count tests "$report")
  wrong=$(($(junit_count failures "$report") + $(junit_count errors "$report")))
  left=$(junit_count skipped "$report")
  passed=$((passed + total - wrong - left))
  failed=$((failed + wrong))
  if ((total == 0 || (status != 0 && wrong == 0))); then
    echo "== python: pytest ended with $status after $total tests"
    failed=$((failed + 1))
  fi
  if ((failed)); then finish; fi
}

for stage in "${stages[@]}"; do
  case $stage in
    release | asan | tsan | lint | install | operating | container | docs | python | wheel | tidy | upgrade | megatron | ray | gpu | arm64 | chaos) ;;
    *)
      echo "test.sh: no stage '$stage'" >&2
      exit 2
      ;;
  esac
done
if [[ $share == ON && ! (" ${stages[*]} " == *" release "* && " ${stages[*]} " == *" asan "*) ]]; then
  echo "test.sh: --share wants the stages release and asan" >&2
  exit 2
fi
# The quickstart's python has the safetensors package, which some tests want and Debian does not have.
if [[ -x build/quickstart/venv/bin/python3 ]]; then PATH=$PWD/build/quickstart/venv/bin:$PATH; fi
step "dependencies" tools/install_deps.sh
if [[ $share == ON ]]; then step "each shared test is run" each_is_run; fi
for stage in "${stages[@]}"; do
  run_stage "$stage"
done
finish
